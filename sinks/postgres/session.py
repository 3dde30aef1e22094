"""A Postgres sink opened by one driver: fence, guard, rows and evidence in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from stormproof.core.errors import Fenced, PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.core.failpoint import failpoint
from stormproof.core.message import storable_text
from stormproof.core.postgres.database import Database, backend_identity, connect, may_pass, terminate_backends
from stormproof.core.postgres.rights import explained
from stormproof.core.sink import SinkInput
from stormproof.sinks.folding import require_unique_keys
from stormproof.sinks.limits import Limits
from stormproof.sinks.postgres import bookkeeping, claims
from stormproof.sinks.postgres.durable import require_durable, volatile_relations
from stormproof.sinks.postgres.folds import fold_assignment
from stormproof.sinks.postgres.refusals import require_writable, warning_of, what_can_refuse
from stormproof.sinks.postgres.row_by_row import RefusedRow, move_row_by_row
from stormproof.sinks.postgres.table import (
    Table,
    TableName,
    column_limits,
    create_statement,
    find_oid,
    read_table,
    require_table,
    wire_schema,
)
from stormproof.sinks.protocol import (
    TABLE_GONE,
    CommitOutcome,
    Decision,
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    decide,
    least_rows,
)
from stormproof.sinks.staging import FileWriter, IsDead, prepared_batches, remove_staged, require_files, sweep_folder

log = logging.getLogger("stormproof.sink")

LOCK_TIMEOUT_MS: Final = 30_000
"""How long a commit waits for somebody else's lock on the table before it says so."""

TAKE_OVER_LOCK_TIMEOUT_MS: Final = 2_000
TAKE_OVER_TRIES_MAX: Final = 5
"""A backend of an older epoch may come anew between its siblings' end and the new epoch: then it is ended, too."""

# Unchecked, a txid may be written again by a later attempt, which is the one that the ledger names in the end.
_LATER_WINS: Final = (
    "on conflict (topology, incarnation, sink, txid) do update "
    "set rows = excluded.rows, digest = excluded.digest, epoch = excluded.epoch, committed_at = excluded.committed_at"
)

COUNTED_ROWS_MAX: Final = 5_000_000
"""Rows that an audit counts at most in one table: about a second of reading."""

_ADDED: Final = sql.Identifier("stormproof_added")

_MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"


class PostgresSession:
    """One driver's side of a Postgres table. `epoch` None: for reading only."""

    def __init__(
        self,
        database: Database,
        name: TableName,
        *,
        staging: str,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int | None,
    ) -> None:
        self._database = database
        self._name = name
        self._staging = staging
        self._identity = identity
        self._input = input_
        self._epoch = epoch
        self._where = f"sink {identity.sink!r} (table {name} at {database.redacted})"
        self._mine = {"topology": identity.topology, "incarnation": identity.incarnation, "sink": identity.sink}
        self._connection: psycopg.Connection | None = None
        self._server = ""
        self._table_id: str | None = None
        self._limits = Limits()

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """Server, database and oid: another after DROP and CREATE, and after dump and restore."""
        if self._table_id is None:
            with self._transaction() as connection:
                self._table_id = self._current_table_id(connection)
        if self._table_id is None:
            raise self._gone(self._where)
        return self._table_id

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder."""
        return FileWriter(self._identity.sink, self._staging, self._limits)

    def take_over(self, *, create: bool) -> None:
        """Make what is missing, end older epochs' backends, raise the fence, and check the table.

        Raises:
            Fenced: a newer epoch holds this sink.
            SinkRefused: the table is missing and not to be made, or cannot hold the rows.
            StoreUnavailable: Postgres cannot be reached, or somebody holds the fence and will not let go.
        """
        if not create:
            # Before anything is made: this may be another database than the one that the table is in.
            with self._transaction(fenced=False) as connection:
                self._table(connection)
        self._raise_fence()
        with self._transaction() as connection:
            self._lock_fence(connection)
            if find_oid(connection, self._name) is None:
                if not create:
                    raise self._gone(self._where)
                bookkeeping.one_at_a_time(connection)
                connection.execute(create_statement(self._name, self._input))
            table = self._table(connection)
            require_table(table, self._input, self._where)
            require_durable(connection, table.oid, self._where)
            require_writable(connection, table.oid, self._input, self._where)
            refusing = what_can_refuse(connection, table.oid, self._input)
            self._limits = column_limits(table, self._input)
            self._table_id = self._current_table_id(connection)
        if refusing:
            log.warning("%s: %s", self._where, warning_of(refusing))

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Have a guard row without a txid speak of the table; see `ClaimsTable`."""
        with self._transaction() as connection:
            self._lock_fence(connection)
            bookkeeping.one_at_a_time(connection)
            if claims.is_made(connection, self._mine, self.table_id):
                return ()
            lives = (self._identity.life_of(*life) for life in claims.lives(connection, self.table_id))
            strangers = tuple(life for life in lives if life is not None and life not in accepted)
            if not strangers:
                self._make_guard(connection)
        return strangers

    def release(self) -> bool:
        """Remove that row again, if no txid is in it."""
        with self._transaction() as connection:
            return bookkeeping.is_made(connection) and claims.remove(connection, self._mine)

    def _make_guard(self, connection: psycopg.Connection) -> None:
        table_id = self._current_table_id(connection)
        claims.make(
            connection, {**self._mine, "table_name": str(self._name), "table_id": table_id, "epoch": self._epoch}
        )

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed here, by their guards."""
        with self._transaction() as connection:
            if not bookkeeping.is_made(connection):
                return ()
            rows = connection.execute(
                "select distinct topology, incarnation from stormproof_sink.guard"
                " where table_id = %(table_id)s and last_txid is not null order by 1, 2",
                {"table_id": self.table_id},
            ).fetchall()
        found = (self._identity.life_of(str(topology), str(incarnation)) for topology, incarnation in rows)
        return tuple(life for life in found if life is not None)

    def held(self) -> Held | None:
        """The last transaction by the guard row, read afresh.

        Raises:
            PositionMismatch: the guard was moved with another table of this name.
            SinkRefused: the table is gone.
        """
        with self._transaction() as connection:
            if not bookkeeping.is_made(connection):
                return None
            return self._read_guard(connection, sql.SQL(""), same_table=True)

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitOutcome:
        """Adopt one transaction, by the table of `decide`; see the protocol."""
        where = f"{self._where}, txid {transaction.txid}"
        with self._transaction(where) as connection:
            table = self._begin_commit(connection, transaction, where, checked=checked)
            if table is None:
                return CommitOutcome.ALREADY_HELD
            self._add_evidence(connection, transaction, transaction.rows, checked=checked)
            moved = self._move_rows(connection, wire_schema(table, self._input), transaction, where)
            if moved != transaction.rows:
                raise SinkRefused(
                    f"{where}: {moved} rows reached the table instead of the {transaction.rows} prepared; nothing was "
                    "written; look for a trigger or rule that drops rows",
                    moved=moved,
                    prepared=transaction.rows,
                )
            require_durable(connection, table.oid, where)
            failpoint("postgres.after_rows")
        failpoint("postgres.after_commit")
        return CommitOutcome.APPLIED

    def commit_without_refused(self, transaction: PreparedTransaction) -> list[RefusedRow]:
        """Adopt one transaction but for the rows that the table refuses, which are given up and kept in `reject`.

        Where the sink holds the transaction already, the rows that were given up then.

        Raises:
            SinkRefused: the table refuses more than rows, or too many of them; nothing was written.
            Else as `commit`.
        """
        where = f"{self._where}, txid {transaction.txid}"
        with self._transaction(where) as connection:
            bookkeeping.make_rejects(connection)
            table = self._begin_commit(connection, transaction, where, checked=True)
            if table is None:
                return self._rejected(connection, transaction.txid)
            schema = wire_schema(table, self._input)
            move = self._mover(connection, schema, where)
            moved, refused = move_row_by_row(connection, self._numbered(transaction, schema), move, where)
            if moved + len(refused) != transaction.rows:
                raise SinkRefused(f"{where}: {moved} rows and {len(refused)} refused ones are not {transaction.rows}")
            self._add_evidence(connection, transaction, moved, checked=True)
            connection.cursor().executemany(
                "insert into stormproof_sink.reject (topology, incarnation, sink, txid, file, row, input, sqlstate, error) "
                "values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
                [(*self._mine.values(), transaction.txid, *_stored(row)) for row in refused],
            )
            require_durable(connection, table.oid, where)
        return refused

    def _begin_commit(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, where: str, *, checked: bool
    ) -> Table | None:
        """Take the fence and move the guard; the table to write to, or None where the sink holds the transaction."""
        self._lock_fence(connection)
        held = self._lock_guard(connection, same_table=checked)
        if checked and decide(self._identity, transaction, held) is Decision.SKIP:
            return None
        require_files(self._staging, transaction.files, where=where, digests=True)
        table = self._table(connection)
        require_table(table, self._input, where)
        require_durable(connection, table.oid, where)
        self._move_guard(connection, transaction, checked=checked)
        failpoint("postgres.after_guard")
        return table

    def _add_evidence(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, rows: int, *, checked: bool
    ) -> None:
        connection.execute(
            "insert into stormproof_sink.evidence (topology, incarnation, sink, txid, rows, digest, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(txid)s, %(rows)s, %(digest)s, %(epoch)s) "
            + ("" if checked else _LATER_WINS),
            {**self._mine, **self._said(transaction), "rows": rows},
        )

    def _rejected(self, connection: psycopg.Connection, txid: int) -> list[RefusedRow]:
        rows = connection.execute(
            f"select file, row, input, sqlstate, error from stormproof_sink.reject where {_MINE} and txid = %(txid)s "
            "order by file, row",
            {**self._mine, "txid": txid},
        ).fetchall()
        return [RefusedRow(*row) for row in rows]

    def _numbered(
        self, transaction: PreparedTransaction, schema: pa.Schema
    ) -> Generator[tuple[str, int, pa.RecordBatch]]:
        """The prepared rows, with their file and the number of the first one there."""
        for file in sorted(transaction.files, key=lambda f: f.path):
            at = 0
            for batch in prepared_batches(self._staging, [file], schema.names):
                yield file.path, at, batch
                at += batch.num_rows

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files of dead attempts."""
        return sweep_folder(self._staging, self._identity.incarnation, is_dead)

    def finished(self, transaction: PreparedTransaction) -> None:
        """The rows are in the table: the files may go."""
        remove_staged(self._staging, self._identity.incarnation, transaction.txid, transaction.files)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own evidence rows, and whether guard and table agree with them: all of one instant."""
        with self._snapshot() as connection:
            table_id = self._current_table_id(connection)
            if not bookkeeping.is_made(connection):
                return EvidenceReport(table_id, (), None)
            rows = connection.execute(
                f"select txid, digest, rows from stormproof_sink.evidence where {_MINE} and txid >= %(first)s "
                "and (%(last)s::bigint is null or txid <= %(last)s) order by txid",
                {**self._mine, "first": first, "last": last},
            ).fetchall()
            newest = connection.execute(
                f"select txid, digest from stormproof_sink.evidence where {_MINE} order by txid desc limit 1",
                self._mine,
            ).fetchone()
            rejected: dict[int, int] = {}
            if bookkeeping.has_rejects(connection):
                found = connection.execute(
                    f"select txid, count(*) from stormproof_sink.reject where {_MINE} group by txid", self._mine
                )
                rejected = dict(found.fetchall())
            held = self._rows_held(connection, [row[2] for row in rows])
            oid = find_oid(connection, self._name)
            volatile = [] if oid is None else volatile_relations(connection, oid)
            failpoint("audit.in_sink")
            guard = connection.execute(
                f"select last_txid, last_digest, table_id from stormproof_sink.guard where {_MINE}", self._mine
            ).fetchone()
        last_txid, last_digest, guard_table = (None, None, None) if guard is None else guard
        problems = [f"{name} is {what}: a crash of the server loses its rows" for name, what in volatile]
        if (last_txid, last_digest) != (newest or (None, None)):
            problems.append(
                f"the guard row says txid {last_txid} with digest {last_digest}, the newest evidence row "
                f"{'does not exist' if newest is None else f'is txid {newest[0]} with digest {newest[1]}'}"
            )
        if last_txid is not None and guard_table != table_id:
            problems.append(f"txid {last_txid} went to table {guard_table}, the table is now {table_id}")
        return EvidenceReport(
            table_id=table_id,
            entries=tuple(
                Evidence(txid, digest, count, rejected=rejected.get(txid, 0)) for txid, digest, count in rows
            ),
            last_txid=last_txid,
            problems=tuple(problems),
            rows_found=held,
        )

    def _rows_held(self, connection: psycopg.Connection, written: Sequence[int]) -> int | None:
        """The table's rows, counted no further than what so many rows of each txid come to at least."""
        least = least_rows(written, fold=self._input.is_fold)
        if least > COUNTED_ROWS_MAX or find_oid(connection, self._name) is None:
            return None
        return self._count(connection, least)

    def count_rows(self, limit: int) -> int:
        """The rows that are visible now."""
        with self._transaction() as connection:
            return self._count(connection, limit)

    def _count(self, connection: psycopg.Connection, limit: int) -> int:
        row = connection.execute(
            sql.SQL("select count(*) from (select 1 from {} limit %s) as counted").format(self._name.identifier),
            (limit,),
        ).fetchone()
        return 0 if row is None else int(row[0])

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Have the guard speak of this table and `last`; its evidence is added where there is none."""
        with self._transaction() as connection:
            bookkeeping.make(connection)
            said = {
                **self._mine,
                "table_name": str(self._name),
                "table_id": self._current_table_id(connection),
                "txid": None if last is None else last.txid,
                "digest": None if last is None else last.digest,
                "rows": 0 if last is None else last.rows,
                "epoch": self._epoch or 0,
            }
            taken = connection.execute(
                "insert into stormproof_sink.guard as held "
                "(topology, incarnation, sink, table_name, table_id, last_txid, last_digest, epoch) values (%(topology)s, "
                "%(incarnation)s, %(sink)s, %(table_name)s, %(table_id)s, %(txid)s, %(digest)s, %(epoch)s) "
                "on conflict (topology, incarnation, sink) do update set table_name = excluded.table_name, "
                "table_id = excluded.table_id, last_txid = excluded.last_txid, last_digest = excluded.last_digest, "
                "updated_at = now() where held.last_txid is null or held.last_txid <= excluded.last_txid",
                said,
            ).rowcount
            if taken != 1:
                raise PositionMismatch(
                    f"{self._where}: the guard holds a later txid than {said['txid']}, the ledger's; inspect with: "
                    f"stormproof audit verify {self._identity.topology}",
                    ledger=said["txid"],
                )
            if last is not None:
                connection.execute(
                    "insert into stormproof_sink.evidence (topology, incarnation, sink, txid, rows, digest, epoch) "
                    "values (%(topology)s, %(incarnation)s, %(sink)s, %(txid)s, %(rows)s, %(digest)s, %(epoch)s) "
                    "on conflict do nothing",
                    said,
                )

    def close(self) -> None:
        """Let the connection go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _raise_fence(self) -> None:
        for attempt in range(TAKE_OVER_TRIES_MAX):
            with self._transaction(fenced=False) as connection:
                bookkeeping.make(connection)
                older = connection.execute(
                    f"select pid, backend_start from stormproof_sink.backend where {_MINE} and epoch < %(epoch)s",
                    {**self._mine, "epoch": self._epoch},
                ).fetchall()
            # Outside of any transaction: nothing of ours is locked while we wait for them to end.
            with self._errors(self._where):
                terminate_backends(self._connected(fenced=False), older)
            try:
                with self._transaction(fenced=False) as connection:
                    connection.execute("select set_config('lock_timeout', %s, true)", (str(TAKE_OVER_LOCK_TIMEOUT_MS),))
                    self._move_fence(connection)
                return
            except StoreUnavailable as error:
                if error.details.get("sqlstate") != psycopg.errors.LockNotAvailable.sqlstate:
                    raise
                if attempt == TAKE_OVER_TRIES_MAX - 1:
                    raise

    def _move_fence(self, connection: psycopg.Connection) -> None:
        mine = {**self._mine, "epoch": self._epoch}
        raised = connection.execute(
            "insert into stormproof_sink.fence (topology, incarnation, sink, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(epoch)s) "
            "on conflict (topology, incarnation, sink) do update set epoch = excluded.epoch "
            "where fence.epoch <= excluded.epoch",
            mine,
        ).rowcount
        if raised != 1:
            raise self._fenced(connection)
        connection.execute(f"delete from stormproof_sink.backend where {_MINE} and epoch < %(epoch)s", mine)
        self._record_backend(connection)

    def _record_backend(self, connection: psycopg.Connection) -> None:
        backend = backend_identity(connection)
        connection.execute(
            "insert into stormproof_sink.backend (topology, incarnation, sink, pid, backend_start, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(pid)s, %(backend_start)s, %(epoch)s) "
            "on conflict do nothing",
            {**self._mine, "pid": backend.pid, "backend_start": backend.backend_start, "epoch": self._epoch},
        )

    def _lock_fence(self, connection: psycopg.Connection) -> None:
        """Hold the fence until this transaction ends; checked without the lock, a zombie's rows could land after."""
        row = connection.execute(
            f"select 1 from stormproof_sink.fence where {_MINE} and epoch = %(epoch)s for share",
            {**self._mine, "epoch": self._epoch},
        ).fetchone()
        if row is None:
            raise self._fenced(connection)

    def _fenced(self, connection: psycopg.Connection) -> Fenced:
        row = connection.execute(f"select epoch from stormproof_sink.fence where {_MINE}", self._mine).fetchone()
        newest = None if row is None else int(row[0])
        return Fenced(f"{self._where}: epoch {newest} holds it, this is epoch {self._epoch}", epoch=self._epoch)

    def _current_table_id(self, connection: psycopg.Connection) -> str | None:
        oid = find_oid(connection, self._name)
        if oid is None:
            return None
        if not self._server:
            row = connection.execute(
                "select (select system_identifier from pg_control_system())::text || '/' || oid::text "
                "from pg_database where datname = current_database()"
            ).fetchone()
            self._server = "" if row is None else str(row[0])
        return f"{self._server}/{oid}"

    def _table(self, connection: psycopg.Connection) -> Table:
        oid = find_oid(connection, self._name)
        if oid is None:
            raise self._gone(self._where)
        return read_table(connection, oid)

    def _gone(self, where: str) -> SinkRefused:
        return SinkRefused(f"{where}: there is no such table, it is gone", problem=TABLE_GONE)

    def _lock_guard(self, connection: psycopg.Connection, *, same_table: bool) -> Held | None:
        """What is held, with the guard row locked, which is made where nobody has claimed the table."""
        if find_oid(connection, self._name) is not None:
            self._make_guard(connection)
        return self._read_guard(connection, sql.SQL("for update"), same_table=same_table)

    def _read_guard(self, connection: psycopg.Connection, lock: sql.SQL, *, same_table: bool) -> Held | None:
        row = connection.execute(
            sql.SQL("select last_txid, last_digest, table_id from stormproof_sink.guard where {} {}").format(
                sql.SQL(_MINE), lock
            ),
            self._mine,
        ).fetchone()
        if row is None or row[0] is None:
            return None
        txid, digest, table_id = row
        current = self._current_table_id(connection)
        if same_table and current is None:
            raise self._gone(self._where)
        if same_table and table_id != current:
            raise PositionMismatch(
                f"{self._where}: txid {txid} went to table {table_id}, the table is now {current}; inspect with: "
                f"stormproof audit verify {self._identity.topology}",
                held=txid,
                table_id=current,
                expected=table_id,
            )
        return Held(txid, digest)

    def _said(self, transaction: PreparedTransaction) -> dict[str, Any]:
        return {
            "txid": transaction.txid,
            "previous": transaction.previous,
            "rows": transaction.rows,
            "digest": transaction.digest,
            "epoch": self._epoch,
        }

    def _move_guard(self, connection: psycopg.Connection, transaction: PreparedTransaction, *, checked: bool) -> None:
        said = {**self._mine, **self._said(transaction), "table_id": self._current_table_id(connection)}
        if checked:
            moved = connection.execute(
                "update stormproof_sink.guard set last_txid = %(txid)s, last_digest = %(digest)s, "
                "table_id = %(table_id)s, epoch = %(epoch)s, updated_at = now() "
                f"where {_MINE} and last_txid is not distinct from %(previous)s",
                said,
            ).rowcount
        else:
            moved = connection.execute(
                "update stormproof_sink.guard set "
                "last_digest = case when last_txid > %(txid)s then last_digest else %(digest)s end, "
                "last_txid = greatest(last_txid, %(txid)s), table_id = %(table_id)s, epoch = %(epoch)s, "
                f"updated_at = now() where {_MINE}",
                said,
            ).rowcount
        if moved != 1:
            raise PositionMismatch(
                f"{self._where}: {moved} guard rows were moved from txid {transaction.previous} to {transaction.txid} "
                f"instead of one; inspect with: stormproof audit verify {self._identity.topology}",
                txid=transaction.txid,
                previous=transaction.previous,
            )

    def _move_rows(
        self, connection: psycopg.Connection, schema: pa.Schema, transaction: PreparedTransaction, where: str
    ) -> int:
        if not transaction.files:
            return 0
        batches = prepared_batches(self._staging, transaction.files, schema.names)
        if not self._input.is_fold:
            return self._copy(connection, self._name.identifier, schema, batches, where)
        keys = self._input.keys
        require_unique_keys(prepared_batches(self._staging, transaction.files, keys), keys, where)
        self._make_added(connection, schema)
        copied = self._copy(connection, _ADDED, schema, batches, where)
        return copied if copied != transaction.rows else self._merge_added(connection, schema)

    def _mover(self, connection: psycopg.Connection, schema: pa.Schema, where: str) -> Callable[[pa.RecordBatch], int]:
        """Moves some rows into the table; gives how many it took."""
        if not self._input.is_fold:
            return lambda rows: self._copy(connection, self._name.identifier, schema, [rows], where)
        self._make_added(connection, schema)

        def merge(rows: pa.RecordBatch) -> int:
            connection.execute(sql.SQL("truncate {}").format(_ADDED))
            self._copy(connection, _ADDED, schema, [rows], where)
            return self._merge_added(connection, schema)

        return merge

    def _make_added(self, connection: psycopg.Connection, schema: pa.Schema) -> None:
        connection.execute(
            sql.SQL("create temporary table {} on commit drop as select {} from {} with no data").format(
                _ADDED, _identifiers(schema.names), self._name.identifier
            )
        )

    def _merge_added(self, connection: psycopg.Connection, schema: pa.Schema) -> int:
        # In key order: the index is walked along (a third faster at 100,000 rows), and two writers lock in one order.
        ordered, columns = _identifiers(self._input.keys), _identifiers(schema.names)
        folds = [fold_assignment(n, self._input.schema.field(n).type, fold) for n, fold in self._input.folds.items()]
        return connection.execute(
            sql.SQL(
                "insert into {} as held ({}) select {} from {} order by {} on conflict ({}) do update set {}"
            ).format(
                self._name.identifier,
                columns,
                columns,
                _ADDED,
                ordered,
                ordered,
                sql.SQL(", ").join(folds),
            )
        ).rowcount

    def _copy(
        self,
        connection: psycopg.Connection,
        into: sql.Identifier,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        where: str,
    ) -> int:
        encoder = ArrowToPostgresBinaryEncoder(schema)
        cursor = connection.cursor()
        columns = sql.SQL(", ").join(map(sql.Identifier, schema.names))
        with cursor.copy(sql.SQL("copy {} ({}) from stdin with (format binary)").format(into, columns)) as copy:
            copy.write(encoder.write_header())
            for batch in batches:
                try:
                    copy.write(encoder.write_batch(batch.cast(schema)))
                except pa.ArrowInvalid as error:
                    raise SinkRefused(f"{where}: a prepared value does not fit its column: {error}") from error
            copy.write(encoder.finish())
        return cursor.rowcount

    def _connected(self, *, fenced: bool = True) -> psycopg.Connection:
        """The connection, made anew where it was lost; a driver's is first recorded under its epoch."""
        if self._connection is not None and not self._connection.closed:
            return self._connection
        connection = connect(
            self._database, application_name=f"stormproof sink {self._identity.sink}"[:63], autocommit=True
        )
        # Every rule here reads again after it has waited for a lock: no older snapshot may stand in its way.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        with self._errors(self._where), ExitStack() as undo:
            undo.callback(connection.close)
            connection.execute("select set_config('lock_timeout', %s, false)", (str(LOCK_TIMEOUT_MS),))
            if fenced and self._epoch is not None:
                with connection.transaction():
                    self._lock_fence(connection)
                    self._record_backend(connection)
            undo.pop_all()
        self._connection = connection
        return connection

    @contextmanager
    def _transaction(self, where: str | None = None, *, fenced: bool = True) -> Generator[psycopg.Connection]:
        with self._errors(self._where if where is None else where):
            connection = self._connected(fenced=fenced)
            with connection.transaction():
                yield connection

    @contextmanager
    def _snapshot(self) -> Generator[psycopg.Connection]:
        """A transaction that reads one instant: a driver that commits meanwhile is seen whole, or not at all."""
        with self._transaction() as connection:
            connection.execute("set transaction isolation level repeatable read, read only")
            yield connection

    @contextmanager
    def _errors(self, where: str) -> Generator[None]:
        """Postgres's errors as ours: what may pass by itself is transient, all else is for good."""
        try:
            yield
        except psycopg.Error as error:
            state = error.sqlstate
            said = explained(error, self._database, where)
            if said is not None:
                self.close()
                raise said from error
            if state is None or may_pass(error):
                # Whether a lost COMMIT took place is unknown: a new connection tells.
                self.close()
                raise StoreUnavailable(
                    f"{where}: {self._database.without_secrets(str(error)).strip()}; read again before acting",
                    sqlstate=state,
                ) from error
            raise _refused(error, where) from error


def _identifiers(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _stored(row: RefusedRow) -> tuple[str, int, str, str | None, str]:
    return row.file, row.row, row.text, row.sqlstate, row.error


def _refused(error: psycopg.Error, where: str) -> SinkRefused:
    diagnosis = error.diag
    parts = [
        f"{label} {text!r}"
        for label, text in (
            ("constraint", diagnosis.constraint_name),
            ("column", diagnosis.column_name),
            ("row", diagnosis.message_detail),
            ("at", diagnosis.context),
        )
        if text
    ]
    shown = storable_text(diagnosis.message_primary or str(error))
    return SinkRefused(
        f"{where}: Postgres refuses it, and nothing was written: {shown}"
        f"{' (' + ', '.join(parts) + ')' if parts else ''}",
        sqlstate=error.sqlstate,
        constraint=diagnosis.constraint_name,
        column=diagnosis.column_name,
        row=diagnosis.message_detail,
    )
