"""Faults of the environment, one row each: what the run says, its exit status, that nobody is blamed, and how it goes on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from support.fault_stand import QUEUE, Fault, NotHere, place_in, try_fault
from support.fault_table import faults, page
from support.queues import put
from support.restarts import restarts

from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.postgres

TRIED = 6
"""Faults that one run of the tests tries, drawn by its seed; `make torture ARGS='--only environment'` tries all."""

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

_numbers = itertools.count(1)


@pytest.mark.parametrize("number", range(TRIED))
def test_a_fault_of_the_environment(number: int, server: EmbeddedPostgres, tmp_path: Path, seed: int) -> None:
    quick = [fault for fault in faults() if not fault.slow]
    fault = random.Random(seed).sample(quick, TRIED)[number]
    with place_in(tmp_path, server, f"fault_{next(_numbers)}") as place:
        try:
            try_fault(place, fault)
        except NotHere as reason:
            pytest.skip(str(reason))


def test_control_a_fault_that_is_a_messages_own_is_seen(server: EmbeddedPostgres, tmp_path: Path) -> None:
    with place_in(tmp_path, server, f"fault_{next(_numbers)}") as place:
        put(place.database, QUEUE, [b"no UTF-8: \xff"])
        with pytest.raises(AssertionError, match="blamed"):
            try_fault(place, Fault("none", "", status=0))


def test_postgres_restarts_below_fourteen_sinks(server: EmbeddedPostgres, tmp_path: Path, seed: int) -> None:
    assert list(restarts(server, tmp_path, seed, 1))


def test_the_page_has_every_fault() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it anew: .venv/bin/python tools/faults_doc.py"
