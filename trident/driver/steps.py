"""The steps of a transaction, each one ledger transaction or one sink commit; the loop and recovery share them.

Where the source is in the ledger's database, a step is one database transaction for both. Where it is not, the order of the
two writes lets recovery tell what is owed: see each step.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from stormproof.core.base.errors import (
    FatalError,
    Fenced,
    Json,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    TransientError,
)
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee, MessageFailure, storable_text
from stormproof.core.contract.sink import PreparedFile, files_of, transaction_digest
from stormproof.core.contract.source import Expectation, Lease, Limit, Resolution, Slice, SliceReader, Source
from stormproof.core.heartbeat.listener import suspects_of_dead, sweep
from stormproof.core.tracking.attempts import AttemptLog
from stormproof.core.tracking.verdict import AttemptEnd, FailedIn
from stormproof.sinks.contract.protocol import CommitResult, RefusedRow
from stormproof.trident.driver.batch_records import (
    Finished,
    PreparedBatch,
    ReadAlready,
    RejectLimit,
    SinkAnswers,
    blocked,
    cause_of,
    contract_events,
    ends_of,
    failure_events,
    log_rejects,
    reasons_of,
    rejects_of,
    resolution_events,
    to_prepared,
)
from stormproof.trident.driver.opening import SinkSessions, machine_errors
from stormproof.trident.ledger import sink_records, txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import BatchCounts, Event, Run, SinkWork, Txn, record_of
from stormproof.trident.terms.observers import NOBODY, BatchResult, CommittedBatch, Figures, Observer
from stormproof.trident.terms.transaction_states import AttemptOutcome, EventKind, TxnCause, TxnState

NO_TIMES: Final[Mapping[str, float]] = MappingProxyType({})
"""The steps' times of a batch of which they are not known: its driver died."""

NO_COUNTS: Final = BatchCounts()
NOTHING_GIVEN_UP: Final[Mapping[str, RefusedRow]] = MappingProxyType({})


class MovedLate(TransientError):
    """A sink holds a batch that was given up: a driver that had been suspended wrote it. Recovery records it as held."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A batch that has been opened."""

    txid: int
    lease: Lease
    slice: Slice
    seed: int
    sinks: frozenset[str] | None = None
    """The sinks that get its rows: those that rejected its messages before, which the others hold. None: all of them."""
    readers: tuple[SliceReader, ...] | None = None
    """Its messages, where they could not be read any more: see `Steps.open`."""


class Steps:
    """The steps of one driver's batches in ledger, source and sinks."""

    def __init__(
        self,
        ledger: Ledger,
        run: Run,
        source: Source,
        sessions: SinkSessions,
        *,
        lease_s: float,
        heartbeat_root: Path | None = None,
        rejects_max_share: float = 0.0,
        observer: Observer = NOBODY,
        whole: bool = False,
    ) -> None:
        """`whole`: a batch is not divided, since messages meet in it."""
        self.ledger = ledger
        self.observer = observer
        self.run = run
        self.source = source
        self.sessions = sessions
        self._lease_s = lease_s
        self._whole = whole
        self._heartbeat_root = heartbeat_root
        self._reject_limit = RejectLimit(rejects_max_share)
        self.previous: dict[str, int | None] = {}

    def lease(self, txid: int) -> Lease:
        """The lease that a batch holds: its owner key is the same in every epoch."""
        return Lease(f"{self.run.incarnation}/{txid}", self.run.epoch, self._lease_s)

    def txid_of(self, owner: str) -> int | None:
        """The batch that an owner key belongs to; None where it is not ours."""
        incarnation, _, txid = owner.rpartition("/")
        return int(txid) if incarnation == self.run.incarnation and txid.isdecimal() else None

    def in_hand(self, txid: int) -> tuple[int, ...]:
        """The messages in hand when a driver died while this batch's job ran; none where that is not known."""
        return suspects_of_dead(self._heartbeat_root, self.run.incarnation, txid)

    def sweep_heartbeats(self) -> None:
        """Remove the progress files of dead drivers' jobs."""
        sweep(self._heartbeat_root, self.run.incarnation)

    def joined(self, tx: Tx) -> object | None:
        """The ledger's transaction, if the source can take part in it."""
        return tx.raw if self.source.joins(tx.raw) else None

    def drop_connections(self) -> None:
        """Close every connection to ledger, source and sinks; the next use opens it again.

        No batch may be in flight, and no transaction open.
        """
        self.ledger.drop_connections()
        self.source.drop_connections()
        self.sessions.drop_connections()

    # -- open --------------------------------------------------------------------------------------------------------

    def open(self, guarantee: Guarantee, limit: Limit, seed: int, figures: Figures | None = None) -> Opened | None:
        """Allot a txid and lease messages for it. Where there are no messages, None, and no txid is used.

        Under at-most-once the messages are confirmed here, before anything runs. Retries, which an earlier run under another
        guarantee left or an operator asked for, are read before that: a confirm removes their payloads. `figures`, the
        present size and number of batches, are recorded with this one for `status`.
        """
        failpoint("open.before")
        limit = replace(limit, certain=guarantee is Guarantee.AT_MOST_ONCE)
        with self.ledger.transaction(self.run) as tx:
            txid = txns.next_txid(tx)
            lease = self.lease(txid)
            joined = self.joined(tx)
            slice_, sinks = self._open_slice(tx, lease, limit, seed, joined)
            if slice_ is None:
                return None
            tuning = None if figures is None else asdict(figures)
            txns.open_batch(tx, txid, guarantee, self.source.name, slice_, seed, tuning)
            tx.record(
                [
                    Event(
                        EventKind.REPLAY,
                        txid=txid,
                        message=self.source.shown_id(number, origin),
                        number=number,
                        origin=origin,
                    )
                    for number, origin in slice_.replayed
                ],
            )
            readers = None
            if guarantee is Guarantee.AT_MOST_ONCE and slice_.retry:
                readers = tuple(ReadAlready.of(reader, seed) for reader in self.source.readers(slice_, 1))
            if guarantee is Guarantee.AT_MOST_ONCE and joined is not None:
                self.source.confirm(lease, tx=joined)
            failpoint("open.in_transaction")
        self.observer.opened(txid, guarantee, slice_)
        if guarantee is Guarantee.AT_MOST_ONCE and joined is None:
            self.source.confirm(lease)
        failpoint("open.after")
        return Opened(txid, lease, slice_, seed, sinks, readers)

    def _open_slice(
        self, tx: Tx, lease: Lease, limit: Limit, seed: int, joined: object | None
    ) -> tuple[Slice | None, frozenset[str] | None]:
        """Open a slice whose messages go to the same sinks, and which these are; None: to all.

        A slice in which rejected messages come again beside others is opened in parts, before it gets a txid.
        """
        while True:
            slice_ = self.source.open(lease, limit, seed, joined)
            if slice_ is None or not slice_.replayed:
                return slice_, None
            shown = {number: self.source.shown_id(number, origin) for number, origin in slice_.replayed}
            wanted = sink_records.retrying(tx, shown.values())
            sinks = Counter(wanted.get(message) for message in shown.values())
            most = sinks.most_common(1)[0][0]
            if len(sinks) == 1:
                return slice_, most
            alone = [number for number, message in shown.items() if wanted.get(message) != most]
            self.source.split(slice_, lease, alone, joined)

    def attempt_log(self, opened: Opened) -> AttemptLog:
        """What records each further attempt at a batch in the ledger."""
        return _LedgerLog(self, opened)

    def next_attempt(
        self, opened: Opened, ended: int, end: AttemptEnd, error: str, seed: int, excluded: frozenset[int]
    ) -> Expectation:
        """Record how an attempt ended, and the next one with a new seed, before its job runs."""
        with self.ledger.transaction(self.run) as tx:
            expected = self.source.expect(opened.slice, seed, excluded, self.joined(tx))
            txns.end_attempt(tx, opened.txid, ended, AttemptOutcome(end.value), error)
            txns.add_attempt(tx, opened.txid, ended + 1, seed, excluded, expected)
        self.observer.attempt_ended(opened.txid, ended, AttemptOutcome(end.value))
        failpoint("attempt.after")
        return expected

    # -- prepare -----------------------------------------------------------------------------------------------------

    def fix_content(
        self,
        opened: Opened,
        attempt: int,
        guarantee: Guarantee,
        files: Sequence[PreparedFile],
        failed: Sequence[FailedIn],
        tuples: int,
        steps_ms: dict[str, float],
        counts: BatchCounts = NO_COUNTS,
    ) -> PreparedBatch:
        """Record what the batch writes and which messages failed in it; from here on its lease never lapses.

        Under exactly-once this is prepare: from here on the batch is only rolled forward. `steps_ms` is how long its steps
        took so far, `counts` what each component did.

        Raises:
            Fenced: another driver took over.
            TransientError: the lease ran out meanwhile, or a file is not seen from here; nothing was recorded, and recovery
                gives the messages back.
        """
        failpoint("prepare.before")
        work = {name: self.work_of(name, files) for name in self.sessions}
        self._require_reached(opened.txid, work)
        prepared = PreparedBatch(
            txid=opened.txid,
            attempt=attempt,
            guarantee=guarantee,
            slice=opened.slice,
            work=work,
            failed=[one.failure for one in failed],
            tuples=tuples,
            steps_ms=steps_ms,
            sinks=opened.sinks,
            rejects_max=self.rejects_max(opened.slice.expected.messages, opened.sinks),
        )
        with self.ledger.transaction(self.run) as tx:
            if guarantee is not Guarantee.AT_MOST_ONCE:
                self._pin(opened, tx)
            txns.fix_content(
                tx,
                opened.txid,
                attempt,
                list(work.values()),
                failure_events(self.source, failed, opened.txid),
                tuples,
                prepared.state,
                _rounded(steps_ms),
                counts,
            )
            failpoint("prepare.in_transaction")
        failpoint("prepare.after")
        return prepared

    def on_record(self, txn: Txn) -> PreparedBatch:
        """A batch whose content is fixed, as the ledger has it; without the sinks that were skipped for it.

        Raises:
            PositionMismatch: the ledger has no row of what it writes.
        """
        with self.ledger.transaction(self.run) as tx:
            work, recorded = txns.owed_work(tx, txn.txid)
            failed = tx.failures(txn.txid)
            sinks = sink_records.sinks_of_batch(tx, txn.txid) if txn.retry else None
        if not recorded:
            # Committed without these rows, the batch would write nothing, and its messages would be lost.
            raise PositionMismatch(
                f"txid {txn.txid} of topology {self.run.topology!r} is prepared, and the ledger has no row of what it "
                f"writes: rows of txn_sink were deleted or lost. Restore them; inspect with: stormproof audit verify "
                f"{self.run.topology}",
                txid=txn.txid,
            )
        slice_ = self.source.attach(txn.position, Expectation(txn.messages, 0))
        return record_of(
            PreparedBatch,
            txn,
            slice=slice_,
            work=work,
            failed=failed,
            sinks=sinks,
            rejects_max=self.rejects_max(txn.messages, sinks),
        )

    def _require_reached(self, txid: int, work: Mapping[str, SinkWork]) -> None:
        """Refuse to fix content that the driver does not see: an executor wrote it where nobody else looks.

        Raises:
            StoreUnavailable: names sink and file; the batch runs again.
        """
        for name, one in work.items():
            with machine_errors(f"sink {name!r}"):
                lacking = self.sessions[name].unreached(one.files) if one.files else ()
            if lacking:
                raise StoreUnavailable(
                    f"sink {name!r}, txid {txid}: {len(lacking)} of {len(one.files)} files that tasks have written are not "
                    f"seen from the driver ({socket.gethostname()}), {lacking[0]} among them; nothing was prepared. The "
                    "folder must be one that every executor and the driver reach: see the setting staging_dir, or put the "
                    "table into an object store",
                    sink=name,
                    files=list(lacking),
                )

    def _pin(self, opened: Opened, tx: Tx) -> None:
        """Make the batch's lease one that never lapses, in the transaction that fixes its content."""
        with self._while_nobody_took_over(opened):
            self.source.pin(opened.lease, self.joined(tx))

    @contextmanager
    def _while_nobody_took_over(self, opened: Opened) -> Generator[None]:
        """Tell a lapsed lease from a take-over. Under the ledger's fence nobody took over: the lease has only lapsed, since
        a machine was suspended, a clock jumped, or the store was away for longer than the lease.

        Raises:
            TransientError: the lease has lapsed; recovery gives back what is left.
        """
        try:
            yield
        except Fenced as error:
            raise TransientError(
                f"txid {opened.txid} of topology {self.run.topology!r}: {error}; its messages are opened again",
                txid=opened.txid,
            ) from error

    def work_of(self, sink: str, files: Sequence[PreparedFile]) -> SinkWork:
        """What these files write to a sink."""
        mine = files_of(files, sink)
        return SinkWork(
            sink=sink,
            previous=self.previous.get(sink),
            rows=sum(f.rows for f in mine),
            bytes=sum(f.bytes for f in mine),
            digest=transaction_digest(mine),
            files=mine,
        )

    # -- commit ------------------------------------------------------------------------------------------------------

    def rejects_max(self, messages: int, sinks: frozenset[str] | None) -> int | None:
        """How many of a batch's messages a sink may reject. Messages that were rejected before may all be rejected again."""
        if sinks is not None:
            return messages
        return self._reject_limit.of_batch(messages)

    def commit_sinks(self, batch: PreparedBatch) -> SinkAnswers:
        """Have each sink commit the batch, in the topology's order, up to the first that refuses.

        Only the sinks are used, and the ledger is not, so any thread may call this.

        Raises:
            PositionMismatch: the batch was prepared for a sink that the topology has no more.
            TransientError: a sink does not answer, or the run has ended meanwhile.
        """
        strangers = sorted(set(batch.work) - set(self.sessions))
        if strangers:
            raise PositionMismatch(
                f"txid {batch.txid} of topology {self.run.topology!r} was prepared for sink {strangers[0]!r}, which the "
                f"topology has no more (it has {', '.join(sorted(self.sessions))}): run it once with that sink",
                txid=batch.txid,
                sink=strangers[0],
            )
        results: dict[str, CommitResult] = {}
        for name in self.sessions:
            if name not in batch.work:
                continue
            failpoint("commit.before_sink")
            try:
                with self.sessions.committing(name) as session:
                    prepared = replace(to_prepared(batch.txid, batch.work[name]), rejects_max=batch.rejects_max)
                    result = session.commit(prepared, checked=batch.guarantee is Guarantee.EXACTLY_ONCE)
                if result.at is None and not result.is_suppressed:
                    result = replace(result, at=self.ledger.clock.now())
                results[name] = result
            except FatalError as error:
                return SinkAnswers(results, name, error)
            failpoint("commit.after_sink")
        return SinkAnswers(results)

    def settle(self, batch: PreparedBatch, answers: SinkAnswers) -> dict[str, CommitResult]:
        """The results, where every sink has committed the batch; where one refused, the error, recorded in the ledger.

        Raises:
            Fenced: another driver took over, so that the sink holds another txid or the files are gone.
            SinkRefused: a sink refuses for good; under exactly-once the txid is blocked, and the error says how to go on.
            PositionMismatch: a sink holds another txid than the ledger says.
            MovedLate: that txid is a batch that was given up.
        """
        if answers.error is None:
            return answers.results
        txid, name, error = batch.txid, answers.refused, answers.error
        self._require_epoch()
        if isinstance(error, SinkRefused) and batch.guarantee is Guarantee.EXACTLY_ONCE:
            raise self._block(txid, name, error) from error
        if isinstance(error, PositionMismatch) and self._moved_late(name, error):
            raise MovedLate(
                f"txid {txid} of topology {self.run.topology!r}: sink {name!r} holds a batch that was given up, "
                "from a driver that had been suspended; recovery records it",
                txid=txid,
                sink=name,
            ) from error
        raise error

    def _require_epoch(self) -> None:
        """Raise Fenced where another driver took over: with a Delta table, that only shows as another txid in it."""
        with self.ledger.transaction(self.run):
            pass

    def _moved_late(self, sink: str, error: PositionMismatch) -> bool:
        """Whether the sink's last txid, which is not the expected one, is a batch that was given up."""
        held = error.details.get("held")
        with self.ledger.transaction(self.run) as tx:
            return held is not None and held in dict(txns.unfinished_work(tx, sink))

    def _block(self, txid: int, sink: str, error: SinkRefused) -> SinkRefused:
        said = str(error)
        named = f"sink {sink!r}"  # most refusals begin with it
        reason = storable_text(said if said.startswith(named) else f"{named}: {said}")
        with self.ledger.transaction(self.run) as tx:
            txns.move(tx, txid, TxnState.PREPARED, TxnState.BLOCKED, cause=cause_of(error), reason=reason)
            tx.record([Event(EventKind.BLOCKED, txid=txid, sink=sink, error=reason)])
        self.observer.blocked(txid, sink, cause_of(error), reason)
        return blocked(self.run.topology, txid, reason, sink, self.sessions.get(sink), error.details)

    # -- finish ------------------------------------------------------------------------------------------------------

    def finish(
        self,
        batch: PreparedBatch,
        results: Mapping[str, CommitResult],
        given_up: Mapping[str, RefusedRow] = NOTHING_GIVEN_UP,
    ) -> Finished:
        """Confirm the messages and record `committed`, with the messages that sinks rejected.

        Where the source is in the ledger's database, both are one transaction. Elsewhere two writes follow one another, and
        recovery repeats the confirm. Under exactly-once the confirm comes first: the batch stays `prepared` until the second
        write. Under at-least-once the ledger's record comes first: a batch that stayed `open` would be given up, and a
        message that was confirmed with it, and that a sink rejected, would be on record nowhere.
        """
        failpoint("finish.before")
        txid, guarantee, failed = batch.txid, batch.guarantee, batch.failed
        rejected = rejects_of(self.source, txid, batch.slice, batch.work, results, given_up)
        resolution = Resolution()
        with self.ledger.transaction(self.run) as tx:
            joined = self.joined(tx)
            owed = guarantee is Guarantee.AT_LEAST_ONCE and joined is None
            if guarantee is not Guarantee.AT_MOST_ONCE and not owed:
                resolution = self.source.confirm(self.lease(txid), failed, joined)
            failpoint("finish.in_transaction")
            txns.commit(tx, txid, batch.state, results, _rounded(batch.steps_ms))
            tx.record(resolution_events(txid, resolution, results) + contract_events(txid, batch.work, results))
            if batch.sinks is not None:
                # Under at-most-once a message that failed does not come again.
                again = [] if guarantee is Guarantee.AT_MOST_ONCE else failed
                rejected += sink_records.retried(tx, txid, [self.source.shown_id(f.id, f.origin) for f in again])
            sink_records.record_rejects(tx, txid, rejected)
            failpoint("finish.before_commit")
        if owed:
            resolution = self._confirm_owed(txid, failed)
        messages, reasons = len({one.number for one in rejected if one.number is not None}), reasons_of(failed)
        committed = CommittedBatch(
            txid,
            guarantee,
            batch.slice.expected.messages,
            ends_of(batch.work, results, rejected),
            reasons,
            len(failed) - reasons.total(),
            len(resolution.dead),
            messages,
        )
        self.observer.committed(committed)
        failpoint("finish.after")
        if batch.sinks is None:
            self._reject_limit.note(committed.messages, messages)
        log_rejects(self.run.topology, txid, rejected)
        for name, session in self.sessions.items():
            if name in batch.work:
                self.previous[name] = txid
                with machine_errors(f"sink {name!r}, files of txid {txid}"):
                    session.finished(to_prepared(txid, batch.work[name]))
        result = BatchResult(
            txid=txid,
            state=TxnState.COMMITTED.value,
            messages=committed.messages,
            failed=reasons.total(),
            retry=batch.slice.retry,
            attempts=batch.attempt,
            tuples=batch.tuples,
            steps_ms=batch.steps_ms,
            returned=committed.returned,
            reasons=dict(reasons),
            dead_letters=committed.dead,
            superseded=sum(one.superseded for one in results.values()),
            rejected=messages,
        )
        return Finished(resolution, result)

    def _confirm_owed(self, txid: int, failures: Sequence[MessageFailure]) -> Resolution:
        """Confirm the messages of a batch that the ledger has as committed; record which of them are dead letters."""
        failpoint("finish.before_confirm")
        resolution = self.source.confirm(self.lease(txid), failures)
        if resolution.dead:
            with self.ledger.transaction(self.run) as tx:
                tx.record(resolution_events(txid, resolution, {}))
        return resolution

    # -- abort -------------------------------------------------------------------------------------------------------

    def abort(
        self,
        txid: int,
        cause: TxnCause,
        reason: str,
        *,
        divide: Slice | None = None,
        alone: Sequence[int] = (),
        parts: int = 2,
        steps_ms: Mapping[str, float] = NO_TIMES,
    ) -> None:
        """Give the messages back, whole or in parts, and end the txid. Its number is never used again.

        `divide` is a slice that is to be opened in parts: each message in `alone` by itself, or else in `parts`.
        `steps_ms` is how long its steps took, where that is known.

        Where the source is in another database, the ledger's row comes first: recovery gives back an open lease of an ended
        txid.
        """
        lease = self.lease(txid)
        with self.ledger.transaction(self.run) as tx:
            self._end(tx, txid, TxnState.ABORTED, cause, reason, steps_ms)
            joined = self.joined(tx)
            if joined is not None:
                self._give_back(lease, divide, alone, joined, parts)
            failpoint("abort.in_transaction")
        self.observer.given_up(txid, TxnState.ABORTED, cause, reason)
        if joined is None:
            self._give_back(lease, divide, alone, None, parts)
        failpoint("abort.after")

    def _give_back(
        self, lease: Lease, divide: Slice | None, alone: Sequence[int], joined: object | None, parts: int
    ) -> None:
        if divide is None or self._whole:
            self.source.abort(lease, joined)
        else:
            self.source.split(divide, lease, alone, joined, parts)

    def _end(
        self, tx: Tx, txid: int, state: TxnState, cause: TxnCause, reason: str, steps_ms: Mapping[str, float]
    ) -> None:
        txn = txns.find(tx, txid)
        assert txn is not None
        txns.end_attempt(tx, txid, txn.attempt, AttemptOutcome.DEAD)
        txns.remove_counts(tx, txid)
        took: dict[str, Json] = {"steps_ms": _rounded(steps_ms)} if steps_ms else {}
        txns.move(tx, txid, TxnState.OPEN, state, cause=cause, reason=storable_text(reason), **took)

    def abort_failed(
        self,
        opened: Opened,
        attempt: int,
        failed: Sequence[FailedIn],
        steps_ms: Mapping[str, float],
        counts: BatchCounts = NO_COUNTS,
    ) -> Resolution:
        """End a batch whose messages all failed: nothing is written, and each waits for its retry or is a dead letter."""
        failures, failed_events = [f.failure for f in failed], failure_events(self.source, failed, opened.txid)
        with self.ledger.transaction(self.run) as tx:
            joined = self.joined(tx)
            resolution = Resolution()
            txns.end_attempt(tx, opened.txid, attempt, AttemptOutcome.COMPLETE)
            tx.record(failed_events)
            txns.add_counts(tx, opened.txid, counts)
            txns.move(
                tx,
                opened.txid,
                TxnState.OPEN,
                TxnState.ABORTED,
                cause=TxnCause.EVERY_MESSAGE_FAILED,
                reason="every message failed",
                steps_ms=_rounded(steps_ms),
                **txns.counts_of(failed_events),
            )
            if joined is not None:
                with self._while_nobody_took_over(opened):
                    resolution = self.source.confirm(opened.lease, failures, joined)
                tx.record(resolution_events(opened.txid, resolution, {}))
            failpoint("abort.in_transaction")
        reasons = reasons_of(failures)
        self.observer.given_up(opened.txid, TxnState.ABORTED, TxnCause.EVERY_MESSAGE_FAILED, "every message failed")
        self.observer.failed(opened.txid, reasons, len(failures) - reasons.total())
        if joined is None:
            with self.ledger.transaction(self.run) as tx:
                with self._while_nobody_took_over(opened):
                    resolution = self.source.confirm(opened.lease, failures)
                tx.record(resolution_events(opened.txid, resolution, {}))
        self.observer.dead_letters(opened.txid, len(resolution.dead))
        failpoint("abort.after")
        return resolution

    def abandon(self, txid: int, cause: TxnCause, reason: str, steps_ms: Mapping[str, float] = NO_TIMES) -> None:
        """End a batch in flight under at-most-once: its messages were confirmed when it was opened."""
        with self.ledger.transaction(self.run) as tx:
            self._end(tx, txid, TxnState.ABANDONED, cause, reason, steps_ms)
            sink_records.retried(tx, txid)
            failpoint("abort.in_transaction")
        self.observer.given_up(txid, TxnState.ABANDONED, cause, reason)
        failpoint("abort.after")


@dataclass(frozen=True, slots=True)
class _LedgerLog:
    steps: Steps
    opened: Opened

    def next_attempt(self, ended: int, end: AttemptEnd, error: str, seed: int, excluded: frozenset[int]) -> Expectation:
        return self.steps.next_attempt(self.opened, ended, end, error, seed, excluded)


def _rounded(steps_ms: Mapping[str, float]) -> dict[str, Json]:
    return {name: round(took, 3) for name, took in steps_ms.items()}
