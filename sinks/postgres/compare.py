"""Compares a Postgres table's rows with the contents that the sink's evidence has on record.

With a lineage column each txid's rows are compared by themselves; without one all rows of the table at once, which is
possible only where every batch has a digest. Of an upsert and a fold, rows are overwritten as they should be: it is compared
that no key is twice, how many rows there are, what each summed column sums up to, and with a lineage column how many rows
name each txid.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import adbc_driver_manager
import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from psycopg import sql

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.contract.sink import SinkMode
from stormproof.core.postgres.database import Database, started
from stormproof.sinks.postgres.columns import Column, Kinds, is_by_server, keeps, row_hash
from stormproof.sinks.postgres.connection import has_records
from stormproof.sinks.postgres.refusals import why_uncounted
from stormproof.sinks.postgres.table import find_oid, read_table
from stormproof.sinks.rows.by_key import SUSPECTS_MAX
from stormproof.sinks.rows.comparison import Compared, Comparison, Progress, ReadRecord, RowProblem, Span, spans, within
from stormproof.sinks.rows.content import (
    MODULUS,
    NOTHING,
    Content,
    ContentSum,
    Sum,
    Totals,
    content_by,
    content_of_files,
    joined,
    kinds_of,
    summed_columns,
)

if TYPE_CHECKING:
    from stormproof.sinks.postgres.transactional_table import TransactionalTable

_DIGITS: Final = 38


@dataclass(frozen=True, slots=True)
class _Entry:
    rows: int
    content: Content | None
    totals: Totals | None
    why: str = ""
    """Why there is no content."""
    began_empty: bool = False
    """Whether the table was empty before it."""

    @staticmethod
    def of(rows: int, text: str | None) -> _Entry:
        said: dict[str, Any] = (
            json.loads(text)
            if text
            else {"why": "it has no digest: content_digests was off, or no column can be hashed"}
        )
        totals = Totals.of_text(text)
        return _Entry(
            rows, Content.of_text(text), totals, str(said.get("why", "")), bool(said.get("began_empty", False))
        )


def compare(
    ours: TransactionalTable, database: Database, read: ReadRecord, span: Span, progress: Progress
) -> Comparison:
    """See `SupportsCompareRows.compare_rows`."""
    found = Compared()
    with ours.link.snapshot() as connection:
        if not has_records(connection):
            return found.comparison
        contents = ours.guard.contents(connection, ours.table_id)
        entries = {txid: _Entry.of(rows, text) for txid, rows, text, _ in contents}
        oid = find_oid(connection, ours.name)
        why = "its table is gone" if oid is None else why_uncounted(connection, oid)
        emptied = next((at for txid, _, _, at in contents if entries[txid].began_empty), None)
        others = ours.guard.other_rows(connection, ours.table_id, since=emptied) if oid is not None else ()
        if why is None and others:
            why = f"its table may hold rows of other lives, too ({', '.join(others)})"
        if oid is None or why is not None:
            found.left_out.append(why or "")
            return found.comparison
        one = _Reading(ours, database, connection, read_table(connection, oid).columns, entries, span, progress, found)
        if ours.input.mode is SinkMode.APPEND:
            one.append()
        else:
            one.by_key()
    one.judge(read)
    return found.comparison


class _Reading:
    """One comparison; what is read of the table is kept as sums."""

    def __init__(
        self,
        ours: TransactionalTable,
        database: Database,
        connection: psycopg.Connection,
        columns: Sequence[Column],
        entries: Mapping[int, _Entry],
        span: Span,
        progress: Progress,
        found: Compared,
    ) -> None:
        self._table, self._database, self._connection = ours, database, connection
        self._columns = {column.name: column for column in columns}
        self._entries, self._span, self._progress, self._found = entries, span, progress, found
        lineage = ours.input.lineage
        self._txid_column = None if lineage is None or lineage.txid not in self._columns else lineage.txid
        self._sums: dict[Kinds, dict[int | None, Content]] = {}
        """By the columns that a txid's rows had: one that the table got later may have a default in them."""
        self._whole: Content | None = None
        self._several = False
        self._rows: int | None = None
        self._counts: dict[int | None, int] | None = None
        self._totals: Totals | None = None
        self._doubled = 0
        first = min(entries, default=None)
        self._began_empty = first is not None and entries[first].began_empty

    # -- reading -----------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Read the rows of an append."""
        wanted = [e for txid, e in self._entries.items() if within(txid, self._span)]
        sets = {entry.content.kinds for entry in wanted if entry.content is not None and entry.rows}
        kinds: Kinds = ()
        try:
            for one in sets:
                kinds = joined(kinds, one)
        except ValueError as error:
            self._found.left_out.append(f"its rows cannot be hashed as one: {error}")
            return
        for name, kind in kinds:
            column = self._columns.get(name)
            if column is None or not keeps(column, kind):
                now = "gone" if column is None else f"{column.type} now"
                self._found.left_out.append(f"its rows cannot be hashed as they were: column {name!r} is {now}")
                return
        uncovered = [n for n in self._table.input.schema.names if n not in dict(kinds)]
        if kinds and uncovered:
            names = ", ".join(repr(name) for name in uncovered)
            self._found.left_out.append(f"columns whose values the table keeps otherwise than they came: {names}")
        if self._txid_column is not None:
            self._by_txid(kinds, sets)
        elif self._span != (1, None):
            if wanted:
                self._found.left_out.append(
                    "some txids' rows cannot be told from others' without lineage columns (lineage=True): only the whole "
                    "table"
                )
        elif all(entry.content is not None for entry in wanted):
            self._several = len(sets) > 1
            self._all(kinds)
        else:
            self._rows = self._count()

    def by_key(self) -> None:
        """Read the keys, the number and the sums of an upsert or a fold, and count its rows by txid."""
        if self._span[1] is None:
            self._against_totals()
        else:
            self._found.not_in_part(self._table.input)
        if self._txid_column is not None:
            query = sql.SQL("select {0}, count(*) from {1} group by {0}").format(
                sql.Identifier(self._txid_column), self._table.name.identifier
            )
            self._counts = dict(self._connection.execute(query).fetchall())

    def _against_totals(self) -> None:
        """The table's rows are read, and no index: a damaged one would hide a key that is twice."""
        kinds = dict(kinds_of(self._table.input.schema, summed_columns(self._table.input.folds)))
        kept = [name for name, kind in kinds.items() if name in self._columns and keeps(self._columns[name], kind)]
        sums = [
            sql.SQL("sum({}::{})").format(
                sql.Identifier(name), sql.SQL("double precision" if kinds[name] == "float" else "numeric")
            )
            for name in kept
        ]
        table, keys = self._table.name.identifier, [sql.Identifier(key) for key in self._table.input.keys]
        twice = sql.SQL("select 1 from {} where {} group by {} having count(*) > 1 limit {}").format(
            table,
            sql.SQL(" and ").join(sql.SQL("{} is not null").format(key) for key in keys),
            sql.SQL(", ").join(keys),
            sql.Literal(SUSPECTS_MAX),
        )
        for way in ("indexscan", "indexonlyscan", "bitmapscan"):
            self._connection.execute(f"set local enable_{way} = off".encode())
        query = sql.SQL("select {} from {}").format(sql.SQL(", ").join([sql.SQL("count(*)"), *sums]), table)
        rows, *values = self._connection.execute(query).fetchone() or (0,)
        found = {name: Sum(Decimal(0) if value is None else value) for name, value in zip(kept, values, strict=True)}
        self._totals = Totals(int(rows), found, content=self._content())
        counted = self._connection.execute(sql.SQL("select count(*) from ({}) as twice").format(twice)).fetchone()
        self._doubled = 0 if counted is None else int(counted[0])

    def _content(self) -> Content | None:
        """The content of all rows, by the columns that the txids' was taken of; None: it is not known of each, or a column
        is another now.
        """
        known = self._on_record()
        if known is None or known.content is None:
            return None
        kinds = known.content.kinds
        if is_by_server(kinds):
            # The server's hash of a row without a column is not the one of a row that has NULL there.
            totals = [entry.totals for entry in self._entries.values()]
            if len({one.content.kinds for one in totals if one is not None and one.content is not None}) > 1:
                return None
            hashed, now = row_hash([*self._columns.values()], dict(kinds))
            query = sql.SQL("select count(*), coalesce(sum({}), 0) from {} as held")
            asked = self._connection.execute(query.format(hashed, self._table.name.identifier)).fetchone() or (0, 0)
            return Content(int(asked[0]), int(asked[1]) % MODULUS, kinds) if now == kinds else None
        keys = {*self._table.input.keys}  # each has the one text that the table gives back
        if any(n not in self._columns or not (n in keys or keeps(self._columns[n], kind)) for n, kind in kinds):
            return None
        total = ContentSum(kinds)
        for batch in self._batches(kinds, [], sql.SQL("true")):
            total.add(batch)
        return total.content

    def _by_txid(self, kinds: Kinds, sets: Collection[Kinds]) -> None:
        assert self._txid_column is not None
        name = sql.Identifier(self._txid_column)
        first, last = self._span
        bounds = [sql.SQL("{} >= {}").format(name, sql.Literal(first))] if first > 1 else []
        bounds += [sql.SQL("{} <= {}").format(name, sql.Literal(last))] if last is not None else []
        inside = sql.SQL(" and ").join(bounds) if bounds else sql.SQL("true")
        where = sql.SQL("{} is null or ({})").format(name, inside)
        key = [sql.SQL("{}::bigint as stormproof_txid").format(name)]
        for batch in self._batches(kinds, key, where):
            for one in sets or [()]:
                sums = self._sums.setdefault(one, {})
                for txid, content in content_by(batch, one, "stormproof_txid").items():
                    sums[txid] = sums.get(txid, Content(0, 0, content.kinds)) + content

    def _all(self, kinds: Sequence[tuple[str, str]]) -> None:
        total = ContentSum(kinds)
        for batch in self._batches(kinds, [], sql.SQL("true")):
            total.add(batch)
        self._whole = total.content

    def _count(self) -> int:
        query = sql.SQL("select count(*) from {}").format(self._table.name.identifier)
        row = self._connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def _batches(
        self, kinds: Sequence[tuple[str, str]], more: Sequence[sql.Composable], where: sql.Composable
    ) -> Iterator[pa.RecordBatch]:
        """The table's rows, in bounded memory, at the instant of the connection's snapshot; columns by their kinds."""
        chosen = [_expression(self._columns[name], kind) for name, kind in kinds]
        values = sql.SQL(", ").join([*chosen, *more] or [sql.SQL("1")])
        query = sql.SQL("select {} from {} where {}").format(values, self._table.name.identifier, where)
        snapshot = self._connection.execute("select pg_export_snapshot()").fetchone()
        assert snapshot is not None
        done, decimals = 0, {n: kind for n, kind in kinds if kind.startswith("decimal")}
        for batch in _rows(self._database, str(snapshot[0]), query.as_string(self._connection)):
            done += batch.num_rows
            self._progress(done, None)
            yield _with_decimals(batch, decimals)

    # -- judging -----------------------------------------------------------------------------------------------------

    def judge(self, read: ReadRecord) -> None:
        """Compare what was read with what is on record."""
        record = read()
        self._against_ledger(record.files)
        if self._totals is not None:
            no_commit_yet = not self._entries and self._totals.rows  # others' rows were there before
            known = None if record.given_up or no_commit_yet else self._on_record()
            self._found.by_key(self._table.input, known, self._totals, self._doubled)
        if self._counts is not None:
            written = {txid: entry.rows for txid, entry in self._entries.items()}
            given_up, began_empty = record.given_up, self._began_empty
            self._found.by_txid(self._counts, written, self._span, given_up=given_up, began_empty=began_empty)
        elif self._whole is not None or self._rows is not None:
            self._judge_whole(record.given_up)
        elif self._txid_column is not None and self._table.input.mode is SinkMode.APPEND:
            self._judge_txids(record.given_up)

    def _against_ledger(self, files: Mapping[int, Any]) -> None:
        """The sink's evidence has the content that the ledger fixed, unless rows were refused or dropped."""
        for txid, prepared in files.items():
            entry = self._entries.get(txid)
            if entry is None or entry.content is None or not within(txid, self._span):
                continue
            content = content_of_files(prepared)
            if content is not None and content.rows == entry.content.rows and content.digest != entry.content.digest:
                self._found.add(
                    RowProblem.ROWS_CHANGED,
                    f"txid {txid}: the sink's record has content {entry.content.digest}, the ledger {content.digest}",
                    txid,
                )

    def _judge_txids(self, given_up: int) -> None:
        counted = next(iter(self._sums.values()), {})
        undigested: list[int] = []
        compared: list[int] = []
        for txid, entry in sorted(self._entries.items()):
            if not within(txid, self._span) or txid <= given_up:
                continue
            expected = entry.content
            there = (counted if expected is None or not expected.rows else self._sums.get(expected.kinds, {})).get(
                txid, NOTHING
            )
            if expected is None:
                undigested.append(txid)
                if entry.why.startswith("it has no digest") and there.rows != entry.rows:
                    self._found.differs(f"txid {txid}", Content(entry.rows, 0), Content(there.rows, 0), txid)
                continue
            compared.append(txid)
            self._found.rows += there.rows
            self._found.differs(f"txid {txid}", expected, there, txid)
        if compared:
            self._found.compared.append(f"{self._found.rows} rows of txids {spans(compared)}, txid by txid")
        self._not_digested(undigested)
        self._given_up(given_up)
        for named, content in counted.items():
            if named is None or (within(named, self._span) and named > given_up and named not in self._entries):
                self._found.strangers(named, content.rows, began_empty=self._began_empty)

    def _judge_whole(self, given_up: int) -> None:
        if given_up:
            self._given_up(given_up)
            return
        expected = NOTHING
        rows = sum(entry.rows for entry in self._entries.values())
        for entry in self._entries.values():
            if entry.content is not None:
                expected += entry.content
        if self._whole is None:
            self._not_digested([txid for txid, entry in self._entries.items() if entry.content is None])
            there = Content(self._rows or 0, 0)
            if there.rows < rows or (there.rows > rows and self._began_empty):
                self._found.differs("the table", Content(rows, 0), there)
            return
        there = self._whole
        if there.digest == expected.digest:
            self._found.rows += there.rows
            self._found.compared.append(
                f"all of its {there.rows} rows, as one sum: a difference could not be laid to a txid"
            )
        elif self._several and there.rows == expected.rows:
            self._found.left_out.append(
                "the values of its rows: its columns are others than they were, and may have got defaults; its "
                f"{there.rows} rows were counted"
            )
        elif there.rows < expected.rows or self._began_empty:
            self._found.differs("the table", expected, there)
        else:
            self._found.left_out.append(
                f"its rows: it has {there.rows} and was written {expected.rows}, and it is not on record that it was empty "
                "before; without lineage columns (lineage=True) these cannot be told from others"
            )

    def _on_record(self) -> Totals | None:
        """What the table must hold by the evidence of all txids; None: it is not on record."""
        total = Totals(content=NOTHING) if self._began_empty or not self._entries else None
        for entry in self._entries.values():
            if total is None or entry.totals is None:
                return None
            total = total.after(entry.totals.sums, entry.totals.rows, entry.totals.content)
        return total

    def _not_digested(self, txids: Sequence[int]) -> None:
        by_why: dict[str, list[int]] = {}
        for txid in txids:
            by_why.setdefault(self._entries[txid].why, []).append(txid)
        self._found.left_out += [f"txids {spans(some)}: {why}" for why, some in by_why.items()]

    def _given_up(self, txid: int) -> None:
        if txid:
            self._found.left_out.append(f"txids up to {txid}: their rows were given up with the table that held them")


def _expression(column: Column, kind: str) -> sql.Composed:
    """A column's value in the form in which its kind is hashed."""
    name = sql.Identifier(column.name)
    if kind.startswith("decimal"):
        scale = int(kind[len("decimal(") : -1])
        # NULL where it is no value that can have been written: the digest then differs.
        return sql.SQL(
            "case when {0} = round({0}, {1}) and abs({0}) < 1e{2} then round({0}, {1})::text end as {0}"
        ).format(name, sql.Literal(scale), sql.Literal(_DIGITS - scale))
    cast = {"integer": "::bigint", "float": "::double precision", "text": "::text"}.get(kind, "")
    if column.base == "boolean":
        cast = "::integer::bigint"
    if column.base == "inet":  # whose cast to text always has a mask
        return sql.SQL("abbrev({0}) as {0}").format(name)
    return sql.SQL("{0}" + cast + " as {0}").format(name)  # pyright: ignore[reportArgumentType]


def _with_decimals(batch: pa.RecordBatch, decimals: Mapping[str, str]) -> pa.RecordBatch:
    if not decimals:
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, kind in decimals.items():
        text = pc.cast(columns[name], pa.string())
        columns[name] = pc.cast(text, pa.decimal128(_DIGITS, int(kind[len("decimal(") : -1])))
    return pa.RecordBatch.from_pydict(columns)


def _rows(database: Database, snapshot: str, query: str) -> Generator[pa.RecordBatch]:
    """A query's rows by COPY, at the instant of a snapshot that another connection holds."""
    try:
        made = started(
            dict(database.parameters),
            lambda known: dbapi.connect(Database.of(known).adbc_uri, autocommit=False),
            adbc_driver_manager.Error,
        )
        with closing(made) as connection:
            with closing(connection.cursor()) as cursor:
                cursor.execute("set transaction isolation level repeatable read, read only")
                cursor.execute(f"set transaction snapshot '{snapshot}'")
                cursor.execute(query)
                reader = cursor.fetch_record_batch()
                yield from reader
            connection.rollback()
    except adbc_driver_manager.Error as error:
        raise StoreUnavailable(
            f"the rows could not be read from {database.redacted}: {database.without_secrets(str(error))}",
            database=database.redacted,
            sqlstate=error.sqlstate,
        ) from error
