"""A message that takes its worker down is found: by the note of what was in hand, and without one by halves.

The worker's death is played in this process: a function that raises KeyboardInterrupt, which is nobody's failure, ends its
task with the note of the message in hand still written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.memory_run import World

from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease, Slice
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.heartbeat.listener import JobSigns
from stormproof.core.source import memory
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import EventKind

MESSAGES = 32
LEVELS = round(math.log2(MESSAGES))
CULPRIT = 13
WITH_NOTES_MAX = 4
"""The whole batch; then what lies before the culprit, the culprit, and what lies behind it."""
WITHOUT_NOTES_MAX = 1 + 2 * LEVELS


class Fragile(InlineEngine):
    """An engine whose job dies with the worker."""

    def run(self, job: Job) -> JobReport:
        try:
            return super().run(job)
        except KeyboardInterrupt:
            raise JobFailed("a worker died") from None


def split(line: str) -> list[str]:
    if line.startswith("deadly"):
        raise KeyboardInterrupt
    return line.split()


def world_of(folder: Path, culprits: Sequence[int] = (CULPRIT,)) -> World:
    payloads = [b"deadly" if i in culprits else b"m%d" % i for i in range(MESSAGES)]
    return World(payloads, folder / "world", split=split, batch_messages=MESSAGES, max_attempts=1)


def blamed(world: World) -> set[int]:
    """Every message that failed, was returned, came again or died, by the ledger and by the source."""
    kinds = [k.value for k in (EventKind.FAILURE, EventKind.RETURNED, EventKind.REPLAY, EventKind.DEAD_LETTER)]
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        rows = tx.connection.execute(sa.select(t.event.c.message).where(t.event.c.kind.in_(kinds))).all()
    return {int(row.message) for row in rows} | {letter.id for letter in world.source.dead_letters()}


def is_exact(world: World, culprits: Sequence[int] = (CULPRIT,)) -> bool:
    """Whether every innocent message was applied once, and nothing of the culprits."""
    return world.counts() == Counter(f"m{i}" for i in range(MESSAGES) if i not in culprits)


def test_the_message_in_hand_is_set_apart_at_once(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    statistics = world.run(engine=Fragile(2), heartbeat_root=tmp_path / "heartbeat")
    assert statistics.batches <= WITH_NOTES_MAX
    assert blamed(world) == {CULPRIT}
    assert is_exact(world)
    (letter,) = world.source.dead_letters()
    assert (letter.reason, letter.times_failed) == (FailureReason.WORKER_LOST.value, 1)
    assert list((tmp_path / "heartbeat").iterdir()) == []


def test_several_culprits_are_set_apart_one_after_the_other(tmp_path: Path) -> None:
    culprits = (0, 13, MESSAGES - 1)
    world = world_of(tmp_path, culprits)
    statistics = world.run(engine=Fragile(2), heartbeat_root=tmp_path / "heartbeat")
    assert blamed(world) == set(culprits)
    assert is_exact(world, culprits)
    assert statistics.batches <= WITH_NOTES_MAX * len(culprits)


def test_without_notes_it_is_found_by_halves_in_more_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the notes: what is found is the same, and takes the logarithm of the batch's size."""
    monkeypatch.setattr(JobSigns, "suspects", lambda heard: ())
    world = world_of(tmp_path)
    statistics = world.run(engine=Fragile(2), heartbeat_root=tmp_path / "heartbeat")
    assert WITH_NOTES_MAX < statistics.batches <= WITHOUT_NOTES_MAX
    assert blamed(world) == {CULPRIT}
    assert is_exact(world)


def test_notes_that_are_wrong_cost_batches_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobSigns, "suspects", lambda heard: (CULPRIT + 1,))
    world = world_of(tmp_path)
    statistics = world.run(engine=Fragile(2), heartbeat_root=tmp_path / "heartbeat")
    assert statistics.batches <= WITHOUT_NOTES_MAX + 3
    assert blamed(world) == {CULPRIT}
    assert is_exact(world)


def test_a_source_that_counts_the_innocents_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the counting: each division counts a failure for all of its messages."""

    def split_and_count(
        source: memory.MemorySource,
        slice_: Slice,
        lease: Lease,
        alone: Sequence[int] = (),
        tx: object | None = None,
        parts: int = 2,
    ) -> None:
        failures: list[MessageFailure] = []
        for reader in source.readers(slice_, 1):
            for rows in reader.read(0, frozenset(), MESSAGES):
                failures += [
                    MessageFailure(MessageId(id_), 0, Token(0), FailureReason.WORKER_LOST, "words", "it was there")
                    for id_ in rows.column("id").to_pylist()
                ]
        source.confirm(lease, failures)

    monkeypatch.setattr(memory.MemorySource, "split", split_and_count)
    world = world_of(tmp_path)
    world.run(engine=Fragile(2), heartbeat_root=tmp_path / "heartbeat")
    assert blamed(world) != {CULPRIT}
    assert not is_exact(world)
