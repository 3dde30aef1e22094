"""The coordinator over memory: source, sink and ledger without a database or Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.errors import PositionMismatch
from stormproof.core.guarantee import Guarantee
from stormproof.trident.ledger.ledger import ADOPTED
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.transaction import EventKind


@pytest.mark.parametrize("guarantee", Guarantee)
@pytest.mark.parametrize("fold", [True, False])
def test_without_a_crash_every_guarantee_gives_the_same(guarantee: Guarantee, fold: bool, tmp_path: Path) -> None:
    payloads = [f"a b m{i}".encode() for i in range(10)]
    world = World(payloads, tmp_path, fold=fold, sinks=2)
    statistics = world.run(guarantee)
    expected = Counter(word for p in payloads for word in p.decode().split())
    assert world.counts(0) == world.counts(1) == expected
    assert statistics.batches == 3
    assert statistics.messages == 10
    assert statistics.stopped == "idle"


def test_a_table_of_another_life_is_refused_until_it_is_adopted(tmp_path: Path) -> None:
    """A ledger that was lost and made anew must not write over what the first one committed."""
    first = World([b"a b"], tmp_path / "first")
    first.run()
    second = World([b"a b"], tmp_path / "second", first_incarnation=1)
    for mine, theirs in zip(second.sinks, first.sinks, strict=True):
        mine.store = theirs.store
    with pytest.raises(PositionMismatch, match="stormproof ledger adopt words life0"):
        second.run()
    with second.ledger.transaction(Run("words", "life1", 1)) as tx:
        second.ledger.record(tx, [Event(EventKind.OPERATOR, message="life0", reason=ADOPTED)])
    second.run()
    assert second.counts() == Counter({"a": 2, "b": 2})
