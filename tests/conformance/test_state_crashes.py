"""Every cell of the matrix by crashes: a driver dies at each step and after each key that the state's store writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from support.state_run import TRUTH, StateWorld

from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.trident.state.matrix import REFUSED, Service, service
from stormproof.trident.state.protocol import SourceKind, StateKind

EXACTLY, AT_LEAST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
Cell: TypeAlias = tuple[SourceKind, StateKind]


def cells(*of: Service) -> list[Cell]:
    """The pairs of a source and a state that give one of these."""
    return [(source, state) for source in SourceKind for state in StateKind if service(source, state) in of]


def cell_id(cell: Cell) -> str:
    source, state = cell
    return f"{source}-{state}"


def ends(
    folder: Path, cell: Cell, guarantee: Guarantee, *, first: int = 1, step: int = 1
) -> Iterator[tuple[str, Counter[str]]]:
    """What the state holds in the end, for a driver that died at each place."""
    places = StateWorld(folder / "whole", *cell).lives(guarantee, None)[0].place
    assert places > 30
    for at in range(first, places + 1, step):
        world = StateWorld(folder / str(at), *cell)
        (reaper,) = world.lives(guarantee, at)
        yield reaper.names[-1], world.totals()


def doubled(found: Counter[str]) -> bool:
    return any(found[word] > n for word, n in TRUTH.items())


def lost(found: Counter[str]) -> bool:
    return any(found[word] < n for word, n in TRUTH.items())


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is not asked, so that a cell that it refuses can be seen at work."""
    monkeypatch.setattr("stormproof.trident.state.sink.require_served", lambda *_, **__: None)


@pytest.mark.parametrize("cell", cells(Service.EXACTLY_ONCE), ids=cell_id)
@pytest.mark.parametrize("part", range(4))
def test_exactly_once_is_exact_wherever_the_driver_dies(tmp_path: Path, cell: Cell, part: int) -> None:
    reached: set[str] = set()
    for place, found in ends(tmp_path, cell, EXACTLY, first=1 + part, step=4):
        assert found == TRUTH, f"died at {place}"
        reached.add(place.split(" ")[0])
    assert "store.wrote" in reached


@pytest.mark.parametrize("cell", cells(Service.EXACTLY_ONCE), ids=cell_id)
def test_exactly_once_is_exact_where_recovery_dies_too(tmp_path: Path, cell: Cell) -> None:
    places = StateWorld(tmp_path / "whole", *cell).lives(EXACTLY, None)[0].place
    for at in range(2, places, 16):
        for again in (3, 9):
            world = StateWorld(tmp_path / f"{at}-{again}", *cell)
            world.lives(EXACTLY, at, again)
            assert world.totals() == TRUTH


@pytest.mark.parametrize("cell", cells(*REFUSED), ids=cell_id)
def test_a_refused_cell_is_refused_by_name(tmp_path: Path, cell: Cell) -> None:
    world = StateWorld(tmp_path, *cell)
    with pytest.raises(TopologyError) as caught:
        world.run(EXACTLY)
    for word in ("'counts'", "'lines'", *cell, *REFUSED[service(*cell)]):
        assert word in str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("cell", cells(Service.DOUBLES), ids=cell_id)
def test_what_the_matrix_says_doubles_does_double(tmp_path: Path, cell: Cell) -> None:
    found = [(place, end) for place, end in ends(tmp_path, cell, EXACTLY, step=3)]
    assert any(doubled(end) for _, end in found)
    assert not any(lost(end) for _, end in found)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("cell", cells(Service.UNSERVED), ids=cell_id)
def test_what_the_matrix_says_of_forgetful_sources_is_so(tmp_path: Path, cell: Cell) -> None:
    assert any(lost(end) for _, end in ends(tmp_path, cell, EXACTLY, step=4))


@pytest.mark.parametrize("state", list(StateKind))
@pytest.mark.parametrize("source", [SourceKind.TRANSACTIONAL, SourceKind.OPAQUE])
def test_at_least_once_loses_nothing_and_doubles_with_every_state(
    tmp_path: Path, source: SourceKind, state: StateKind
) -> None:
    """Its batches come again under another txid, which no state can know for the old one."""
    found = [end for _, end in ends(tmp_path, (source, state), AT_LEAST, step=7)]
    assert not any(lost(end) for end in found)
    assert any(doubled(end) for end in found)


def test_every_step_of_a_state_is_passed(tmp_path: Path) -> None:
    (reaper,) = StateWorld(tmp_path, SourceKind.TRANSACTIONAL, StateKind.OPAQUE).lives(EXACTLY, None)
    assert {"state.after_begin", "state.after_rows", "state.after_commit"} <= set(reaper.names)
