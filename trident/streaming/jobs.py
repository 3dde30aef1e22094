"""Batch jobs straight into sinks: each key is one transaction, whose rows are computed and written once."""

from __future__ import annotations

import json
import logging
from functools import partial

import sqlalchemy as sa

from stormproof.core.errors import Fenced, JobFailed, Json, SinkRefused
from stormproof.core.failpoint import failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.settings import Settings
from stormproof.trident.coordinator import SEED_BITS
from stormproof.trident.dry_run import DryRun
from stormproof.trident.ledger import events, job_keys, txns
from stormproof.trident.ledger.job_keys import source_of
from stormproof.trident.ledger.rows import Event
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.steps import Opened, Steps
from stormproof.trident.streaming.base import Frame, OpenQuery, StepTimes
from stormproof.trident.streaming.one_message import slice_of_key
from stormproof.trident.streaming.rehearsal import rehearsed
from stormproof.trident.streaming.result import OnceResult, StreamOutcome
from stormproof.trident.streaming.sinks import OneMessageSteps, SinkStream
from stormproof.trident.transaction_states import EventKind, TxnCause, TxnState

log = logging.getLogger("stormproof.txn")


class JobSteps(OneMessageSteps):
    """A batch takes its key in the transaction that fixes its content; one that is not prepared is aborted by recovery."""

    def _hold(self, opened: Opened, tx: Tx) -> None:
        super()._hold(opened, tx)
        job_keys.take(tx, str(opened.slice.position["key"]), opened.txid)


class ExactlyOnce(SinkStream):
    """Writes micro-batches (as the function of `foreachBatch`) or jobs (`once`) to sinks, exactly once; by `exactly_once`.

    As a context manager it closes in order.
    """

    def once(self, frame: Frame, key: str) -> OnceResult:
        """Append a DataFrame's rows to every sink, exactly once for this key, and return when every sink holds them.

        A key is any text of up to 2,000 bytes: a date, a partition, the id of a run. Keys come in any order.

        Guarantee:
            However often it is called with a key, by whatever process, and wherever that was killed: each sink holds the
            rows of one call, whole. A later call with the key computes nothing. A call that was killed before its rows
            were prepared leaves nothing, and the next one writes its own. One that was killed later is completed from its
            files by the next call of this name, whatever its key.

        Not guaranteed:
            Anything about two calls with two keys: rows that both compute are written by both. One process at a time uses
            a name: a call in another one takes over, and the first ends with `Fenced`.

        Raises:
            UsageError: no such key, a streaming DataFrame, Spark Connect, or a name that a streaming query uses.
            SinkRefused: a sink cannot hold a row, which is named; nothing was written, and the key may come again.
            JobFailed: the job failed; nothing was written, and the key may come again.
            Fenced: another process took over.
            StoreUnavailable: a store stayed away. Call again with the key, which finds out what was written.
        """
        job_keys.checked_key(self.name, key)
        with self._lock:
            started_s = self._clock.monotonic_s()
            self._frames.require_batch(frame)
            with self._opened(frame, None, partial(_require_jobs, self.name)) as current:
                result = self._outlasting(current, lambda steps: self._once(current, steps, frame, key))
                result.steps_ms["total"] = (self._clock.monotonic_s() - started_s) * 1000
                committed = result.outcome is StreamOutcome.COMMITTED
                self._note_steps(current, result.steps_ms, committed=committed)
                line: dict[str, object] = {
                    "topology": self.name,
                    "key": key,
                    "outcome": result.outcome.value,
                    "txid": result.txid,
                    "epoch": current.run.epoch,
                    "rows": result.rows,
                    "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
                }
            log.info("job %s", json.dumps(line))
            return result

    def dry_run(self, frame: Frame, key: str) -> DryRun:
        """What `once(frame, key)` would do now. Nothing is done: `str` of the result is for people, `to_json` for programs.

        The job runs, and its rows are checked as the writers check them, counted, and dropped. The ledger, the tables'
        catalogs and logs are read.

        Guarantee:
            No row, file, folder, table, column, claim or entry of the ledger is made or changed, and no running driver is
            fenced, whatever the answer, and wherever the call is killed. It needs no right to write anywhere; what it
            says is by the rights that it has.

        Not guaranteed:
            That a call will end so: the tables' own rules (`TablePreview.can_refuse`) are named and not tried, other
            writers may come between, and a job whose rows are not repeatable has others the next time. An embedded
            Postgres that stands is started, as by every command. The user's own code runs, with what it does by itself.

        Raises:
            UsageError: no such key, a streaming DataFrame, or a name that a streaming query uses.
            JobFailed: the job failed.
            StoreUnavailable: a store does not answer.
        """
        job_keys.checked_key(self.name, key)
        self._frames.require_batch(frame)
        self._frames.require(frame)
        schema = self._frames.schema(frame)
        plan, _ = self._planned(schema, source_of(self.name))
        return rehearsed(
            self.name, key, self._gathered(plan, frame), plan, schema, self._frames, self._settings or Settings()
        )

    def _steps_of(self, current: OpenQuery) -> Steps:
        if current.query is not None:
            return super()._steps_of(current)
        return JobSteps(*current.parts, lease_s=current.options.lease_s, observer=current.observer)

    def _once(self, current: OpenQuery, steps: Steps, frame: Frame, key: str) -> OnceResult | JobFailed:
        times = StepTimes(self._clock)
        opened = self._open_key(current, steps, key)
        times.mark("open")
        if isinstance(opened, int):
            steps.observer.suppressed(tuple(current.sessions))
            outcome = StreamOutcome.ROLLED_FORWARD if opened in self._rolled else StreamOutcome.SUPPRESSED
            self._rolled.discard(opened)
            self._count_suppressed(current)
            return OnceResult(key, outcome, opened, 0, times.ms)
        written = self._write(current, frame, opened, 1, times)
        if isinstance(written, JobFailed):
            steps.abort(opened.txid, TxnCause.JOB_FAILED, str(written), steps_ms=times.ms)
            return written
        if written.problems:
            problems = "; ".join(written.problems)
            reason = f"rows that a sink cannot hold: {problems}"
            steps.abort(opened.txid, TxnCause.JOB_FAILED, reason, steps_ms=times.ms)
            raise SinkRefused(
                f"{self.name!r}, key {key!r}: rows that a sink cannot hold: {problems}. Nothing was written. Mend or filter "
                "them, and call once() with this key again",
                key=key,
                problems=[*written.problems],
            )
        self._commit(steps, opened, 1, written, times)
        return OnceResult(key, StreamOutcome.COMMITTED, opened.txid, written.rows, times.ms)

    def _open_key(self, current: OpenQuery, steps: Steps, key: str) -> Opened | int:
        """A new transaction for the key; or the txid of the one that holds its rows."""
        failpoint("open.before")
        seed = self._rng.getrandbits(SEED_BITS)
        with current.ledger.transaction(current.run) as tx:
            taken = job_keys.txid_of(tx, key)
            if taken is not None:
                self._require_committed(tx, key, taken)
                detail: dict[str, Json] = {"key": key}
                events.record(
                    tx, [Event(EventKind.SUPPRESSED, txid=taken, sink=sink, detail=detail) for sink in current.sessions]
                )
                return taken
            txid = txns.next_txid(tx)
            slice_ = slice_of_key(key, txid, seed)
            txns.open_batch(tx, txid, Guarantee.EXACTLY_ONCE, current.source.name, slice_, seed)
            failpoint("open.in_transaction")
        steps.observer.opened(txid, Guarantee.EXACTLY_ONCE, slice_)
        failpoint("open.after")
        return Opened(txid, steps.lease(txid), slice_, seed)

    def _require_committed(self, tx: Tx, key: str, txid: int) -> None:
        """Recovery has rolled it forward; a batch that was pruned was committed."""
        txn = txns.find(tx, txid)
        if txn is not None and txn.state is not TxnState.COMMITTED:
            raise Fenced(f"txid {txid} of {self.name!r} (key {key!r}) is {txn.state}: another driver moved it")


def _require_jobs(name: str, connection: sa.Connection) -> None:
    job_keys.require_use(connection, name, by_key=True)
