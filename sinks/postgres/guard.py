"""The guard of a Postgres sink: a row with the last txid that its table holds; and the evidence of each txid.

A guard row without a txid is a claim: its life has the table, and has committed nothing to it yet. Everything here runs in
the caller's transaction, so guard, evidence and rows are committed together.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, cast

import psycopg

from stormproof.core.base.errors import PositionMismatch, SettingsError, SinkRefused
from stormproof.core.base.failpoint import failpoint
from stormproof.sinks.contract.protocol import (
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    RefusedRow,
    SinkIdentity,
    SinkProblem,
)
from stormproof.sinks.postgres.connection import MINE, has_records, mine_of
from stormproof.sinks.postgres.table import TableName, find_oid

# Unchecked, a later attempt may write a txid again: the ledger names the last one.
_LATER_WINS: Final = (
    "on conflict (topology, incarnation, sink, txid) do update "
    "set rows = excluded.rows, dropped = excluded.dropped, digest = excluded.digest, epoch = excluded.epoch, "
    "content = excluded.content, "
    "committed_at = excluded.committed_at"
)


class Guard:
    """The guard of one sink of one life over the table of this name. `epoch` None: for reading only."""

    def __init__(self, identity: SinkIdentity, name: TableName, epoch: int | None, where: str) -> None:
        self._identity = identity
        self._name = name
        self._epoch = epoch
        self._where = where
        self._mine = mine_of(identity)
        self._server = ""

    def table_id(self, connection: psycopg.Connection) -> str | None:
        """Server, database and oid of the table that has the name now; None where none has."""
        oid = find_oid(connection, self._name)
        return None if oid is None else self.id_of(connection, oid)

    def id_of(self, connection: psycopg.Connection, oid: int) -> str:
        """Server, database and oid of the table with this oid."""
        if not self._server:
            row = connection.execute(
                "select (select system_identifier from pg_control_system())::text || '/' || oid::text "
                "from pg_database where datname = current_database()"
            ).fetchone()
            self._server = "" if row is None else str(row[0])
        return f"{self._server}/{oid}"

    def gone(self, connection: psycopg.Connection) -> SinkRefused | SettingsError:
        """The error for a table that is not there."""
        return self.out_of_path(connection) or SinkRefused(
            f"{self._where}: there is no such table, it is gone", problem=SinkProblem.TABLE_GONE
        )

    def out_of_path(self, connection: psycopg.Connection) -> SettingsError | None:
        """The error for a name that leads nowhere since this role's search path lacks the schema of the guard's table."""
        if self._name.schema is not None or not has_records(connection):
            return None
        found = connection.execute(
            "select n.nspname::text, current_user::text from stormproof_sink.guard g "
            "join pg_class c on g.table_id = %(server)s || c.oid join pg_namespace n on n.oid = c.relnamespace "
            f"where {MINE} and c.relname = %(table)s and not pg_table_is_visible(c.oid)".encode(),
            {**self._mine, "table": self._name.table, "server": self.id_of(connection, 0)[:-1]},
        ).fetchone()
        if found is None:
            return None
        schema, role = found
        name = TableName(schema, self._name.table)
        return SettingsError(
            f"{self._where}: its table is {name}, and the search path of role {role!r} does not lead there. Name it with "
            "its schema, or set the role's search_path",
            table=str(name),
            role=role,
        )

    # -- claims ------------------------------------------------------------------------------------------------------

    def claim(self, connection: psycopg.Connection) -> None:
        """Insert the guard row where it is missing; one without a txid is pointed at this table."""
        connection.execute(
            "insert into stormproof_sink.guard as held "
            "(topology, incarnation, sink, table_name, table_id, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(table_name)s, %(table_id)s, %(epoch)s) "
            "on conflict (topology, incarnation, sink) do update "
            "set table_name = excluded.table_name, table_id = excluded.table_id "
            "where held.last_txid is null and held.table_id is distinct from excluded.table_id",
            {
                **self._mine,
                "table_name": str(self._name),
                "table_id": self.table_id(connection),
                "epoch": self._epoch,
            },
        )

    def is_claimed(self, connection: psycopg.Connection, table_id: str) -> bool:
        """Whether this life has the table already: it has committed, or it has claimed this very table.

        A claim on a table that was dropped says nothing of the one made in its place: another life may have that.
        """
        found = connection.execute(
            f"select 1 from stormproof_sink.guard where {MINE} and (last_txid is not null or table_id = %(table_id)s)",
            {**self._mine, "table_id": table_id},
        )
        return found.fetchone() is not None

    def release(self, connection: psycopg.Connection) -> bool:
        """Remove the claim, if nothing was committed under it; whether there was one."""
        removed = connection.execute(
            f"delete from stormproof_sink.guard where {MINE} and last_txid is null", self._mine
        )
        return removed.rowcount > 0

    def other_lives(self, connection: psycopg.Connection, table_id: str, *, committed: bool) -> tuple[str, ...]:
        """The other lives that have claimed this table, or only those that have `committed` to it, named as
        `SinkIdentity.other_life` does.
        """
        where = "table_id = %(table_id)s" + (" and last_txid is not null" if committed else "")
        return self._lives(connection, where, {"table_id": table_id})

    def _lives(self, connection: psycopg.Connection, where: str, values: Mapping[str, object]) -> tuple[str, ...]:
        rows = connection.execute(
            f"select distinct topology, incarnation from stormproof_sink.guard where {where} order by 1, 2".encode(),
            values,
        ).fetchall()
        found = (self._identity.life_of(str(topology), str(incarnation)) for topology, incarnation in rows)
        return tuple(life for life in found if life is not None)

    def other_rows(self, connection: psycopg.Connection, table_id: str, *, since: datetime | None) -> tuple[str, ...]:
        """The other lives whose rows this table may hold: they have committed to it, or to another table of its name, of
        which it may be a copy. Of those, one whose last commit was before `since`, when the table was empty, has none in it.
        """
        return self._lives(
            connection,
            "last_txid is not null and (table_id = %(table_id)s or (table_name = %(table_name)s"
            " and (%(since)s::timestamptz is null or updated_at > %(since)s)))",
            {"table_id": table_id, "table_name": str(self._name), "since": since},
        )

    def other_sink(self, connection: psycopg.Connection, table_id: str) -> tuple[str, str] | None:
        """Topology and name of another sink that has committed to this table; None where there is none."""
        return connection.execute(
            "select topology, sink from stormproof_sink.guard where table_id = %(table_id)s "
            "and last_txid is not null and (topology, sink) <> (%(topology)s, %(sink)s) limit 1",
            {**self._mine, "table_id": table_id},
        ).fetchone()

    # -- position ----------------------------------------------------------------------------------------------------

    def held(self, connection: psycopg.Connection) -> Held | None:
        """The last transaction.

        Raises:
            PositionMismatch: the guard was moved with another table of this name.
            SinkRefused: the table is gone.
        """
        found = self._read(connection, "", same_table=True)
        entry = next(iter(self.entries(connection, found.txid, found.txid)), None) if found is not None else None
        return found if found is None or entry is None else replace(found, at=entry.at, rejected=entry.rejected)

    def ask(self, connection: psycopg.Connection) -> psycopg.Cursor[tuple[Any, ...]]:
        """Lock the guard row, without waiting for the answer where the connection is in a pipeline; `locked` reads it."""
        return connection.execute(
            "select last_txid, last_digest, table_id, to_regclass(%(name)s::text)::oid::bigint "
            f"from stormproof_sink.guard where {MINE} for update".encode(),
            {**self._mine, "name": self._name.identifier.as_string(connection)},
        )

    def locked(
        self, connection: psycopg.Connection, asked: psycopg.Cursor[tuple[Any, ...]], *, same_table: bool
    ) -> Held | None:
        """Read the answer; a guard row that is missing is made, and locked. Returns the last transaction, as `held`."""
        row = asked.fetchone()
        if row is None or row[0] is None:
            if find_oid(connection, self._name) is not None:
                self.claim(connection)
            return self._read(connection, "for update", same_table=same_table)
        txid, digest, table_id, oid = row
        current = None if oid is None else self.id_of(connection, oid)
        return self._held(connection, Held(txid, digest), table_id, current, same_table)

    def _read(self, connection: psycopg.Connection, lock: str, *, same_table: bool) -> Held | None:
        row = connection.execute(
            f"select last_txid, last_digest, table_id from stormproof_sink.guard where {MINE} {lock}".encode(),
            self._mine,
        ).fetchone()
        if row is None or row[0] is None:
            return None
        txid, digest, table_id = row
        return self._held(connection, Held(txid, digest), table_id, self.table_id(connection), same_table)

    def _held(
        self, connection: psycopg.Connection, held: Held, table_id: str, current: str | None, same_table: bool
    ) -> Held:
        """What is held, by the table with `table_id`, where that is the `current` one or need not be."""
        if same_table and current is None:
            raise self.gone(connection)
        if same_table and table_id != current:
            raise PositionMismatch(
                f"{self._where}: txid {held.txid} went to table {table_id}, the table is now {current}; {self._inspect}",
                held=held.txid,
                table_id=current,
                expected=table_id,
            )
        return held

    def move(self, connection: psycopg.Connection, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Move the guard to this transaction.

        Raises:
            PositionMismatch: the guard is not at the transaction before it.
        """
        moved = self.ask_move(connection, transaction, self.table_id(connection), checked=checked)
        self.require_moved(transaction, moved)

    def ask_move(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, table_id: str | None, *, checked: bool
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """The same for a table whose id is known; `require_moved` reads the answer, also behind a pipeline."""
        said = {**self._said(transaction), "table_id": table_id}
        if checked:
            return connection.execute(
                "update stormproof_sink.guard set last_txid = %(txid)s, last_digest = %(digest)s, "
                "table_id = %(table_id)s, epoch = %(epoch)s, updated_at = now() "
                f"where {MINE} and last_txid is not distinct from %(previous)s returning updated_at",
                said,
            )
        return connection.execute(
            "update stormproof_sink.guard set "
            "last_digest = case when last_txid > %(txid)s then last_digest else %(digest)s end, "
            "last_txid = greatest(last_txid, %(txid)s), table_id = %(table_id)s, epoch = %(epoch)s, "
            f"updated_at = now() where {MINE} returning updated_at",
            said,
        )

    def require_moved(self, transaction: PreparedTransaction, moved: psycopg.Cursor[tuple[Any, ...]]) -> datetime:
        """Read the answer: when it was moved, by the server's clock. Raises as `move`."""
        at = moved.fetchone()
        if moved.rowcount != 1 or at is None:
            raise PositionMismatch(
                f"{self._where}: {moved.rowcount} guard rows were moved from txid {transaction.previous} to "
                f"{transaction.txid} instead of one; {self._inspect}",
                txid=transaction.txid,
                previous=transaction.previous,
            )
        return cast("datetime", at[0])

    def take_table(self, connection: psycopg.Connection, last: PreparedTransaction | None) -> None:
        """Point the guard at the table that now has the name, and at `last`, whose evidence is added where it is missing.

        Raises:
            PositionMismatch: the guard is at a later txid.
        """
        said = {
            **self._said(last or PreparedTransaction(0, None, "", 0, ())),
            "table_name": str(self._name),
            "table_id": self.table_id(connection),
            "epoch": self._epoch or 0,
        }
        if last is None:
            said |= {"txid": None, "digest": None}
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
                f"{self._where}: the guard holds a later txid than {said['txid']}, the ledger's; {self._inspect}",
                ledger=None if last is None else last.txid,
            )
        if last is not None:
            self._add_evidence(connection, said, "on conflict do nothing")

    @contextmanager
    def evidence_is_new(self, transaction: PreparedTransaction) -> Generator[None]:
        """Around a move and the evidence behind it, in one pipeline: the evidence tells of it where the table has the txid.

        Raises:
            PositionMismatch: the evidence of this txid is there already, so the guard is not at the transaction before it.
        """
        try:
            yield
        except psycopg.errors.UniqueViolation as error:
            if (error.diag.schema_name, error.diag.table_name) != ("stormproof_sink", "evidence"):
                raise
            raise PositionMismatch(
                f"{self._where}: the table holds txid {transaction.txid} already, and its guard was not behind txid "
                f"{transaction.previous}; {self._inspect}",
                txid=transaction.txid,
                previous=transaction.previous,
            ) from error

    # -- evidence ----------------------------------------------------------------------------------------------------

    def add_evidence(
        self,
        connection: psycopg.Connection,
        transaction: PreparedTransaction,
        rows: int,
        *,
        again: bool,
        dropped: int = 0,
        content: str | None = None,
    ) -> None:
        """Record how many rows of a txid the table took, and how many its triggers dropped. `again`: evidence that is
        there is replaced. `content` is the rows' content digest, or why there is none.
        """
        said = {**self._said(transaction), "rows": rows, "dropped": dropped, "content": content}
        self._add_evidence(connection, said, _LATER_WINS if again else "")

    def _add_evidence(self, connection: psycopg.Connection, said: dict[str, Any], on_conflict: str) -> None:
        connection.execute(
            (
                "insert into stormproof_sink.evidence "
                "(topology, incarnation, sink, txid, rows, dropped, digest, epoch, content) "
                "values (%(topology)s, %(incarnation)s, %(sink)s, %(txid)s, %(rows)s, %(dropped)s, %(digest)s, %(epoch)s, "
                "%(content)s) " + on_conflict
            ).encode(),
            said,
        )

    def add_rejected(
        self, connection: psycopg.Connection, txid: int, refused: Sequence[RefusedRow], *, again: bool
    ) -> None:
        """Record the rows of a txid that the table does not get. `again`: those that are there are replaced."""
        if again:
            connection.execute(
                f"delete from stormproof_sink.reject where {MINE} and txid = %(txid)s", {**self._mine, "txid": txid}
            )
        connection.cursor().executemany(
            "insert into stormproof_sink.reject (topology, incarnation, sink, txid, file, row, input, sqlstate, error, "
            "messages, origins, goes_with_others) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                (
                    *(*self._mine.values(), txid, row.file, row.row, row.text, row.sqlstate, row.error),
                    [number for number, _ in row.messages],
                    [origin for _, origin in row.messages],
                    row.goes_with_others,
                )
                for row in refused
            ],
        )

    def rejected(self, connection: psycopg.Connection, txid: int) -> tuple[RefusedRow, ...]:
        """The rows of a txid that the table did not get."""
        rows = connection.execute(
            "select file, row, input, sqlstate, error, messages, origins, goes_with_others from stormproof_sink.reject "
            f"where {MINE} and txid = %(txid)s order by file, row",
            {**self._mine, "txid": txid},
        ).fetchall()
        return tuple(
            RefusedRow(file, row, text, sqlstate, error, tuple(zip(messages, origins, strict=True)), together)
            for file, row, text, sqlstate, error, messages, origins, together in rows
        )

    def add_superseded(
        self, connection: psycopg.Connection, txid: int, rows: int, reinstated: int = 0, *, again: bool
    ) -> None:
        """Record how many rows of a txid changed nothing, how many were reinstated, if any. `again`: what is there goes."""
        if again:
            connection.execute(
                f"delete from stormproof_sink.superseded where {MINE} and txid = %(txid)s", {**self._mine, "txid": txid}
            )
        if not rows and not reinstated:
            return
        connection.execute(
            "insert into stormproof_sink.superseded (topology, incarnation, sink, txid, rows, reinstated) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(txid)s, %(rows)s, %(reinstated)s)",
            {**self._mine, "txid": txid, "rows": rows, "reinstated": reinstated},
        )

    def superseded(self, connection: psycopg.Connection, txid: int) -> int:
        """How many rows of a txid changed nothing."""
        return self._superseded(connection, txid, txid).get(txid, (0, 0))[0]

    def _superseded(self, connection: psycopg.Connection, first: int, last: int | None) -> dict[int, tuple[int, int]]:
        found = connection.execute(
            f"select txid, rows, reinstated from stormproof_sink.superseded where {MINE} and txid >= %(first)s "
            "and (%(last)s::bigint is null or txid <= %(last)s)",
            {**self._mine, "first": first, "last": last},
        )
        return {txid: (rows, reinstated) for txid, rows, reinstated in found.fetchall()}

    def entries(self, connection: psycopg.Connection, first: int, last: int | None) -> tuple[Evidence, ...]:
        """The evidence of txids from `first` to `last`."""
        rows = connection.execute(
            "select txid, digest, rows, dropped, committed_at "
            f"from stormproof_sink.evidence where {MINE} and txid >= %(first)s "
            "and (%(last)s::bigint is null or txid <= %(last)s) order by txid",
            {**self._mine, "first": first, "last": last},
        ).fetchall()
        found = connection.execute(
            f"select txid, count(*) from stormproof_sink.reject where {MINE} and txid >= %(first)s group by txid",
            {**self._mine, "first": first},
        )
        rejected: dict[int, int] = dict(found.fetchall())
        superseded = self._superseded(connection, first, last)
        return tuple(
            Evidence(
                txid,
                digest,
                count,
                rejected=rejected.get(txid, 0),
                superseded=superseded.get(txid, (0, 0))[0],
                reinstated=superseded.get(txid, (0, 0))[1],
                dropped=dropped,
                at=at,
            )
            for txid, digest, count, dropped, at in rows
        )

    def contents(self, connection: psycopg.Connection, table_id: str) -> list[tuple[int, int, str | None, datetime]]:
        """Txid, rows, content and time of all evidence, with that of this life's sinks of other names that wrote to the
        table: it is one sink, which was renamed.
        """
        return connection.execute(
            "select txid, rows, content, committed_at from stormproof_sink.evidence "
            "where topology = %(topology)s and incarnation = %(incarnation)s and (sink = %(sink)s or sink in ("
            "select sink from stormproof_sink.guard where topology = %(topology)s and incarnation = %(incarnation)s "
            "and table_id = %(table_id)s)) order by txid",
            {**self._mine, "table_id": table_id},
        ).fetchall()

    def report(
        self,
        connection: psycopg.Connection,
        entries: tuple[Evidence, ...],
        *,
        rows_found: int | None,
        problems: Sequence[str],
    ) -> EvidenceReport:
        """The report: these entries, and where guard, newest evidence and table disagree; `problems` are the table's own."""
        table_id = self.table_id(connection)
        newest = connection.execute(
            f"select txid, digest from stormproof_sink.evidence where {MINE} order by txid desc limit 1", self._mine
        ).fetchone()
        failpoint("audit.in_sink")
        guard = connection.execute(
            f"select last_txid, last_digest, table_id from stormproof_sink.guard where {MINE}", self._mine
        ).fetchone()
        last_txid, last_digest, guard_table = (None, None, None) if guard is None else guard
        found = [*problems]
        if (last_txid, last_digest) != (newest or (None, None)):
            found.append(
                f"the guard row says txid {last_txid} with digest {last_digest}, the newest evidence row "
                f"{'does not exist' if newest is None else f'is txid {newest[0]} with digest {newest[1]}'}"
            )
        if last_txid is not None and guard_table != table_id:
            found.append(f"txid {last_txid} went to table {guard_table}, the table is now {table_id}")
        return EvidenceReport(table_id, entries, last_txid, problems=tuple(found), rows_found=rows_found)

    def _said(self, transaction: PreparedTransaction) -> dict[str, Any]:
        return {
            **self._mine,
            "txid": transaction.txid,
            "previous": transaction.previous,
            "rows": transaction.rows,
            "dropped": 0,
            "content": None,
            "digest": transaction.digest,
            "epoch": self._epoch,
        }

    @property
    def _inspect(self) -> str:
        return f"inspect with: stormproof audit verify {self._identity.topology}"
