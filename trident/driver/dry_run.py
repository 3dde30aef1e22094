"""What a commit, a start, and the next batch of a topology would do, found without a change.

The ledger is read, each sink is asked about its table, messages are read and not taken, and rows are dropped. What each sink
would take of them, and which messages it would reject, is found as a commit does, in memory. Where a row of a group does not
fit, the job runs again for that sink alone, without the messages that the row names: see `Recount`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Final

import numpy as np
import sqlalchemy as sa

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import Json, PositionMismatch, SinkRefused
from stormproof.core.base.message import Guarantee, MessageFailure, MessageId, storable_text
from stormproof.core.contract.sink import PreparedFile, SinkWriter, files_of
from stormproof.core.contract.source import Limit, Source, SourcePreview
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.core.storage.files import kept_folder
from stormproof.core.task.job import Job
from stormproof.core.tracking.partners import touched_by
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.contract.preview import EXAMPLES_MAX, RowsPreview, TableAction, TablePreview, example_of
from stormproof.sinks.contract.protocol import PROBLEM, PreparedTransaction, RefusedRow, Sink, SinkIdentity, SinkProblem
from stormproof.sinks.prepare.rejected_messages import GroupsRefused, Rejects
from stormproof.sinks.prepare.staging import Misfits
from stormproof.sinks.prepare.writer import FileWriter, WritesNothing
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.driver.batch_records import RejectLimit
from stormproof.trident.driver.opening import placed, require_own_tables, sinks_of
from stormproof.trident.driver.recovery import RECOUNTS_MAX, too_many
from stormproof.trident.ledger import handed_in, other_lives, sink_records
from stormproof.trident.ledger.database import Tx, ledger_engine
from stormproof.trident.ledger.graphs import Graph, compared, graph_of
from stormproof.trident.ledger.ledger import lacking_rights
from stormproof.trident.ledger.sink_records import Bound
from stormproof.trident.ledger.tables import NO_LIFE, Run, Txn
from stormproof.trident.terms.transaction_states import TxnState


class DryRunOutcome(StrEnum):
    """What the same call without `dry_run` would end with, as far as can be told."""

    COMMIT = "would commit"
    SUPPRESS = "would suppress"
    """The key is written: nothing would be computed or written."""
    ROLL_FORWARD = "would roll forward"
    """The key's content is fixed: it would be completed from its files."""
    WAIT = "would wait"
    """There is no message to open, and nothing speaks against a start."""
    CANNOT_TELL = "cannot tell"
    """A source cannot be read without taking its messages, a bolt reads a state, a sink has no preview, or its table cannot
    be read; nothing speaks against a commit at the others.
    """
    REFUSE = "would refuse"
    """A table cannot take the rows, or a row is refused: nothing would be written there."""


@dataclass(frozen=True, slots=True)
class DryRunSink:
    """What would become of one sink: of its table, and of the rows."""

    sink: str
    target: str
    mode: str
    table: TablePreview
    rows: RowsPreview

    @property
    def refuses(self) -> bool:
        """Whether nothing could be written for this sink's sake."""
        return self.table.action is TableAction.REFUSE or self.rows.refused > 0 or bool(self.rows.blocked)

    def lines(self) -> list[str]:
        """For people."""
        table, rows = self.table, self.rows
        found = [f"  {self.sink} ({self.target}), {self.mode}: {_TOLD[table.action]}"]
        found += [f"    {change}" for change in table.changes]
        if table.why:
            found.append(f"    {table.why}")
        if table.writer is not None:
            files = f"{rows.files} file{'' if rows.files == 1 else 's'}"
            found.append(f"    {rows.rows:,} rows, {files}, {rows.bytes:,} bytes")
        if rows.superseded:
            found.append(f"    {rows.superseded:,} rows left out: another row of their key is later")
        found += [f"    column {column!r}: {n:,} values would be NULL" for column, n in rows.discarded.items()]
        if rows.refused:
            found.append(f"    {rows.refused:,} rows refused, for example:")
            found += [f"      {text}" for text in rows.examples]
        if rows.rejected:
            found.append(f"    {rows.rejected:,} messages would be rejected, with all of their rows here; for example:")
            found += [f"      {text}" for text in rows.examples]
        if rows.blocked:
            found.append(f"    would block the batch: {rows.blocked}")
        found += [f"    not tried: {rule}" for rule in table.can_refuse]
        return found

    def to_json(self) -> dict[str, Json]:
        """For programs."""
        table: dict[str, Json] = {
            "action": self.table.action.value,
            "why": self.table.why,
            "changes": [*self.table.changes],
            "can_refuse": [*self.table.can_refuse],
        }
        rows: dict[str, Json] = json.loads(json.dumps(asdict(self.rows)))
        return {"sink": self.sink, "target": self.target, "mode": self.mode, "table": table, "rows": rows}


_TOLD: Final = {
    TableAction.CREATE: "would create the table",
    TableAction.USE: "would write to the table as it is",
    TableAction.ALTER: "would change the table",
    TableAction.REFUSE: "would refuse",
    TableAction.CANNOT_TELL: "cannot tell",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rehearsal:
    """What is told of any dry run."""

    name: str
    outcome: DryRunOutcome
    txid: int
    sinks: tuple[DryRunSink, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether it would be refused."""
        return self.outcome is DryRunOutcome.REFUSE

    def _text(self, *head: str) -> str:
        of_sinks = [line for sink in self.sinks for line in sink.lines()]
        return "\n".join([*head, *of_sinks, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Json]:
        """The same for programs."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {name: [*value] if isinstance(value, tuple) else value for name, value in own.items()}
        return {**own, "outcome": self.outcome.value, "sinks": [sink.to_json() for sink in self.sinks]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(_Rehearsal):
    """What a call would do; `str` of it is for people, `to_json` for programs. Nothing was done.

    `txid` is the one that has the key's rows, or else the next one. `rows` is how many the job computed; None where it was
    not run, since the key is written or no sink can be previewed. `notes` says what a call would do before, or what a person
    has to know.
    """

    key: str
    rows: int | None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows:,} rows"
        return self._text(f"dry run of {self.name}, key {self.key!r}: {self.outcome}, txid {self.txid}{rows}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyDryRun(_Rehearsal):
    """What the next batch of a topology would do; `str` of it is for people, `to_json` for programs. Nothing was done.

    `txid` is the next one. `messages` were read: at most one batch, of those that were never opened. `failed` of them fail;
    there are some `examples`. `unread` says why messages of a source were not read. `notes` says what a start would do
    before.
    """

    messages: int
    failed: int
    examples: tuple[str, ...] = ()
    unread: str = ""

    def __str__(self) -> str:
        read = f"{self.messages:,} messages read, {self.failed:,} would fail"
        return self._text(
            f"dry run of topology {self.name}: {self.outcome}, txid {self.txid}; {read}",
            *(f"  failed: {text}" for text in self.examples),
            *([f"  not read: {self.unread}"] if self.unread else []),
        )


def outcome_of(sinks: Sequence[DryRunSink]) -> DryRunOutcome:
    """What a call that is to write would end with."""
    if any(sink.refuses for sink in sinks):
        return DryRunOutcome.REFUSE
    unknown = any(sink.table.action is TableAction.CANNOT_TELL for sink in sinks)
    return DryRunOutcome.CANNOT_TELL if unknown else DryRunOutcome.COMMIT


_NEEDED_FOR_KEYS: Final = ((handed_in.handed_in, "INSERT"),)


@dataclass(frozen=True, slots=True)
class LedgerView:
    """What the ledger says of a name, and of a job's key; as it is here where it has never seen the name."""

    incarnation: str | None = None
    taken: int | None = None
    last_txid: int = 0
    unresolved: tuple[Txn, ...] = ()
    bound: Mapping[str, Bound] = field(default_factory=dict[str, Bound])
    adopted: frozenset[str] = frozenset()
    forgotten: Mapping[str, str] = field(default_factory=dict[str, str])
    """Who had each life forgotten."""
    notes: tuple[str, ...] = ()
    refusal: str = ""
    """Why the ledger would refuse the start."""
    may_run: bool = False
    """Whether its newest driver has not ended in order, so that it may run now."""


def look(settings: Settings, name: str, key: str | None, graph: Graph) -> tuple[LedgerView, Database | None]:
    """Read the ledger; `key` None: of a topology. An embedded Postgres that was never started is not made: then there is
    no database.

    Raises:
        StoreUnavailable: the database does not answer.
        UsageError: a streaming query uses the name.
    """
    if settings.uses_embedded and not (settings.home / "postgres" / "data").exists():
        return LedgerView(notes=("there is no ledger yet: the first start makes an embedded Postgres",)), None
    database = settings.resolve_database()
    engine = ledger_engine(database)
    try:
        with AuditLedger(engine).snapshot() as ledger:
            if not handed_in.has_table(ledger.connection):
                note = "the database has no ledger yet; the first start makes it, as does: stormproof ledger migrate"
                return LedgerView(notes=(note,)), database
            if key is not None:
                handed_in.require_use(ledger.connection, name, by_key=True)
            missing = _missing_rights(ledger.connection, () if key is None else _NEEDED_FOR_KEYS)
            if name not in [topology.name for topology in ledger.topologies()]:
                return LedgerView(forgotten=other_lives.forgotten_lives(ledger.connection), refusal=missing), database
            topology = ledger.topology(name)
            incarnation = topology.incarnation
            older = None if topology.stopped_at is not None else "the last driver"
            tx = Tx(ledger.connection, Run(name, incarnation, topology.epoch + 1, older), SystemClock())
            bound = {
                b.sink: b
                for known in ledger.sinks(incarnation)
                if (b := sink_records.bound(tx, known.sink)) is not None
            }
            changes, refusal = _compared(tx, graph)
            view = LedgerView(
                incarnation,
                None if key is None else _txid_of(ledger.connection, incarnation, key),
                ledger.last_txid(incarnation) or 0,
                tuple(ledger.unresolved(incarnation)),
                bound,
                other_lives.adopted_by(ledger.connection, incarnation),
                other_lives.forgotten_lives(ledger.connection),
                changes,
                refusal=missing or refusal,
                may_run=topology.stopped_at is None,
            )
            return view, database
    finally:
        engine.dispose()


def _txid_of(connection: sa.Connection, incarnation: str, key: str) -> int | None:
    job = handed_in.job_of(connection, incarnation, key)
    return None if job is None else job.txid


def _missing_rights(connection: sa.Connection, more: Sequence[tuple[sa.Table, str]]) -> str:
    """Why this role could not write to the ledger; a dry run itself needs only to read it."""
    lacking = lacking_rights(connection, more)
    return "" if lacking is None else f"this role cannot write to the ledger: {lacking}; see: stormproof doctor"


def _compared(tx: Tx, graph: Graph) -> tuple[tuple[str, ...], str]:
    """What a start would say of the changed graph; and why it would be refused."""
    try:
        news = compared(tx, graph)
    except PositionMismatch as mismatch:
        return (), mismatch.message
    return () if news is None else tuple(change.text for change in news.changes if change.is_loud), ""


def sinks_told(
    plan: Plan, previews: Mapping[str, TablePreview], rows: Mapping[str, RowsPreview]
) -> tuple[DryRunSink, ...]:
    """What is told of each sink, in the topology's order."""
    return tuple(
        DryRunSink(s.name, s.target, plan.sinks[s.name].mode.value, previews[s.name], rows.get(s.name, RowsPreview()))
        for s in plan.sink_specs
    )


def table_of(sink: Sink, plan: Plan, view: LedgerView, name: str, database: Database | None) -> TablePreview:
    """The sink's own word, and the ledger's on which table it must be, as a start would have it."""
    identity = SinkIdentity(name, view.incarnation or NO_LIFE, sink.name)
    found = sink.preview(identity, plan.sinks[sink.name], database)
    bound = view.bound.get(sink.name)
    holds, claims = (sorted(set(lives) - view.adopted) for lives in (found.other_lives, found.claimed_by))
    why = ""
    if bound is not None and found.action is TableAction.CREATE and not sink.is_new_in_process:
        why = bound.is_gone(sink.target).message
    elif bound is not None and found.table_id not in (None, bound.table_id):
        why = bound.is_another(sink.target, found.table_id or "").message
    elif bound is not None and found.dropped:
        why = found.dropped
    elif bound is None and (holds or claims):
        run = Run(name, identity.incarnation, 0)
        why = other_lives.unknown(run, sink.name, sink.target, holds, claims, view.forgotten).message
    return replace(found, action=TableAction.REFUSE, why=why, writer=None) if why else found


def notes_of(view: LedgerView) -> tuple[str, ...]:
    """What a start would do first, and what else a person has to know."""
    notes = list(view.notes)
    for txn in view.unresolved:
        if txn.state is TxnState.OPEN:
            notes.append(
                f"txid {txn.txid} is open: its driver was killed, or runs now; a start would fence it and abort it"
            )
        elif txn.state is TxnState.BLOCKED:
            notes.append(
                f"txid {txn.txid} is blocked: a start would try it again, and stop there if it is refused again"
            )
        else:
            notes.append(f"txid {txn.txid} is {txn.state}: a start would complete it first")
    return tuple(notes)


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
        name=plan.topology,
        outcome=outcome,
        txid=view.last_txid + 1,
        messages=found.messages,
        failed=len(ran.failures),
        sinks=sinks,
        examples=ran.examples,
        unread=found.why,
        notes=tuple(notes),
    )


def rows_without_misfits(
    writer: FileWriter, files: Sequence[PreparedFile], most: int | None, *, of_groups: bool = False
) -> RowsPreview:
    """What a table would take of these prepared files, where a sink may reject so many messages (None: none).

    The table's own rules (`TablePreview.can_refuse`) are not tried.

    Raises:
        GroupsRefused: misfits are rows of groups, whose messages are named.
        SinkRefused: messages of misfits are not known, or are more than may be rejected.
    """
    found, misfits = RowsPreview.of(files), Misfits.of(files)
    if not misfits:
        return found
    assert writer.input is not None
    transaction = PreparedTransaction(1, None, "", found.rows, tuple(files), most, of_groups)
    rejects = Rejects(
        writer.directory, transaction, most, f"sink {writer.sink!r}", writer.input, undecided=writer.undecided
    )
    rows, again = 0, True
    while again:
        rows = sum(part.rows.num_rows for part in rejects.kept())
        again = rejects.close()
    return replace(
        found,
        rows=rows,
        superseded=found.superseded - rejects.reinstated,
        rejected=len(rejects.messages),
        examples=examples_of(misfits.all),
    )


def examples_of(rows: Sequence[RefusedRow]) -> tuple[str, ...]:
    """Some of these rows, each with its reason."""
    return tuple(example_of(row.error, row.text) for row in rows[:EXAMPLES_MAX])
