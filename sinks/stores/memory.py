"""A sink in this process's memory, with all that a sink promises: for users' tests and the project's own."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stormproof.core.base.arguments import require_function, require_object, require_path
from stormproof.core.base.errors import Fenced, PositionMismatch, SinkRefused, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.base.process import OneProcess
from stormproof.core.contract.sink import Lineage, SinkInput, SinkMode, TableKey
from stormproof.core.postgres.database import Database
from stormproof.core.storage.files import NOWHERE
from stormproof.core.storage.protocol import absolute
from stormproof.sinks.contract.preview import TableAction, TablePreview
from stormproof.sinks.contract.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitDecision,
    CommitResult,
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    RefusedRow,
    SinkIdentity,
    SinkProblem,
    decide,
)
from stormproof.sinks.contract.row_rule import (
    Columns,
    RowRule,
    SchemaContract,
    TableSink,
    check_fold_input,
    check_upsert_input,
)
from stormproof.sinks.prepare.rejected_messages import FileRows, Rejects
from stormproof.sinks.prepare.staging import Misfits, StagedSession, prepared_batches, require_files
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.sinks.rows.by_key import fold_tables, put_rows, require_unique_keys
from stormproof.sinks.rows.limits import ColumnLimit, Limits


class FaultPoint(StrEnum):
    """Where a planned fault strikes in a commit."""

    BEFORE = "before"
    """Nothing is applied."""
    AFTER = "after"
    """Everything is applied, and the answer is lost."""


@dataclass(frozen=True, slots=True)
class _Guard:
    txid: int
    digest: str
    table_id: str


@dataclass(frozen=True, slots=True)
class NextTable:
    """What a transaction makes of a table."""

    content: pa.Table
    added: pa.Table
    evidence: Evidence
    refused: tuple[RefusedRow, ...]


@dataclass(slots=True)
class _Log:
    """What the store keeps for one identity; it outlives the table, as a guard row outlives its table."""

    epoch: int = 0
    guard: _Guard | None = None
    entries: list[Evidence] = field(default_factory=list[Evidence])
    refused: dict[int, tuple[RefusedRow, ...]] = field(default_factory=dict[int, "tuple[RefusedRow, ...]"])


class MemoryTable:
    """What a memory sink holds. It outlives sessions and sinks, so a test's crash loses those and keeps this.

    Threads: sinks on several threads may commit to one store, one at a time. Forks: a fork that commits to its parent's
    store is refused, since it would write to a copy.
    """

    def __init__(self) -> None:
        self.guard = OneProcess("a memory sink's store")
        self._tables_made = 0
        self.table_id: str | None = None
        self.content: pa.Table | None = None
        self.logs: dict[str, _Log] = {}
        self._faults: list[tuple[FaultPoint, BaseException, int | None]] = []

    @property
    def is_new(self) -> bool:
        """Whether it never had a table."""
        return self._tables_made == 0

    def create(self, schema: pa.Schema) -> None:
        """Make the table, with an id that no earlier one had."""
        self._tables_made += 1
        self.table_id = f"memory-{self._tables_made}"
        self.content = schema.empty_table()

    def drop(self) -> None:
        """Drop the table with its rows; the guards stay."""
        self.table_id = None
        self.content = None

    def log(self, identity: SinkIdentity) -> _Log:
        """The log of one identity."""
        return self.logs.setdefault(identity.application_id, _Log())

    def fail(self, at: FaultPoint, error: BaseException, *, txid: int | None = None) -> None:
        """Make one commit (that of `txid`, or the next one) raise `error`, before or after its rows are applied."""
        self._faults.append((at, error, txid))

    def strike(self, at: FaultPoint, txid: int) -> None:
        """Raise the fault that is planned for this place, once."""
        for fault in self._faults:
            if fault[0] is at and fault[2] in (None, txid):
                self._faults.remove(fault)
                raise fault[1]


class MemorySink(TableSink):
    """Appends to, upserts or folds into, a table in memory. For `mode` and what follows it see `DeltaSink`.

    Prepared files are real ones, in `staging` (a temporary folder of its own by default), so every engine can write to
    it; what is committed is lost with the process.

    `refuse` makes a test's own constraint: it is called with each row that is committed, and gives the reason why the table
    refuses the row, or None. The row's message is then rejected, as by a constraint of Postgres. Of the
    values of `schema_contract` it serves ``"freeze"`` and ``"discard_row"``.

    Threads: topologies on several threads may share one object; their commits come one after the other. Forks: a topology
    that runs in a fork needs a sink made there; its parent's is refused.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        mode: SinkMode | str | None = None,
        key: Columns | None = None,
        order_by: Columns | None = None,
        delete_when: str | None = None,
        keep: Columns | None = None,
        lineage: Lineage | bool = False,
        store: MemoryTable | None = None,
        staging: str | Path | None = None,
        refuse: Callable[[dict[str, Any]], str | None] | None = None,
        schema_contract: SchemaContract | str = SchemaContract.FREEZE,
    ) -> None:
        where = f"sink {name!r}"
        if store is not None:
            require_object(where, "store", store, MemoryTable, "stormproof.sinks.stores.memory.MemoryTable()")
        if staging is not None:
            require_path(where, "staging", staging)
        if refuse is not None:
            require_function(where, "refuse", refuse, "lambda row: 'too long' if len(row['word']) > 9 else None")
        self._contract = SchemaContract.given(where, schema_contract)
        if self._contract not in (SchemaContract.FREEZE, SchemaContract.DISCARD_ROW):
            raise TopologyError(
                f"{where}: schema_contract={self._contract.value!r} is served by DeltaSink and PostgresSink; a table in "
                "memory takes 'freeze' or 'discard_row'"
            )
        self._name = name
        self._rule = RowRule.given(where, mode, key, order_by, delete_when, keep, lineage)
        self.refuse = refuse
        self.store = MemoryTable() if store is None else store
        self._staging = _own_folder(self) if staging is None else absolute(staging)

    @property
    def may_refuse(self) -> bool:
        """Whether the table has a rule of its own."""
        return self.refuse is not None

    @property
    def target(self) -> str:
        """Where the rows are, for people."""
        return f"memory:{self._name}"

    @property
    def is_new_in_process(self) -> bool:
        """Whether its store never had a table: what another process held in memory is gone with that process."""
        return self.store.is_new

    def table_key(self) -> TableKey:
        """The store, which is an object of this process."""
        return "memory", id(self.store)

    def files_in(self, input_: SinkInput) -> str:
        """The staging folder."""
        return self._staging

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where such rows cannot be folded or upserted; every guarantee is served."""
        check_upsert_input(input_, f"sink {self._name!r}")
        check_fold_input(input_, f"sink {self._name!r}")

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> MemorySession:
        """Make the table if it is missing and `create`, and fence older epochs out."""
        log = self.store.log(identity)
        if epoch < log.epoch:
            raise Fenced(f"sink {self._name!r}: epoch {log.epoch} holds it, this is epoch {epoch}", epoch=epoch)
        if self.store.content is None:
            if not create:
                raise SinkRefused(
                    f"sink {self._name!r}: there is no table {self.target}", problem=SinkProblem.TABLE_GONE
                )
            self.store.create(input_.schema)
        _require_schema(self.store, input_, self._name)
        log.epoch = epoch
        return MemorySession(self, self._staging, identity, input_, epoch)

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> MemorySession:
        """Open for reading only."""
        return MemorySession(self, self._staging, identity, input_, None)

    def preview(self, identity: SinkIdentity, input_: SinkInput, database: Database | None = None) -> TablePreview:
        """By the store."""
        table_id = self.store.table_id
        try:
            _require_schema(self.store, input_, self._name)
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message, table_id=table_id)
        return TablePreview(
            TableAction.CREATE if self.store.content is None else TableAction.USE,
            can_refuse=() if self.refuse is None else ("refuse, the test's own rule",),
            table_id=table_id,
            other_lives=() if table_id is None else self.inspect(identity, input_).other_incarnations(),
            writer=self.writer_to(NOWHERE, input_),
        )

    def writer_to(self, folder: str, input_: SinkInput) -> FileWriter:
        """The writer of such rows to this folder."""
        return FileWriter(
            self._name,
            folder,
            limits_of(input_),
            input=input_,
            leaves_out=self.rejects_misfits,
            names_messages=True,
        )

    def rows(self) -> list[dict[str, object]]:
        """What the table holds, row by row, in no particular order."""
        content = self.store.content
        found: list[dict[str, object]] = [] if content is None else content.to_pylist()
        return found


class MemorySession(StagedSession):
    """A memory sink opened by one driver."""

    def __init__(
        self, sink: MemorySink, staging: str, identity: SinkIdentity, input_: SinkInput, epoch: int | None
    ) -> None:
        self._sink = sink
        self._store = sink.store
        self.staging = staging
        self._identity = identity
        self._input = input_
        self._epoch = epoch
        self._where = f"sink {identity.sink!r} ({sink.target})"

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """Changes when the table is dropped and made again."""
        if self._store.table_id is None:
            raise SinkRefused(f"{self._where}: the table is gone", problem=SinkProblem.TABLE_GONE)
        return self._store.table_id

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder."""
        return self._sink.writer_to(self.staging, self._input)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed here."""
        return self._identity.other_lives(id_ for id_, log in self._store.logs.items() if log.guard is not None)

    def held(self) -> Held | None:
        """The last transaction that the store holds for this identity.

        Raises:
            PositionMismatch: it went to another table of this name.
        """
        guard = self._store.log(self._identity).guard
        if guard is None:
            return None
        if guard.table_id != self.table_id:
            raise PositionMismatch(
                f"{self._where}: txid {guard.txid} went to table {guard.table_id}, this is {self.table_id}",
                held=guard.txid,
                table_id=self.table_id,
                expected=guard.table_id,
            )
        return Held(guard.txid, guard.digest)

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit one transaction, by the table of `decide`."""
        with self._store.guard:
            return self._commit(transaction, checked=checked)

    def _commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        log = self._store.log(self._identity)
        if self._epoch != log.epoch:
            raise Fenced(f"{self._where}: epoch {log.epoch} holds it, this is epoch {self._epoch}", epoch=self._epoch)
        if checked and decide(self._identity, transaction, self.held()) is CommitDecision.SKIP:
            known = [entry.superseded for entry in log.entries if entry.txid == transaction.txid]
            refused = log.refused.get(transaction.txid, ())
            return replace(ALREADY_HELD, superseded=(known[0] if known else None) or 0, refused=refused)
        next_ = self.next_content(transaction)
        self._store.strike(FaultPoint.BEFORE, transaction.txid)
        self._store.content = next_.content
        if log.guard is None or checked or transaction.txid >= log.guard.txid:
            log.guard = _Guard(transaction.txid, transaction.digest, self.table_id)
        # Unchecked, a later attempt may write a txid again: the ledger names the last one.
        log.entries = [entry for entry in log.entries if entry.txid != transaction.txid]
        log.entries.append(next_.evidence)
        log.refused[transaction.txid] = next_.refused
        self._store.strike(FaultPoint.AFTER, transaction.txid)
        return replace(APPLIED, superseded=next_.evidence.superseded or 0, refused=next_.refused)

    def next_content(self, transaction: PreparedTransaction) -> NextTable:
        """What the transaction makes of the table; nothing is changed.

        Raises:
            SinkRefused: the table is gone or another one, or files are missing or changed.
        """
        where = f"{self._where}, txid {transaction.txid}"
        if self._store.content is None:
            raise SinkRefused(f"{where}: the table is gone", problem=SinkProblem.TABLE_GONE)
        _require_schema(self._store, self._input, self._identity.sink)
        require_files(self.staging, transaction.files, where=where, digests=True)
        batches = self.prepared(transaction)
        prepared = sum(batch.num_rows for batch in batches)
        if prepared != transaction.rows:
            raise SinkRefused(f"{where}: {prepared} rows in the prepared files instead of {transaction.rows}")
        refused, reinstated = tuple[RefusedRow, ...](), 0
        if self._sink.may_refuse or Misfits.of(transaction.files):
            batches, refused, reinstated = self._without_refused(transaction, where)
        added = pa.Table.from_batches(batches, self._input.schema) if batches else self._input.schema.empty_table()
        held, superseded = self._store.content, transaction.superseded - reinstated
        if not self._input.is_by_key:
            content = pa.concat_tables([held, added])
        else:
            require_unique_keys(added.to_batches, added.num_rows, self._input.keys, where)
            if self._input.mode is SinkMode.UPSERT:
                content, unchanged = put_rows(held, added, self._input)
                superseded += unchanged
            else:
                content = fold_tables(held, added, self._input, where)
        evidence = Evidence(
            transaction.txid,
            transaction.digest,
            added.num_rows,
            rejected=len(refused),
            superseded=superseded,
            reinstated=reinstated,
        )
        return NextTable(content, added, evidence, refused)

    def prepared(self, transaction: PreparedTransaction) -> list[pa.RecordBatch]:
        """The rows of the prepared files."""
        return list(prepared_batches(self.staging, transaction.files))

    def rule(self, transaction: PreparedTransaction) -> Callable[[FileRows], Sequence[str | None]]:
        """What says of some rows why the table refuses each of them, or None."""
        refuse = self._sink.refuse or (lambda _: None)
        return lambda part: [self._refusal(row, refuse) for row in part.rows.to_pylist()]

    def _without_refused(
        self, transaction: PreparedTransaction, where: str
    ) -> tuple[list[pa.RecordBatch], tuple[RefusedRow, ...], int]:
        """The rows that the table takes by the test's own rule, those that it does not get, and how many of both had been
        superseded.
        """
        rejects = Rejects(self.staging, transaction, transaction.rejects_max, where, self._input)
        rule, again = self.rule(transaction), True
        kept = list[pa.RecordBatch]()
        while again:
            kept.clear()
            for part in rejects.kept():
                reasons = rule(part)
                for place, why in enumerate(reasons):
                    if why is not None:
                        rejects.add(part.row(place).refused(None, why))
                kept.append(part.only(np.array([why is None for why in reasons])).rows)
            again = rejects.close()
        return kept, rejects.rows(), rejects.reinstated

    def _refusal(self, row: dict[str, Any], refuse: Callable[[dict[str, Any]], str | None]) -> str | None:
        """Why the table refuses a row: not where it has a later one, since then the row changes nothing."""
        why, held = refuse(row), self._store.content
        if why is None or held is None or self._input.mode is not SinkMode.UPSERT:
            return why
        names = self._input.schema.names
        added = pa.Table.from_pylist([{name: row[name] for name in names}], self._input.schema)
        return None if put_rows(held, added, self._input)[1] else why

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The store's own log."""
        log = self._store.log(self._identity)
        entries = tuple(e for e in log.entries if e.txid >= first and (last is None or e.txid <= last))
        problems: tuple[str, ...] = ()
        if log.guard is not None and log.guard.table_id != self._store.table_id:
            problems = (
                f"txid {log.guard.txid} went to table {log.guard.table_id}, there is now {self._store.table_id}",
            )
        return EvidenceReport(
            table_id=self._store.table_id,
            entries=entries,
            last_txid=None if log.guard is None else log.guard.txid,
            problems=problems,
        )

    def close(self) -> None:
        """Nothing to let go."""


def limits_of(input_: SinkInput) -> Limits:
    """What a table in memory can hold: NULL is not for its keys."""
    required = {*input_.keys, *input_.order_by}
    return Limits(tuple(ColumnLimit(f.name, str(f.type), not_null=f.name in required) for f in input_.schema))


def _require_schema(store: MemoryTable, input_: SinkInput, sink: str) -> None:
    if store.content is None:
        return
    for there, asked in zip(store.content.schema, input_.schema, strict=False):
        if there.name != asked.name or there.type != asked.type:
            raise SinkRefused(
                f"sink {sink!r}: the table has column {there.name!r} of type {there.type}, the rows have "
                f"{asked.name!r} of type {asked.type}",
                column=there.name,
            )
    if len(store.content.schema) != len(input_.schema):
        raise SinkRefused(
            f"sink {sink!r}: the table has {store.content.schema.names}, the rows have {input_.schema.names}"
        )


def _own_folder(sink: MemorySink) -> str:
    """A temporary folder that goes with the sink, in the process that made it and not in its forks."""
    folder = tempfile.mkdtemp(prefix="stormproof-memory-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    weakref.finalize(sink, remove)
    return folder
