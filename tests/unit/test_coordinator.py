"""The coordinator over memory: source, sink and ledger without a database or Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.guarantee import Guarantee


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
