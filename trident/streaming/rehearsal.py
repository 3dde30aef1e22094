"""What `once` would do with a job, found without a change: the ledger is read, and the rows are computed and dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from stormproof.core.graph.plan import Plan
from stormproof.core.settings import Settings
from stormproof.core.sink import TaskContext, files_of
from stormproof.sinks.lineage import one_message_writer
from stormproof.sinks.preview import RowsPreview
from stormproof.sinks.stand_ins import Rehearsal
from stormproof.trident.dry_run import DryRun, DryRunOutcome, outcome_of
from stormproof.trident.ledger import handed_in
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.rows import NO_LIFE
from stormproof.trident.opening import placed, require_own_tables, sinks_of
from stormproof.trident.start_preview import look, notes_of, sinks_told, table_of
from stormproof.trident.streaming.base import Frame
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
