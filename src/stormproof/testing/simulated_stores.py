"""A simulation's sinks and sources: those in memory with faults, which outlive its drivers and record what happened.

By chance, a sink's table refuses rows, and its columns cannot hold some.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Final

import pyarrow as pa

from stormproof.core.base.clock import Clock
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.contract.fold import AnyFold
from stormproof.core.contract.sink import PreparedFile, SinkInput, SinkMode, SinkSpec, TaskContext, TaskWriter
from stormproof.core.contract.source import Lease, Limit, Resolution, Slice
from stormproof.core.pending.numbered import range_of
from stormproof.core.source.memory import MemorySource
from stormproof.core.storage.files import IN_MEMORY, kept_folder
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity
from stormproof.sinks.prepare.rejected_messages import FileRows, LeavingOutWriter, RowMessages, pairs_of
from stormproof.sinks.prepare.staging import parse_prepared_name, prepared_name
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.sinks.rows.by_key import LatestWriter
from stormproof.sinks.rows.limits import Limits
from stormproof.sinks.stores.memory import MemorySession, MemorySink, NextTable, limits_of
from stormproof.testing.faults import Chance, FaultKind

GROUPS_MAX: Final = 3
"""Rows of groups that all tables of a simulation refuse in one batch. A batch's job runs again for its refused groups some
few times (`stormproof.trident.driver.recovery`); then the batch is blocked, and no fault of a simulation needs an operator.
"""


class GroupRules:
    """Which rows of groups are refused, for all sinks of a simulation.

    It is drawn once for a row's values in a batch, as a constraint would have it: where the job runs again for its groups, a
    group that has the same messages is refused again.
    """

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._drawn = dict[tuple[FaultKind, str, int, str], bool]()
        self._refused = Counter[int]()

    def strikes(self, kind: FaultKind, sink: str, txid: int, row: pa.RecordBatch) -> bool:
        """Whether a sink's table refuses this one row of a batch."""
        values = repr(row.to_pylist()[0])
        key = (kind, sink, txid, values)
        if key not in self._drawn:
            may = self._refused[txid] < GROUPS_MAX
            self._drawn[key] = may and self._chance.strikes(kind, sink, lambda: f"a group's row {values}")
            self._refused[txid] += self._drawn[key]
        return self._drawn[key]


class Refusals:
    """Which rows of a sink are refused, by chance.

    Under at-most-once (`tracked` is off) no row of a group is refused: its messages cannot be named, so that would block the
    batch, and no fault of a simulation needs an operator.
    """

    def __init__(self, sink: str, chance: Chance, groups: GroupRules, *, tracked: bool) -> None:
        self._sink, self._chance, self._groups, self._tracked = sink, chance, groups, tracked
        self._has_groups = False

    def leaving_out(
        self, inner: TaskWriter, limits: Limits, empty: Callable[[], TaskWriter], context: TaskContext
    ) -> TaskWriter:
        """A writer without rows that their columns cannot hold."""

        def misfits(rows: pa.RecordBatch, messages: pa.RecordBatch) -> list[tuple[int, str]]:
            # In per-message mode a group's row names its messages, and may have a single one.
            self._has_groups |= bool(pairs_of(messages)[3].any())
            found = dict(limits.check(rows))
            for place in range(rows.num_rows):
                if place not in found and self._does_not_fit(context.txid, rows.slice(place, 1)):
                    found[place] = "a simulated column cannot hold it"
            return sorted(found.items())

        return _MisfitsByChance(inner, limits, empty, misfits)

    def _does_not_fit(self, txid: int, row: pa.RecordBatch) -> bool:
        if self._has_groups:
            return self._groups.strikes(FaultKind.REJECT, self._sink, txid, row)
        return self._chance.strikes(FaultKind.REJECT, self._sink)

    def rule(self, folder: str, transaction: PreparedTransaction) -> Callable[[FileRows], Sequence[str | None]]:
        """What says why each row of a part is refused, or None. A row that was taken once is taken again."""
        messages, asked = RowMessages(folder, transaction.files), dict[int, bool]()

        def reason(part: FileRows, place: int) -> str | None:
            row = messages.place(part.file, int(part.numbers[place]))
            if row not in asked:
                asked[row] = self._refuses(transaction, messages, row, part, place)
            return "a simulated constraint" if asked[row] else None

        return lambda part: [reason(part, place) for place in range(part.rows.num_rows)]

    def _refuses(
        self, transaction: PreparedTransaction, messages: RowMessages, row: int, part: FileRows, place: int
    ) -> bool:
        if transaction.rejects_max is None:
            return False
        if messages.unnamed[row] or transaction.of_groups:
            rows = part.rows.slice(place, 1)
            return self._tracked and self._groups.strikes(FaultKind.REFUSE, self._sink, transaction.txid, rows)
        shown = ", ".join(str(number) for number, _ in messages.of_row(row))
        return self._chance.strikes(FaultKind.REFUSE, self._sink, lambda: f"a row of message {shown}")


class _MisfitsByChance(LeavingOutWriter):
    """Leaves out rows that this function finds in a record batch with its message columns."""

    def __init__(
        self,
        inner: TaskWriter,
        limits: Limits,
        empty: Callable[[], TaskWriter],
        misfits: Callable[[pa.RecordBatch, pa.RecordBatch], Sequence[tuple[int, str]]],
    ) -> None:
        super().__init__(inner, limits, empty)
        self._found = misfits

    def misfits(self, rows: pa.RecordBatch, messages: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """By the function."""
        return self._found(rows, messages)


# ---- sinks and sources


@dataclass(frozen=True, slots=True)
class Applied:
    """The rows that a sink took at once, with the batch and the attempt that they came from."""

    batch: int
    attempt: int
    rows: pa.Table


class SimulatedSink(MemorySink):
    """A sink in memory in the place of a topology's own, with faults. Prepared files are in memory, too."""

    def __init__(
        self, spec: SinkSpec, input_: SinkInput, chance: Chance, groups: GroupRules, *, tracked: bool = True
    ) -> None:
        self._open = ExitStack()
        self.folder = self._open.enter_context(kept_folder())
        super().__init__(spec.name, staging=self.folder)
        self._staging = self.folder
        self.spec, self.input, self.chance = spec, input_, chance
        # Under at-most-once a misfit fails its message, as without the contract: that of a group would block the batch.
        self.leaves_out = spec.rejects_misfits and tracked
        self.rules = Refusals(spec.name, chance, groups, tracked=tracked)
        self.applied: list[Applied] = []

    def close(self) -> None:
        """Forget the prepared files."""
        self._open.close()

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

    @property
    def may_refuse(self) -> bool:
        """Whether its table may refuse rows, so that prepared files name their messages."""
        return self.chance.possible(FaultKind.REFUSE, self.name) or self.leaves_out

    def content(self) -> pa.Table:
        """What the sink holds: every row, or one row a key where the input is by key."""
        return self.input.schema.empty_table() if self.store.content is None else self.store.content

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> MemorySession:
        """Open the sink for one driver; older ones are fenced out from then on."""
        super().open(identity, input_, epoch, create=create)
        return SimulatedSession(self, identity, input_, epoch)

    def writer_to(self, folder: str, input_: SinkInput) -> FileWriter:
        """The writer of such rows, with the faults of its table's columns."""
        return SimulatedWriter(
            sink=self.name,
            directory=folder,
            limits=limits_of(input_),
            input=input_,
            leaves_out=self.leaves_out,
            names_messages=self.may_refuse,
            simulated=self,
        )


@dataclass(frozen=True)
class SimulatedWriter(FileWriter):
    """The executors' side of a simulated sink."""

    simulated: SimulatedSink = field(kw_only=True)

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """Refuse rows with NULL keys, and rows that a fault strikes; none where such rows are left out."""
        found, chance = list(super().check(rows)), self.simulated.chance
        if not self.leaves_out and chance.possible(FaultKind.REJECT, self.sink):
            struck = (row for row in range(rows.num_rows) if chance.strikes(FaultKind.REJECT, self.sink))
            found += [(row, "a simulated fault") for row in struck]
        return found

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task. Where no row can be refused, its files are streams of Arrow: these cost less."""
        if self.names_messages:
            return super().open_task(context, schema)
        writer = _StreamWriter(self.sink, self.directory, context, schema)
        return LatestWriter(writer, self.simulated.input) if self.simulated.input.mode is SinkMode.UPSERT else writer

    def left_out(self, writer: TaskWriter, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """Leave out those that a fault strikes, too."""
        return self.simulated.rules.leaving_out(writer, self.limits, self.empty(context, schema), context)


@dataclass(slots=True)
class _StreamWriter(TaskWriter):
    """One task's output, as a stream of Arrow in memory."""

    sink: str
    folder: str
    context: TaskContext
    schema: pa.Schema
    rows: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])

    def write(self, rows: pa.RecordBatch) -> None:
        self.rows.append(rows)

    def close(self) -> Sequence[PreparedFile]:
        if not self.rows:
            return ()
        table, buffer, name = (
            pa.Table.from_batches(self.rows, self.schema),
            pa.BufferOutputStream(),
            prepared_name(self.context),
        )
        with pa.ipc.new_stream(buffer, self.schema) as stream:
            stream.write_table(table)
        written = buffer.getvalue()
        file = IN_MEMORY.write_new(os.path.join(self.folder, name), private=True)
        file.write(memoryview(written))
        file.close()
        failpoint("task.after_file")
        return (PreparedFile(self.sink, name, table.num_rows, written.size, hashlib.sha256(written).hexdigest()),)

    def discard(self) -> None:
        self.rows.clear()


class SimulatedSession(MemorySession):
    """A simulated sink opened by one driver that has a ledger."""

    def __init__(self, sink: SimulatedSink, identity: SinkIdentity, input_: SinkInput, epoch: int) -> None:
        super().__init__(sink, sink.folder, identity, input_, epoch)
        self._simulated = sink

    def prepared(self, transaction: PreparedTransaction) -> list[pa.RecordBatch]:
        """The rows of the prepared files, file by file in path order."""
        if self._simulated.may_refuse:
            return super().prepared(transaction)
        paths = sorted(os.path.join(self._simulated.folder, file.path) for file in transaction.files)
        return [batch for path in paths for batch in pa.ipc.open_stream(IN_MEMORY.open_native(path))]

    def rule(self, transaction: PreparedTransaction) -> Callable[[FileRows], Sequence[str | None]]:
        """By chance."""
        return self._simulated.rules.rule(self._simulated.folder, transaction)

    def next_content(self, transaction: PreparedTransaction) -> NextTable:
        """As a table in memory; with a record of the rows."""
        next_ = super().next_content(transaction)
        names = [parse_prepared_name(file.path) for file in transaction.files]
        attempt = max((name.attempt for name in names if name is not None), default=0)
        self._simulated.applied.append(Applied(transaction.txid, attempt, next_.added))
        return next_


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
