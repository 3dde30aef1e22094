"""The suite for sources catches sources that are broken on purpose: one broken promise each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from support.source_harness import MemoryHarness
from support.source_suite import failing

from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.dead_letter import DeadLetter, Disposal
from stormproof.core.contract.source import Expectation, Lease, Limit, Resolution, Slice, SliceReader
from stormproof.core.pending.connector import NextMessages
from stormproof.core.pending.numbered import next_of
from stormproof.core.pending.rows import At, PendingRows, SliceRow
from stormproof.core.source.memory import MemorySource


class ForgetsAborts(MemorySource):
    def abort(self, lease: Lease, tx: object | None = None) -> None:
        self.confirm(lease, (), tx)


class ConfirmsForStaleOwners(MemorySource):
    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        with self.rows() as rows:
            now = next((row for row in rows.unresolved() if row.owner), None)
        if now is not None and now.owner is not None:
            lease = Lease(now.owner, now.epoch)
        return super().confirm(lease, failed, tx)


class KnowsNoEpochs(MemorySource):
    def subscribe(self, subscription: str, epoch: int) -> None:
        super().subscribe(subscription, max(epoch, self._newest()))

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        return super().open(replace(lease, epoch=self._newest()), limit, seed, tx)

    def _newest(self) -> int:
        with self.rows() as rows:
            found = rows.lock()
        return 0 if found is None else found[0]


class HandsOneOutTwice(MemorySource):
    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        found = super().next(position, limit, seed, cursor)
        if found is None or found.piece.messages == 1:
            return found
        return replace(found, position={"next": next_of(found.position) - 1})


class SkipsOne(MemorySource):
    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        found = super().next(position, limit, seed, cursor)
        if found is None or self.stop(cursor) <= next_of(found.position):
            return found
        return replace(found, position={"next": next_of(found.position) + 1})


@dataclass(frozen=True)
class Altered:
    """A reader whose batches are changed."""

    inner: SliceReader
    change: Callable[[pa.RecordBatch], pa.RecordBatch]
    excludes: bool = True

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for batch in self.inner.read(seed, excluded if self.excludes else frozenset(), batch_rows):
            yield self.change(batch)


class RepeatsOneAndSkipsAnother(MemorySource):
    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        return tuple(Altered(inner, _doubled_first) for inner in super().readers(slice_, parallelism))


def _doubled_first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array([0, *range(batch.num_rows - 1)])) if batch.num_rows > 1 else batch


class LeavesNothingOut(MemorySource):
    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        return tuple(
            Altered(inner, lambda batch: batch, excludes=False) for inner in super().readers(slice_, parallelism)
        )


class ReadsOnlyOnce(MemorySource):
    _read: set[str]

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        key = str(slice_.position)
        read = self.__dict__.setdefault("_read", set[str]())
        parts = super().readers(slice_, parallelism)
        if key in read:
            return super().readers(replace(slice_, position={**slice_.position, "range": [0, 0]}), parallelism)
        read.add(key)
        return parts


class ExpectsOneMore(MemorySource):
    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        right = super().expect(slice_, seed, excluded, tx)
        return replace(right, messages=right.messages + 1)


class ExpectsTheFirstSeedAlways(MemorySource):
    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        return super().expect(slice_, 7, excluded, tx)


class ConfirmsFailedMessages(MemorySource):
    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        return super().confirm(lease, (), tx)


class NeverGivesUp(MemorySource):
    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        return super().confirm(lease, [replace(failure, counted=False) for failure in failed], tx)


class CountsReturnedMessages(MemorySource):
    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        return super().confirm(lease, [replace(failure, counted=True) for failure in failed], tx)


class LetsHeldLeasesRunOut(MemorySource):
    def pin(self, lease: Lease, tx: object | None = None) -> None:
        self.extend(lease)


class NoLeaseRunsOut(MemorySource):
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        return super().open(replace(lease, seconds=1e9), limit, seed, tx)


class IgnoresLimits(MemorySource):
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        return super().open(lease, Limit(1_000_000), seed, tx)


class CountsADeathAtEveryRecovery(MemorySource):
    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        owners = super().recover(epoch, tx)
        with self.rows() as rows:
            for row in rows.unresolved():
                if row.owner is not None and rows.give_back(Lease(row.owner, epoch)):
                    rows.open(replace(row, owner=None), Lease(row.owner, epoch))
        return owners


class CountsNoDeaths(MemorySource):
    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        owners = super().recover(epoch, tx)
        with self.rows() as rows:
            for row in rows.unresolved():
                rows.shrink(replace(row, deaths=0))
        return owners


class SplitsNothing(MemorySource):
    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        self.abort(lease, tx)


class SplitsWithoutSuspects(MemorySource):
    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        super().split(slice_, lease, (), tx, parts)


class DropsForGood(MemorySource):
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        return tuple(letter for letter in super().dead_letters() if letter.disposal is not Disposal.DROP)


class RequeuesWithTheOldCount(MemorySource):
    def _known(
        self, rows: PendingRows, row: SliceRow, ids: Sequence[int]
    ) -> tuple[Mapping[int, tuple[int, int]], Mapping[int, bytes]]:
        before, payloads = super()._known(rows, row, ids)
        requeued = {letter.id for letter in self.dead_letters() if letter.disposal is Disposal.REQUEUE}
        again = self._max_attempts
        return {id_: (failed + again * (id_ in requeued), opened) for id_, (failed, opened) in before.items()}, payloads


class CutsMates(MemorySource):
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        return super().open(lease, replace(limit, whole=False), seed, tx)


class IgnoresNames(MemorySource):
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        return super().open(lease, replace(limit, mates=None), seed, tx)


class KeepsALeaseFromItsMates(MemorySource):
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        with self.rows() as rows:
            leased = {row.mates for row in rows.unresolved() if row.owner is not None}
        return None if (limit.mates or frozenset()) & leased else super().open(lease, limit, seed, tx)


BROKEN: list[tuple[type[MemorySource], str]] = [
    (ForgetsAborts, "aborted_messages_come_first_and_whole"),
    (ConfirmsForStaleOwners, "a_lease_that_ran_out_goes_to_another"),
    (KnowsNoEpochs, "a_new_epoch_takes_the_leases_and_the_old_one_can_do_nothing"),
    (HandsOneOutTwice, "confirmed_messages_do_not_come_again"),
    (SkipsOne, "messages_put_later_are_opened_later"),
    (RepeatsOneAndSkipsAnother, "a_slice_is_read_as_it_was_opened"),
    (LeavesNothingOut, "tokens_depend_on_the_seed_and_the_expectation_follows"),
    (ReadsOnlyOnce, "a_slice_is_read_as_it_was_opened"),
    (ExpectsOneMore, "tokens_depend_on_the_seed_and_the_expectation_follows"),
    (ExpectsTheFirstSeedAlways, "tokens_depend_on_the_seed_and_the_expectation_follows"),
    (ConfirmsFailedMessages, "failed_messages_wait_then_come_in_a_batch_of_their_own"),
    (NeverGivesUp, "a_message_that_fails_too_often_is_a_dead_letter_with_its_history"),
    (CountsReturnedMessages, "returned"),
    (LetsHeldLeasesRunOut, "a_held_lease_never_runs_out"),
    (NoLeaseRunsOut, "a_lease_that_ran_out_goes_to_another"),
    (IgnoresLimits, "limits_by_messages_and_by_bytes"),
    (CountsADeathAtEveryRecovery, "a_driver_that_dies_in_recovery_has_not_died_of_the_messages"),
    (CountsNoDeaths, "a_slice_that_took_two_drivers_down_is_opened_in_halves"),
    (SplitsNothing, "halves_on_request"),
    (SplitsWithoutSuspects, "suspects_are_set_apart"),
    (DropsForGood, "a_dropped_dead_letter_is_recorded_and_never_comes_again"),
    (CutsMates, "a_returned_batch_is_whole_again"),
    (IgnoresNames, "mates_are_retried_together_and_asked_for_by_name"),
    (KeepsALeaseFromItsMates, "mates_come_though_their_own_lease_has_not_run_out"),
    (RequeuesWithTheOldCount, "a_requeued_dead_letter_comes_again_with_its_failures_counted_anew"),
]


class EditsNothing(MemorySource):
    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        return super().edit(message, self.dead_letters()[-1].payload, by=by, why=why)


class ForgetsTheEditAtTheNextFailure(MemorySource):
    forgot = False

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        self.forgot = True
        return super().confirm(lease, failed, tx)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        if self.forgot and slice_.retry:
            first = slice_.replayed[0][0]
            return self.parts({"range": [first, first + len(slice_.replayed)]}, parallelism)
        return super().readers(slice_, parallelism)


class EditsTheRecord(MemorySource):
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        return tuple(replace(letter, payload=letter.new_payload or letter.payload) for letter in super().dead_letters())


EDITS = "an_edited_dead_letter_comes_again_with_its_new_payload_and_its_old_id"
BROKEN.extend([(EditsNothing, EDITS), (ForgetsTheEditAtTheNextFailure, EDITS), (EditsTheRecord, EDITS)])


class BrokenHarness(MemoryHarness):
    """A harness over a broken source."""

    def __init__(self, broken: type[MemorySource]) -> None:
        self.broken = broken
        super().__init__()

    def __post_init__(self) -> None:
        self.store = self.broken("lines", max_attempts=self.max_attempts, clock=self.clock, rng=Random(1))


def test_a_right_source_passes_every_case() -> None:
    assert failing(MemoryHarness) == set()
    assert failing(lambda: BrokenHarness(MemorySource)) == set()


@pytest.mark.parametrize(("broken", "case"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_a_broken_source_is_caught(broken: type[MemorySource], case: str) -> None:
    failed = failing(lambda: BrokenHarness(broken))
    assert any(case in name for name in failed), failed
