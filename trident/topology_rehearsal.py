"""What the next batch of a topology would do, found without a change: messages are read and not taken, rows are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.job import Job
from stormproof.core.message import MessageFailure, storable_text
from stormproof.core.settings import Settings
from stormproof.core.sink import SinkWriter, files_of
from stormproof.core.source.protocol import Limit, Source, SourcePreview
from stormproof.core.storage.kept_files import kept_folder
from stormproof.sinks.preview import EXAMPLES_MAX, RowsPreview
from stormproof.sinks.stand_ins import WritesNothing
from stormproof.trident.dry_run import DryRunOutcome, DryRunSink, TopologyDryRun, outcome_of
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.rows import NO_LIFE
from stormproof.trident.opening import placed, require_own_tables, sinks_of
from stormproof.trident.rehearsed_rejects import RehearsedCommit, kept_in
from stormproof.trident.reject_limit import RejectLimit
from stormproof.trident.start_preview import LedgerView, look, notes_of, sinks_told, table_of

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
