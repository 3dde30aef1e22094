"""A simulation's sinks and sources: stores in memory that outlive its drivers, and record what happened to each message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pyarrow as pa

from stormproof.core.clock import Clock
from stormproof.core.errors import Fenced
from stormproof.core.failpoint import failpoint
from stormproof.core.folds import AnyFold
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.pending.numbered import range_of
from stormproof.core.postgres.database import Database
from stormproof.core.sink import PreparedFile, SinkInput, SinkMode, SinkSpec, TaskContext, TaskWriter
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.protocol import Lease, Limit, Resolution, Slice
from stormproof.sinks.folding import fold_tables
from stormproof.sinks.latest import LatestWriter, put_rows
from stormproof.sinks.limits import ColumnLimit, Limits
from stormproof.sinks.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitResult,
    Decision,
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    RefusedRow,
    Sink,
    SinkIdentity,
    SinkSession,
    decide,
)
from stormproof.testing.faults import Chance, FaultKind
from stormproof.testing.simulated_refusals import GroupRules, RefusingTable


@dataclass(frozen=True, slots=True)
class _Staged:
    context: TaskContext
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class _Applied:
    """The rows that a sink took at once, with the batch and the attempt that they came from."""

    batch: int
    attempt: int
    digest: str
    rows: pa.Table
    refused: tuple[RefusedRow, ...] = ()


class SimulatedSink(Sink):
    """A sink of a simulation: what is prepared and committed stays in memory, for all of its drivers."""

    def __init__(
        self, spec: SinkSpec, input_: SinkInput, chance: Chance, groups: GroupRules, *, tracked: bool = True
    ) -> None:
        self.spec = spec
        self.input = input_
        self.chance = chance
        self.staged: dict[str, _Staged] = {}
        self.applied: list[_Applied] = []
        self.epoch = 0
        # Under at-most-once a misfit fails its message, as without the contract: that of a group would block the batch.
        self.leaves_out = spec.rejects_misfits and tracked
        refuses = chance.possible(FaultKind.REFUSE, spec.name) or self.leaves_out
        self.refusing = (
            RefusingTable(spec.name, input_, chance, groups, tracked=tracked, leaves_out=self.leaves_out)
            if refuses
            else None
        )
        """The table's own rules; None: it takes every row, and nothing is written to a disk."""
        self._files = 0

    @property
    def name(self) -> str:
        """The sink's own."""
        return self.spec.name

    @property
    def target(self) -> str:
        """The sink's own."""
        return self.spec.target

    @property
    def modes(self) -> frozenset[SinkMode]:
        """The sink's own."""
        return self.spec.modes

    @property
    def fold_kinds(self) -> frozenset[type[AnyFold]]:
        """The sink's own."""
        return self.spec.fold_kinds

    def input_of(self, rows: SinkInput) -> SinkInput:
        """The sink's own."""
        return self.spec.input_of(rows)

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Refuse what the sink itself refuses."""
        self.spec.check(input_, guarantee)

    @property
    def rejects_misfits(self) -> bool:
        """The sink's own."""
        return self.spec.rejects_misfits

    def content(self) -> pa.Table:
        """What the sink holds: every row, or one row a key where the input is by key."""
        schema = self.input.schema
        if not self.input.is_by_key:
            return pa.concat_tables([schema.empty_table(), *(a.rows for a in self.applied)])
        content = schema.empty_table()
        for applied in self.applied:
            if self.input.mode is SinkMode.UPSERT:
                content, _ = put_rows(content, applied.rows, self.input)
            else:
                content = fold_tables(content, applied.rows, self.input, self.name)
        return content

    # The executors' side.

    def writer(self) -> SimulatedWriter:
        """What keeps prepared rows in memory."""
        required = {*self.input.keys, *self.input.order_by}
        columns = [ColumnLimit(f.name, str(f.type), not_null=f.name in required) for f in self.input.schema]
        return SimulatedWriter(self, Limits(tuple(columns)))

    def stage(self, context: TaskContext, rows: pa.Table) -> PreparedFile:
        """Keep a task's rows."""
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, rows.schema) as stream:
            stream.write_table(rows)
        written = buffer.getvalue()
        self._files += 1
        path = f"{context.txid}-{context.attempt}-{context.task}-{self._files}"
        self.staged[path] = _Staged(context, rows)
        return PreparedFile(self.name, path, rows.num_rows, written.size, hashlib.sha256(written).hexdigest())

    # The driver's side.

    def add(self, transaction: PreparedTransaction, attempt: int) -> tuple[RefusedRow, ...]:
        """Take prepared rows, which also stay prepared; gives those that it refuses."""
        refused = tuple[RefusedRow, ...]()
        if self.refusing is None:
            tables = [self.staged[file.path].rows for file in transaction.files]
            rows = pa.concat_tables([self.input.schema.empty_table(), *tables])
        else:
            rows, refused = self.refusing.taken(transaction)
        self.applied.append(_Applied(transaction.txid, attempt, transaction.digest, rows, refused))
        return refused

    def placed(self, database: Database, staging: str) -> SimulatedSink:
        """This sink: it needs neither."""
        del database, staging
        return self

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> SimulatedSession:
        """Open the sink for one driver; older ones are fenced out from then on."""
        del input_, create
        if epoch < self.epoch:
            raise Fenced(f"sink {self.name!r}: epoch {self.epoch} holds it, this is epoch {epoch}", epoch=epoch)
        self.epoch = epoch
        return SimulatedSession(self, identity, epoch)

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> SimulatedSession:
        """Open the sink for reading only."""
        del input_
        return SimulatedSession(self, identity, self.epoch)


@dataclass(frozen=True, slots=True)
class SimulatedWriter:
    """The executors' side of a simulated sink."""

    store: SimulatedSink
    limits: Limits

    @property
    def sink(self) -> str:
        """The sink's name."""
        return self.store.name

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """Refuse rows with NULL keys, and rows that a fault strikes; none where such rows are left out."""
        if self.store.leaves_out:
            return ()
        found = list(self.limits.check(rows))
        chance = self.store.chance
        if chance.possible(FaultKind.REJECT, self.sink):
            found += [
                (row, "a simulated fault")
                for row in range(rows.num_rows)
                if chance.strikes(FaultKind.REJECT, self.sink)
            ]
        return found

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        refusing = self.store.refusing
        if refusing is not None:
            return _FilesTask(self.store, context, refusing.open_task(context, schema, self.limits))
        writer = SimulatedTaskWriter(self.store, context, schema)
        return LatestWriter(writer, self.store.input) if self.store.input.mode is SinkMode.UPSERT else writer

    @property
    def names_messages(self) -> bool:
        """Where its table may refuse rows."""
        return self.store.refusing is not None

    def files_in(self) -> None:
        """None: what is prepared is in memory."""

    def resource(self) -> None:
        """None: bolts get nothing."""


@dataclass(slots=True)
class SimulatedTaskWriter(TaskWriter):
    """One task's output for one simulated sink."""

    store: SimulatedSink
    context: TaskContext
    schema: pa.Schema
    rows: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows."""
        self.rows.append(rows)

    def close(self) -> Sequence[PreparedFile]:
        """Keep the rows as one file, where there are any."""
        if not self.rows:
            return ()
        file = self.store.stage(self.context, pa.Table.from_batches(self.rows, self.schema))
        failpoint("task.after_file")
        return (file,)

    def discard(self) -> None:
        """Forget what was written."""
        self.rows.clear()


@dataclass(frozen=True, slots=True)
class _FilesTask(TaskWriter):
    """The same for a sink whose table may refuse rows: the rows are in files."""

    store: SimulatedSink
    context: TaskContext
    writer: TaskWriter

    def write(self, rows: pa.RecordBatch) -> None:
        self.writer.write(rows)

    def close(self) -> Sequence[PreparedFile]:
        files = self.writer.close()
        for file in files:
            self.store.staged[file.path] = _Staged(self.context, self.store.input.schema.empty_table())
        return files

    def discard(self) -> None:
        self.writer.discard()


class SimulatedSession(SinkSession):
    """A simulated sink opened by one driver that has a ledger."""

    def __init__(self, sink: SimulatedSink, identity: SinkIdentity, epoch: int) -> None:
        self._sink = sink
        self._identity = identity
        self._epoch = epoch

    @property
    def identity(self) -> SinkIdentity:
        """The name under which evidence is kept."""
        return self._identity

    @property
    def table_id(self) -> str:
        """The one table's."""
        return f"simulated-{self._sink.name}"

    def writer(self) -> SimulatedWriter:
        """The executors' side."""
        return self._sink.writer()

    def other_incarnations(self) -> tuple[str, ...]:
        """None: a simulation has one incarnation."""
        return ()

    def held(self) -> Held | None:
        """The last transaction, if there was one."""
        applied = self._sink.applied
        return Held(applied[-1].batch, applied[-1].digest) if applied else None

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit one transaction, by the table of `decide`.

        Raises:
            Fenced: a newer epoch holds this sink.
            PositionMismatch: the sink holds something else than `previous`.
        """
        sink = self._sink
        if self._epoch != sink.epoch:
            raise Fenced(f"sink {sink.name!r}: epoch {sink.epoch} holds it", epoch=self._epoch)
        if checked and decide(self._identity, transaction, self.held()) is Decision.SKIP:
            return replace(ALREADY_HELD, refused=sink.applied[-1].refused)
        attempt = max((sink.staged[file.path].context.attempt for file in transaction.files), default=0)
        return replace(APPLIED, refused=sink.add(transaction, attempt))

    def sweep(self, is_dead: Callable[[int, int, str], bool]) -> int:
        """Forget what dead attempts prepared."""
        staged = self._sink.staged
        dead = [path for path, s in staged.items() if is_dead(s.context.txid, s.context.attempt, path)]
        for path in dead:
            del staged[path]
        return len(dead)

    def finished(self, transaction: PreparedTransaction) -> None:
        """Forget the transaction's prepared rows."""
        for file in transaction.files:
            self._sink.staged.pop(file.path, None)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What the sink took, from its own log."""
        entries = tuple(
            Evidence(a.batch, a.digest, a.rows.num_rows, rejected=len(a.refused))
            for a in self._sink.applied
            if a.batch >= first and (last is None or a.batch <= last)
        )
        held = self.held()
        return EvidenceReport(self.table_id, entries, None if held is None else held.txid)

    def close(self) -> None:
        """Nothing to release."""


class SimulatedSource(MemorySource):
    """One spout's messages, with a record of how often each was opened, and how it ended."""

    def __init__(self, name: str, payloads: Sequence[bytes], *, max_attempts: int, clock: Clock, rng: Random) -> None:
        super().__init__(name, payloads, max_attempts=max_attempts, clock=clock, rng=rng)
        self.given = tuple(payloads)
        self.times_opened = [0] * len(payloads)
        self.failures: list[list[MessageFailure]] = [[] for _ in payloads]
        self.acked: set[int] = set()

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out messages, and count the opening of each."""
        slice_ = super().open(lease, limit, seed, tx)
        if slice_ is not None:
            for id_ in self._ids_of_lease(lease):
                self.times_opened[id_] += 1
        return slice_

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm, and record which messages were confirmed and which failed."""
        ids = self._ids_of_lease(lease)
        resolution = super().confirm(lease, failed, tx)
        if ids:
            for failure in failed:
                self.failures[failure.id].append(failure)
            self.acked.update(set(ids).difference(failure.id for failure in failed))
        return resolution

    def _ids_of_lease(self, lease: Lease) -> Sequence[int]:
        with self.rows() as rows:
            held = rows.take(lease, delete=False)
            if held is None:
                return ()
            return [retry.id for retry in rows.retries(held.id)] if held.at is None else range(*range_of(held.at))
