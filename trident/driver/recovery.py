"""Recovery: brings ledger, source and sinks to one state after any crash, and reports what it did.

In txid order, prepared transactions are rolled forward from their files and open ones are ended. Confirms and aborts that
are owed are repeated, each sink's last txid is compared with the ledger's, and files of dead attempts are removed.

`Recount` is what a batch writes to a sink whose table refuses a group's row: the same once more, without that group's
messages. The row stands for messages that are not known one by one, and each of them may have a part in other groups. So the
batch's job runs again for that sink alone, in per-message mode: its rows name their messages. It runs again without the
messages of each row that the table refuses, until the table takes every row. The sink holds nothing of the batch meanwhile.
What it is to write is recorded in the ledger before it is asked again, with what was left out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.base.errors import FatalError, Json, PositionMismatch, SinkRefused
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee, MessageFailure, MessageId, storable_text
from stormproof.core.contract.source import Expectation, Resolution, Slice, Source
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.partners import touched_by
from stormproof.core.tracking.verdict import JobReport, mismatches
from stormproof.sinks.contract.protocol import PROBLEM, CommitResult, Held, RefusedRow, SinkProblem, SinkSession
from stormproof.sinks.prepare.rejected_messages import GroupsRefused
from stormproof.trident.driver.batch_records import PreparedBatch, SinkAnswers, blocked, to_prepared
from stormproof.trident.driver.opening import machine_errors
from stormproof.trident.driver.steps import MovedLate, Steps
from stormproof.trident.ledger import sink_records, txns
from stormproof.trident.ledger.tables import Event, Txn
from stormproof.trident.ledger.txns import take_late_commit
from stormproof.trident.terms.observers import BatchResult, RecoveryReport
from stormproof.trident.terms.transaction_states import EventKind, TxnCause, TxnState

log = logging.getLogger("stormproof.txn")

RECOUNTS_MAX: Final = 8
"""How often a batch's job runs again for its refused groups. Each time leaves out the groups that are refused by then."""
UNVERIFIED_MAX: Final = 2
"""How many of these jobs may not add up."""
TEXT_MAX: Final = 1_000
"""Characters of a refused row, and of its error, that are recorded."""

Pairs: TypeAlias = npt.NDArray[np.int64]
_NO_PAIRS: Final[Pairs] = np.empty((0, 2), np.int64)
_ROWS: Final = 10_000


class JobAgain(Protocol):
    """Runs a batch's job again for one sink, in per-message mode; for the others it writes nothing."""

    def __call__(self, batch: PreparedBatch, sink: str, seed: int, excluded: frozenset[int]) -> JobReport | JobDied:
        """The job's result. Its lease is held: it does not lapse."""
        ...


class Recount:
    """Takes batches on which a table refuses a group's row, of one driver."""

    def __init__(self, steps: Steps, job: JobAgain, new_seed: Callable[[], int]) -> None:
        self._steps = steps
        self._job = job
        self._new_seed = new_seed

    def settle(self, batch: PreparedBatch, answers: SinkAnswers) -> tuple[PreparedBatch, SinkAnswers]:
        """The batch with what it writes in the end, and the sinks' answers to that.

        Where a group's messages cannot be named, or are more than may be rejected, the answers have the refusal as before.

        Raises:
            Fenced: another driver took over.
            TransientError: a store does not answer; recovery asks the sink again.
        """
        unverified = 0
        together = _NO_PAIRS
        for _ in range(RECOUNTS_MAX):
            error, sink = answers.error, answers.refused
            if not isinstance(error, SinkRefused) or not _may_recount(batch, error):
                break
            left_out = self._left_out(batch, batch.work[sink].left_out or (), error, together)
            if len(_messages(left_out)) > (batch.rejects_max or 0):
                return batch, replace(answers, error=too_many(error, batch.rejects_max))
            report = None
            while report is None:
                found = self._run(batch, sink, left_out)
                if isinstance(found, JobReport):
                    report = found
                    continue
                unverified += 1
                log.warning("txid %d: run again for sink %r alone: %s", batch.txid, sink, found)
                if unverified >= UNVERIFIED_MAX:
                    return batch, replace(answers, error=_explained(error, found))
            together = report.together
            # In recovery no sink was asked yet for what it holds last: only the batch's own record tells what it follows.
            follows = batch.work[sink].previous
            fixed = replace(self._steps.work_of(sink, report.files), previous=follows, left_out=left_out)
            with self._steps.ledger.transaction(self._steps.run) as tx:
                txns.replace_content(tx, batch.txid, batch.state, fixed)
            failpoint("recount.after")
            batch = replace(batch, work={**batch.work, sink: fixed})
            rest = {name: item for name, item in batch.work.items() if name not in answers.results}
            further = self._steps.commit_sinks(replace(batch, work=rest))
            answers = SinkAnswers({**answers.results, **further.results}, further.refused, further.error)
        return batch, answers

    def _run(self, batch: PreparedBatch, sink: str, left_out: Sequence[RefusedRow]) -> JobReport | str:
        """The report of the batch's job for one sink, without these messages; or why there is none that adds up."""
        excluded = frozenset({int(failure.id) for failure in batch.failed} | _messages(left_out).keys())
        seed = self._new_seed()
        with self._steps.ledger.transaction(self._steps.run) as tx:
            expected: Expectation = self._steps.source.expect(batch.slice, seed, excluded, self._steps.joined(tx))
        report = self._job(batch, sink, seed, excluded)
        if isinstance(report, JobDied):
            return report.error
        wrong = list(mismatches(report, expected, tracked=True, per_message=True))
        for failure in (*report.failures, *report.late, *report.lost)[:1]:
            shown = self._steps.source.shown_id(failure.id, failure.origin)
            wrong.append(f"message {shown} failed, and had not before: {failure.component}: {failure.error}")
        return "; ".join(wrong) if wrong else report

    def _left_out(
        self, batch: PreparedBatch, before: tuple[RefusedRow, ...], error: SinkRefused, together: Pairs
    ) -> tuple[RefusedRow, ...]:
        """What is left out by now: the messages of refused groups, and those that share a tuple with one of them."""
        if not isinstance(error, GroupsRefused):
            return before
        found = before + tuple(_of_group(row) for row in error.rows)
        named = _messages(found)
        touched = touched_by({MessageId(number) for number in named}, together)
        return found + tuple(
            replace(named[touched[number]], messages=((number, origin),), goes_with_others=True)
            for number, origin in (messages_of(self._steps.source, batch.slice, among=touched) if touched else ())
        )


def messages_of(
    source: Source, slice_: Slice, *, excluded: frozenset[int] = frozenset(), among: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """A slice's messages with their origins, read again: all but the `excluded` ones, or those `among` some."""
    wanted = None if among is None else np.fromiter(sorted(among), np.int64)
    for reader in source.readers(slice_, 1):
        for rows in reader.read(0, excluded, _ROWS):
            ids, origins = rows.column("id").to_numpy(), rows.column("origin")
            for row in range(len(ids)) if wanted is None else np.flatnonzero(np.isin(ids, wanted)).tolist():
                yield int(ids[row]), int(origins[row].as_py())


def _may_recount(batch: PreparedBatch, error: SinkRefused) -> bool:
    """Whether a refusal is of rows whose messages can be named, and rejected."""
    unnamed = error.details.get(PROBLEM) == SinkProblem.MESSAGES_UNKNOWN
    return batch.guarantee.tracked and bool(batch.rejects_max) and (unnamed or isinstance(error, GroupsRefused))


def _of_group(row: RefusedRow) -> RefusedRow:
    """The record of a refused row of a group: it is in no file of what is committed."""
    return replace(row, file="", row=-1, text=row.text[:TEXT_MAX], error=row.error[:TEXT_MAX])


def _messages(left_out: Sequence[RefusedRow]) -> dict[int, RefusedRow]:
    """The messages of these rows, each with the first row that it is left out for."""
    found: dict[int, RefusedRow] = {}
    for row in left_out:
        for number, _ in row.messages:
            found.setdefault(number, row)
    return found


def too_many(error: SinkRefused, most: int | None) -> SinkRefused:
    """The error for refused groups with more messages than a sink may reject."""
    return SinkRefused(
        f"{error.message}. These rows have more than {most} messages, which is more than may be rejected "
        "(rejects_max_share)",
        **{**error.details, PROBLEM: SinkProblem.TOO_MANY_REJECTS.value, "rejects_max": most},
    )


def _explained(error: SinkRefused, why: str) -> SinkRefused:
    details: dict[str, Json] = dict(error.details)
    return SinkRefused(
        f"{error.message}. The batch was run again to name the messages of these rows, and that failed: "
        f"{storable_text(why)}",
        **details,
    )


LEFTOVER_TXIDS_MAX: Final = 64
"""The number of newest committed batches whose staging files are removed: a kill right after a commit leaves them."""


@dataclass(slots=True)
class _Done:
    ended: Callable[[BatchResult], None]
    rolled_forward: list[int] = field(default_factory=list[int])
    aborted: list[int] = field(default_factory=list[int])
    abandoned: list[int] = field(default_factory=list[int])
    confirms_repeated: list[int] = field(default_factory=list[int])
    suppressed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    in_hand: list[int] = field(default_factory=list[int])
    late_commits: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    rejected: int = 0


def recover(
    steps: Steps, *, sweep: bool, ended: Callable[[BatchResult], None], recount: Recount | None = None
) -> RecoveryReport:
    """Recover one topology under the epoch that `steps` holds. It may be killed at any point, and repeated.

    `ended` is called with each batch that it commits, as soon as that is on record: also where a later one then fails.
    Without a `recount`, a batch of which a table refuses a group's row is blocked.

    Raises:
        Fenced: another driver took over.
        PositionMismatch: a sink holds another txid than the ledger says; the error names both.
        SinkRefused: a prepared transaction is blocked.
        StoreUnavailable: a store does not answer; every decision so far is recorded.
    """
    failpoint("recover.before")
    done = _Done(ended)
    with steps.ledger.transaction(steps.run) as tx:
        owners = steps.source.recover(steps.run.epoch, steps.joined(tx))
        unresolved = txns.unresolved(tx)
    for txn in unresolved:
        _end(steps, txn, done, recount)
        failpoint("recover.after_each")
    _repeat_owed(steps, owners, {txn.txid for txn in unresolved}, done)
    for session in steps.sessions.values():
        _compare(steps, session, done)
    swept = _sweep(steps) if sweep else 0
    if sweep:
        steps.sweep_heartbeats()
    report = RecoveryReport(
        epoch=steps.run.epoch,
        took_over_from=steps.run.took_over_from,
        rolled_forward=tuple(done.rolled_forward),
        aborted=tuple(done.aborted),
        abandoned=tuple(done.abandoned),
        confirms_repeated=tuple(done.confirms_repeated),
        suppressed=tuple(done.suppressed),
        files_swept=swept,
        in_hand=tuple(done.in_hand),
        late_commits=tuple(done.late_commits),
        rejected=done.rejected,
    )
    if report.did_something:
        with steps.ledger.transaction(steps.run) as tx:
            tx.record([Event(EventKind.RECOVERY, detail=asdict(report))])
    steps.observer.recovered(report)
    failpoint("recover.after")
    return report


def _end(steps: Steps, txn: Txn, done: _Done, recount: Recount | None) -> None:
    match txn.state, txn.guarantee:
        case TxnState.PREPARED, _:
            _roll_forward(steps, txn, done, recount)
        case TxnState.BLOCKED, _:
            with steps.ledger.transaction(steps.run) as tx:
                sink = tx.blocking_sink(txn.txid)
            session = None if sink is None else steps.sessions.get(sink)
            raise blocked(steps.run.topology, txn.txid, txn.reason, sink, session)
        case _, Guarantee.AT_MOST_ONCE:
            # Where the source is in another database, the confirm may be owed; it may be repeated.
            steps.source.confirm(steps.lease(txn.txid))
            steps.abandon(txn.txid, TxnCause.DRIVER_ENDED, "in flight when its driver ended")
            done.abandoned.append(txn.txid)
        case _:
            _give_back(steps, txn, done)
            done.aborted.append(txn.txid)


def _give_back(steps: Steps, txn: Txn, done: _Done) -> None:
    """Return the messages; those in hand when the driver died are set apart, since one of them may have killed it."""
    in_hand = steps.in_hand(txn.txid)
    if not in_hand:
        steps.abort(txn.txid, TxnCause.DRIVER_ENDED, "in flight when its driver ended")
        return
    slice_ = steps.source.attach(txn.position, Expectation(txn.messages, 0))
    reason = f"in flight when its driver ended; set apart what was in hand: {len(in_hand)} messages"
    steps.abort(txn.txid, TxnCause.DRIVER_ENDED, reason, divide=slice_, alone=in_hand)
    done.in_hand.extend(in_hand)


def _roll_forward(steps: Steps, txn: Txn, done: _Done, recount: Recount | None) -> None:
    batch = steps.on_record(txn)
    with steps.ledger.transaction(steps.run) as tx:
        kept = tx.kept_messages(txn.txid)
    try:
        batch, results = _commit_sinks(steps, batch, recount)
    except MovedLate as error:
        if not _take_late_commits(steps, batch, done):
            raise error.__cause__ or error from None
        batch, results = _commit_sinks(steps, steps.on_record(txn), recount)
    finished = steps.finish(batch, results, _given_up(steps, batch, kept) if kept else {})
    resolution = finished.resolution
    _record_dead(steps, txn.txid, batch.failed, resolution, recorded=resolution.dead)
    done.rejected += finished.result.rejected
    done.rolled_forward.append(txn.txid)
    done.suppressed.extend((txn.txid, sink) for sink, result in results.items() if result.is_suppressed)
    done.ended(finished.result)


def _commit_sinks(
    steps: Steps, batch: PreparedBatch, recount: Recount | None
) -> tuple[PreparedBatch, dict[str, CommitResult]]:
    """Have each sink commit a prepared batch. Returns it with what it writes in the end, and the results."""
    answers = steps.commit_sinks(batch)
    if recount is not None:
        batch, answers = recount.settle(batch, answers)
    return batch, steps.settle(batch, answers)


def _given_up(steps: Steps, batch: PreparedBatch, kept: Mapping[str, str]) -> dict[str, RefusedRow]:
    """A row for each sink at which an operator gave up the batch and kept its messages: those that the source has still."""
    failed = frozenset(int(failure.id) for failure in batch.failed)
    why_not = ""
    try:
        messages = tuple(messages_of(steps.source, batch.slice, excluded=failed))
    except FatalError as error:
        messages, why_not = (), f"; its messages cannot be read again: {error}"
        log.warning("txid %d of topology %r%s", batch.txid, steps.run.topology, why_not)
    return {sink: RefusedRow("", -1, "", None, f"{why}{why_not}", messages) for sink, why in kept.items()}


def _take_late_commits(steps: Steps, batch: PreparedBatch, done: _Done) -> bool:
    """Whether a sink holds a batch that was given up, which a suspended driver wrote after all; if so, record it as held.

    Such a batch ran under a weaker guarantee, where it may be written twice, or the sink was skipped for it. This batch
    follows it from now on; its own rows are in no sink yet.
    """
    found = False
    for sink, item in batch.work.items():
        session = steps.sessions.get(sink)
        if session is None or item.committed_at is not None:
            continue
        with machine_errors(f"sink {sink!r}"):
            held = session.held()
        if held is None or held.digest is None or held.txid in (batch.txid, item.previous):
            continue
        with steps.ledger.transaction(steps.run) as tx:
            late = take_late_commit(tx, sink, held, waiting=batch.txid)
        if late:
            done.late_commits.append((held.txid, sink))
            found = True
    return found


def _record_dead(
    steps: Steps,
    txid: int,
    failures: Sequence[MessageFailure],
    resolution: Resolution,
    *,
    recorded: Sequence[str] = (),
) -> None:
    """Record which of these failed messages are dead letters and not recorded as such yet.

    A repeated confirm no longer tells which these are; a source that keeps its dead letters does.
    """
    dead = dict.fromkeys(resolution.dead)
    source = steps.source
    if failures and not resolution.dead and not resolution.retried:
        shown = dict.fromkeys(source.shown_id(f.id, f.origin) for f in failures)
        undecided = source.undecided_among(shown)
        dead = dict.fromkeys(one for one in shown if one in undecided)
    if not dead:
        return
    with steps.ledger.transaction(steps.run) as tx:
        known = {*recorded, *(one.message for one in tx.events(txid, EventKind.DEAD_LETTER))}
        unknown = [one for one in dead if one not in known]
        tx.record([Event(EventKind.DEAD_LETTER, txid=txid, message=one) for one in unknown])
    steps.observer.dead_letters(txid, len(unknown))


def _repeat_owed(steps: Steps, owners: tuple[str, ...], handled: set[int], done: _Done) -> None:
    """Confirm or give back the leases that the source still has of batches that the ledger ended, or never recorded.

    They exist only where the source is not in the ledger's database.
    """
    for owner in owners:
        txid = steps.txid_of(owner)
        if txid is None or txid in handled:
            continue
        failures: list[MessageFailure] = []
        with steps.ledger.transaction(steps.run) as tx:
            txn = txns.find(tx, txid)
            if txn is not None:
                failures = tx.failures(txid)
        all_failed = txn is not None and txn.cause is TxnCause.EVERY_MESSAGE_FAILED
        if txn is not None and (txn.state is not TxnState.ABORTED or all_failed):
            resolution = steps.source.confirm(steps.lease(txid), failures)
            _record_dead(steps, txid, failures, resolution)
            done.confirms_repeated.append(txid)
        else:
            steps.source.abort(steps.lease(txid))


def _compare(steps: Steps, session: SinkSession, done: _Done) -> None:
    """Compare a sink's own last txid with the ledger's, and keep PREV for the next batch.

    Raises:
        PositionMismatch: they differ, and no batch that was given up explains it.
    """
    sink = session.identity.sink
    with machine_errors(f"sink {sink!r}"):
        held = session.held()
    with steps.ledger.transaction(steps.run) as tx:
        known = sink_records.last_held(tx, sink)
        if not session.tells_position:
            # The sink keeps no txid; only the ledger does.
            steps.previous[sink] = None if known is None else known[0]
            return
        if not _agrees(held, known):
            if held is None or not take_late_commit(tx, sink, held):
                raise _mismatch(steps, session, held, known)
            done.late_commits.append((held.txid, sink))
    steps.previous[sink] = None if held is None else held.txid


def _agrees(held: Held | None, known: tuple[int, str] | None) -> bool:
    if held is None or known is None:
        return held is None and known is None
    return held.txid == known[0] and held.digest in (None, known[1])


def _mismatch(steps: Steps, session: SinkSession, held: Held | None, known: tuple[int, str] | None) -> PositionMismatch:
    topology, sink = steps.run.topology, session.identity.sink
    ledger = "no txid" if known is None else f"txid {known[0]} (digest {known[1][:12]})"
    found = "no txid" if held is None else f"txid {held.txid} (digest {(held.digest or 'expired')[:12]})"
    return PositionMismatch(
        f"sink {sink!r} of topology {topology!r} holds {found}, the ledger says {ledger}: one of them was restored, or "
        f"changed by another hand. No batch was opened. Inspect with: stormproof audit verify {topology}",
        sink=sink,
        held=None if held is None else held.txid,
        ledger=None if known is None else known[0],
    )


def _sweep(steps: Steps) -> int:
    """Remove the files of attempts that can never be committed. Returns their number.

    Files of a batch whose content was fixed stay, however it ended: under the weaker guarantees a suspended driver may
    still commit them, and a committed file that is missing makes a Delta table unreadable.
    """
    with steps.ledger.transaction(steps.run) as tx:
        highest, live = txns.live_attempts(tx)
        pruned = txns.pruned_upto(tx)
        committed = txns.last_committed(tx, LEFTOVER_TXIDS_MAX)
    for txid, work in committed:
        if work.sink in steps.sessions:
            with machine_errors(f"sink {work.sink!r}, files of txid {txid}"):
                steps.sessions[work.sink].finished(to_prepared(txid, work))

    named = {(txid, work.sink): {file.path for file in work.files} for txid, work in committed}

    def is_dead(sink: str, txid: int, attempt: int, name: str) -> bool:
        # Of a pruned batch the ledger does not know which attempt counted: its files stay.
        if not pruned < txid <= highest:
            return False
        # A task that ran again leaves a file of the attempt that counts, which the ledger does not name.
        return (txid, attempt) not in live or name not in named.get((txid, sink), {name})

    swept = 0
    for sink, session in steps.sessions.items():
        with machine_errors(f"sink {sink!r}, files of dead attempts"):
            swept += session.sweep(partial(is_dead, sink))
    return swept
