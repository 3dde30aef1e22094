"""Batch jobs straight into sinks: each key is one transaction, whose rows are computed and written once.

What `once` would do is found without a change: the ledger is read, and the rows are computed and dropped.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa

from stormproof.core.graph.plan import Plan
from stormproof.core.settings import Settings
from stormproof.core.sink import TaskContext, files_of
from stormproof.sinks.preview import RowsPreview
from stormproof.sinks.writer import Rehearsal, one_message_writer
from stormproof.trident.dry_run import DryRun, DryRunOutcome, look, notes_of, outcome_of, sinks_told, table_of
from stormproof.trident.ledger import handed_in
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.handed_in import HandedIn, source_of
from stormproof.trident.ledger.rows import NO_LIFE
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.opening import placed, require_own_tables, sinks_of
from stormproof.trident.streaming.base import Frame
from stormproof.trident.streaming.result import OnceResult, StreamOutcome
from stormproof.trident.streaming.sinks import SinkStream
from stormproof.trident.transaction_states import TxnState

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames


def rehearsed(
    name: str, key: str, frame: Frame, plan: Plan, schema: pa.Schema, frames: Frames, settings: Settings
) -> DryRun:
    """What `once(frame, key)` would do, with the frame as it would be written.

    Raises:
        JobFailed: the job failed.
        Otherwise as `look`.
    """
    view, database = look(settings, name, key, graph_of(plan, handed_in.source_of(name)))
    if database is not None:
        require_own_tables(placed(plan, database, settings))
    previews = {sink.name: table_of(sink, plan, view, name, database) for sink in sinks_of(plan)}
    if view.refusal:
        notes = (*notes_of(view), view.refusal)
        return DryRun(
            name,
            key,
            DryRunOutcome.REFUSE,
            view.taken or view.last_txid + 1,
            None,
            sinks_told(plan, previews, {}),
            notes,
        )
    if view.taken is not None:
        waits = any(txn.txid == view.taken and txn.state is not TxnState.COMMITTED for txn in view.unresolved)
        outcome = DryRunOutcome.ROLL_FORWARD if waits else DryRunOutcome.SUPPRESS
        return DryRun(name, key, outcome, view.taken, None, sinks_told(plan, previews, {}), notes_of(view))
    writers = {
        sink: Rehearsal(sink, one_message_writer(preview.writer, plan.sinks[sink], key))
        for sink, preview in previews.items()
        if preview.writer is not None
    }
    rows, found, problems = None, dict[str, RowsPreview](), tuple[str, ...]()
    if writers:
        written = frames.write(frame, writers, TaskContext(NO_LIFE, view.last_txid + 1, 1, 0), schema)
        rows, problems = written.rows, written.problems
        found = {sink: RowsPreview.of(files_of(written.files, sink)) for sink in writers}
    sinks = sinks_told(plan, previews, found)
    outcome = DryRunOutcome.REFUSE if problems else outcome_of(sinks)
    notes = (*notes_of(view), *(f"no sink can hold a row: {text}" for text in problems))
    return DryRun(name, key, outcome, view.last_txid + 1, rows, sinks, notes)


log = logging.getLogger("stormproof.txn")


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
        handed_in.checked_key(self.name, key)
        with self._lock:
            started_s = self._clock.monotonic_s()
            self._frames.require_batch(frame)
            with self._opened(frame, None, partial(_require_jobs, self.name)) as current:
                result = self._written_once(current, frame, partial(_job, key), "call once() with this key again")
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
        handed_in.checked_key(self.name, key)
        self._frames.require_batch(frame)
        self._frames.require(frame)
        schema = self._frames.schema(frame)
        plan, _ = self._planned(schema, source_of(self.name))
        return rehearsed(
            self.name, key, self._gathered(plan, frame), plan, schema, self._frames, self._settings or Settings()
        )


def _job(key: str, tx: Tx) -> HandedIn:
    return handed_in.job_of(tx.connection, tx.run.incarnation, key) or HandedIn(key)


def _require_jobs(name: str, connection: sa.Connection) -> None:
    handed_in.require_use(connection, name, by_key=True)
