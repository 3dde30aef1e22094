"""What the next batch of a topology would do, found without a change: messages are read and not taken, rows are dropped.

What each sink would take of it, and which messages it would reject, is found as a commit does, in memory. Where a row of a
group does not fit, the job runs again for that sink alone, without the messages that the row names: see
`stormproof.trident.recount`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.errors import SinkRefused
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.job import Job
from stormproof.core.message import MessageFailure, MessageId, storable_text
from stormproof.core.settings import Settings
from stormproof.core.sink import PreparedFile, SinkWriter, files_of
from stormproof.core.source.protocol import Limit, Source, SourcePreview
from stormproof.core.storage.kept_files import kept_folder
from stormproof.core.tracking.together import touched_by
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.preview import EXAMPLES_MAX, RowsPreview
from stormproof.sinks.protocol import PROBLEM, RefusedRow, SinkProblem
from stormproof.sinks.rejects import GroupsRefused, examples_of, rows_without_misfits
from stormproof.sinks.writer import FileWriter, WritesNothing
from stormproof.trident.blocked_error import RejectLimit
from stormproof.trident.dry_run import DryRunOutcome, DryRunSink, TopologyDryRun, outcome_of
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.rows import NO_LIFE
from stormproof.trident.opening import placed, require_own_tables, sinks_of
from stormproof.trident.recount import RECOUNTS_MAX, too_many
from stormproof.trident.start_preview import LedgerView, look, notes_of, sinks_told, table_of

NOTHING_TOGETHER: Final = np.empty((0, 2), np.int64)


def kept_in(folder: str, writers: Mapping[str, SinkWriter]) -> dict[str, SinkWriter]:
    """The writers; those that leave out misfits write to this folder, so that their files can be read."""
    return {
        name: replace(writer, directory=folder) if isinstance(writer, FileWriter) and writer.leaves_out else writer
        for name, writer in writers.items()
    }


@dataclass(frozen=True, slots=True)
class RehearsedCommit:
    """The commit of a batch that `engine` ran as `job`. Each sink may reject `most` messages of it; None: none."""

    engine: InlineEngine
    job: Job
    most: int | None

    def of_sink(self, sink: str, files: Sequence[PreparedFile]) -> RowsPreview:
        """What the sink would take of the files that the job wrote for it."""
        writer = self.job.writers[sink]
        if not isinstance(writer, FileWriter) or not writer.leaves_out:
            return RowsPreview.of(files)
        left_out, named, together = list[RefusedRow](), set[int](), NOTHING_TOGETHER
        error: SinkRefused | None = None
        for again in range(RECOUNTS_MAX + 1):
            if error is not None:
                report = self._again(sink, again, frozenset(named))
                if report.failures or report.late or report.lost:
                    break
                together, files = report.together, files_of(report.files, sink)
            try:
                found = rows_without_misfits(writer, files, self.most, of_groups=error is not None)
            except SinkRefused as refused:
                unnamed = error is None and refused.details.get(PROBLEM) == SinkProblem.MESSAGES_UNKNOWN
                error = refused
                if not self.most or not self.job.tracked or not (unnamed or isinstance(refused, GroupsRefused)):
                    break
                if isinstance(refused, GroupsRefused):
                    left_out += refused.rows
                    named |= {number for row in refused.rows for number, _ in row.messages}
                    named |= touched_by({MessageId(number) for number in named}, together).keys()
                if len(named) > self.most:
                    error = too_many(refused, self.most)
                    break
            else:
                if not left_out:
                    return found
                return replace(found, rejected=len(named), examples=examples_of(left_out))
        assert error is not None
        return replace(RowsPreview.of(files), rows=0, blocked=error.message)

    def _again(self, sink: str, again: int, left_out: frozenset[int]) -> JobReport:
        writers = {
            name: writer if name == sink else WritesNothing(name, writer) for name, writer in self.job.writers.items()
        }
        return self.engine.run(
            replace(
                self.job,
                writers=writers,
                attempt=self.job.attempt + again,
                excluded=self.job.excluded | left_out,
                per_message=True,
            )
        )


EXAMPLE_CHARACTERS: Final = 500
ATTEMPTS_MAX: Final = 5
"""Attempts at the batch: each leaves out the messages that failed in those before it."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """What the operators made of the messages."""

    failures: tuple[MessageFailure, ...] = ()
    rows: Mapping[str, RowsPreview] = field(default_factory=dict[str, RowsPreview])
    examples: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def rehearsed_topology(
    topology: TopologyGraph, guarantee: Guarantee | None = None, *, settings: Settings | None = None
) -> TopologyDryRun:
    """What a start and its first batch would do; see `Topology.dry_run`."""
    settings = settings or Settings()
    plan = compile_topology(topology, guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    require_shippable(plan)
    source = topology.source
    view, database = look(settings, plan.topology, None, graph_of(plan, source.name))
    if database is not None:
        require_own_tables(placed(plan, database, settings))
    previews = {sink.name: table_of(sink, plan, view, plan.topology, database) for sink in sinks_of(plan)}
    if view.refusal:
        return _told(plan, view, DryRunOutcome.REFUSE, SourcePreview(), _Ran(), sinks_told(plan, previews, {}))
    found = source.preview(view.incarnation, Limit(settings.batch_messages, settings.batch_bytes), database)
    writers = {name: preview.writer or WritesNothing(name) for name, preview in previews.items()}
    runs = bool(found.readers) and not plan.serial and not found.refused
    ran = _Ran()
    if runs:
        most = RejectLimit(settings.rejects_max_share).of_batch(found.messages)
        with kept_folder() as folder:
            kept = kept_in(folder, writers)
            ran = _run(plan, source, found, kept, view.last_txid + 1, settings.parallelism or 2, most)
    sinks = sinks_told(plan, previews, ran.rows)
    return _told(plan, view, _outcome(plan, found, outcome_of(sinks)), found, ran, sinks)


def _run(
    plan: Plan,
    source: Source,
    found: SourcePreview,
    writers: Mapping[str, SinkWriter],
    txid: int,
    parallelism: int,
    rejects_max: int | None,
) -> _Ran:
    failures = dict[int, MessageFailure]()
    engine, notes = InlineEngine(parallelism), tuple[str, ...]()
    job = Job(
        plan,
        found.readers,
        writers,
        NO_LIFE,
        txid,
        1,
        seed=0,
        tracked=plan.guarantee is not Guarantee.AT_MOST_ONCE,
    )
    report = engine.run(job)
    failures |= {failure.id: failure for failure in (*report.failures, *report.late)}
    while report.late:
        if job.attempt == ATTEMPTS_MAX:
            notes = (f"messages still failed in attempt {ATTEMPTS_MAX}: rows of theirs are among those of the sinks",)
            break
        job = replace(job, attempt=job.attempt + 1, excluded=frozenset(failures))
        report = engine.run(job)
        failures |= {failure.id: failure for failure in (*report.failures, *report.late)}
    commit = RehearsedCommit(engine, replace(job, excluded=frozenset(failures)), rejects_max)
    rows = {name: commit.of_sink(name, files_of(report.files, name)) for name in writers}
    return _Ran(tuple(failures.values()), rows, _examples(source, failures), notes)


def _examples(source: Source, failures: Mapping[int, MessageFailure]) -> tuple[str, ...]:
    return tuple(
        storable_text(f"message {source.shown_id(f.id, f.origin)} at {f.component}, {f.reason}: {f.error}")[
            :EXAMPLE_CHARACTERS
        ]
        for f in list(failures.values())[:EXAMPLES_MAX]
    )


def _outcome(plan: Plan, found: SourcePreview, of_sinks: DryRunOutcome) -> DryRunOutcome:
    if found.refused or of_sinks is DryRunOutcome.REFUSE:
        return DryRunOutcome.REFUSE
    if plan.serial or found.why:
        return DryRunOutcome.CANNOT_TELL
    return of_sinks if found.messages or of_sinks is DryRunOutcome.CANNOT_TELL else DryRunOutcome.WAIT


def _told(
    plan: Plan,
    view: LedgerView,
    outcome: DryRunOutcome,
    found: SourcePreview,
    ran: _Ran,
    sinks: tuple[DryRunSink, ...],
) -> TopologyDryRun:
    notes = [*notes_of(view), *([view.refusal] if view.refusal else []), *ran.notes]
    if view.may_run:
        notes.append(
            "its newest driver has not ended in order: a start would take over from it, or from one that runs now"
        )
    if plan.serial:
        notes.append("a bolt reads a state, which a dry run does not open: the operators were not run")
    return TopologyDryRun(
        plan.topology,
        outcome,
        view.last_txid + 1,
        found.messages,
        len(ran.failures),
        sinks,
        ran.examples,
        found.why,
        tuple(notes),
    )
