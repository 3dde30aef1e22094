"""What the ledger records of each component agrees with the input, whichever drivers, workers and rows are lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from stormproof import MemorySink, MemorySource, Topology, count
from stormproof.core.base.message import Guarantee
from stormproof.core.tracking.acker import ACKER
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.verdict import JobReport, TaskCounts
from stormproof.testing import Faults, simulate, simulation
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.jobs import Flight
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import memory_ledger_engine

LINES = [" ".join("abcdefg"[: n % 8]) + f" m{n}" for n in range(24)]
LOSSES = Faults(driver_deaths=0.02, worker_deaths=0.03, drops=0.02, duplicates=0.02, timeouts=0.01, delays=0.02)
SEEDS = range(5)
DYING = Faults(driver_deaths={"commit.before_sink": 0.3})

Found = tuple[dict[str, Counter[str]], Counter[tuple[str, str]]]


def topology(folder: Path) -> Topology:
    """Words to one sink, and by an exchange to another."""
    t = Topology("counted")
    lines = t.stream("lines", MemorySource("lines", [], schema="line string"))
    words = lines.flat_map(str.split, "line", schema="word string", name="split")
    words.into(MemorySink("words", staging=folder))
    words.group_by("word").aggregate(n=count(), name="tally").into(MemorySink("tallies", staging=folder))
    return t


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[sa.Engine]]:
    """The ledgers of the simulations."""
    made: list[sa.Engine] = []

    def kept() -> sa.Engine:
        made.append(memory_ledger_engine())
        return made[-1]

    monkeypatch.setattr(simulation, "memory_ledger_engine", kept)
    yield made
    for engine in made:
        engine.dispose()


def sums(engine: sa.Engine) -> Found:
    """What is recorded of each component and each edge, added up."""
    components: dict[str, Counter[str]] = defaultdict(Counter)
    edges: Counter[tuple[str, str]] = Counter()
    with engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
        for row in connection.execute(sa.select(t.txn_component)):
            numbers = {"executed": row.executed, "emitted": row.emitted, "acked": row.acked, "failed": row.failed}
            components[row.component].update(numbers)
        for row in connection.execute(sa.select(t.txn_edge)):
            edges[row.origin, row.target] += row.tuples
    return dict(components), edges


def differs(folder: Path, recorded: list[sa.Engine], seed: int, guarantee: Guarantee, faults: Faults = LOSSES) -> bool:
    """Whether the record of one simulation differs from what the input alone says."""
    run = simulate(topology(folder), LINES, seed=seed, guarantee=guarantee, faults=faults, batch_messages=7)
    messages = len(run.acked)  # the others failed, each alone in its batch: nothing was kept
    words = sum(len(message.payload.split()) for message in run.acked)
    components, edges = sums(recorded[-1])
    tally = components["tally"]
    wanted: dict[str, Any] = {
        "lines": {"executed": messages, "emitted": messages, "acked": messages},
        "split": {"executed": messages, "emitted": words, "acked": messages},
        "words": {"executed": words, "acked": words},
        "tally": {"executed": words, "emitted": tally["emitted"], "acked": words},
        "tallies": {"executed": tally["emitted"], "acked": tally["emitted"]},
        ACKER: {"executed": components[ACKER]["executed"], "emitted": messages, "acked": messages},
    }
    found = {
        name: {what: n for what, n in numbers.items() if n and what != "failed"} for name, numbers in components.items()
    }
    between = {
        ("lines", "split"): messages,
        ("split", "words"): words,
        ("split", "tally"): words,
        ("tally", "tallies"): tally["emitted"],
    }
    return (found, edges) != (wanted, between)


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_agree_with_the_input_after_kills(seed: int, tmp_path: Path, recorded: list[sa.Engine]) -> None:
    assert not differs(tmp_path, recorded, seed, Guarantee.EXACTLY_ONCE)


def test_counts_of_dead_attempts_are_caught(
    tmp_path: Path, recorded: list[sa.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each report of a batch's jobs adds to those of its attempts before."""
    before, whole = Coordinator.__dict__["_job_ended"], dict[int, TaskCounts]()

    def adding(self: Coordinator, batch: Flight, result: JobReport | JobDied) -> None:
        if isinstance(result, JobReport):
            counts = whole.setdefault(batch.opened.txid, TaskCounts())
            counts.add(result.counts)
            result = replace(result, counts=counts)
        before(self, batch, result)

    monkeypatch.setattr(Coordinator, "_job_ended", adding)
    twice = Faults(drops={"stage 1": 0.2})
    assert differs(tmp_path, recorded, 1, Guarantee.EXACTLY_ONCE, twice)


def test_counts_of_a_batch_that_was_given_up_are_caught(
    tmp_path: Path, recorded: list[sa.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: under at-least-once a driver dies between the record and the commit, and the record is kept."""
    assert not differs(tmp_path, recorded, 2, Guarantee.AT_LEAST_ONCE, DYING)
    monkeypatch.setattr(txns, "remove_counts", lambda tx, txid: None)
    assert differs(tmp_path, recorded, 2, Guarantee.AT_LEAST_ONCE, DYING)
