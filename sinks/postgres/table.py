"""A Postgres table as a sink sees it: its columns, what each can hold, and how Arrow's types get there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import IPv6Address
from itertools import groupby
from typing import Any, Final
from unicodedata import category

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.base.arguments import shown
from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.contract.fold import ByOrder, SetUnion
from stormproof.core.contract.sink import SinkInput
from stormproof.core.graph.aggregation import MEAN
from stormproof.core.postgres.rights import quoted
from stormproof.sinks.contract.row_rule import SchemaChange, require_lineage_takes_null
from stormproof.sinks.postgres.columns import (
    UUID_KEY_PATTERN,
    UUID_PATTERN,
    BinaryForm,
    Column,
    TextForm,
    as_text,
    cast_name,
    column_type,
    formed,
    is_uuid,
    of_type,
    step_us,
    text_form,
    why_not,
)
from stormproof.sinks.rows.limits import ColumnLimit, Limits, is_list, is_string, plain

# From the catalog alone: `pg_partition_tree` would lock every partition.
TREE: Final = """
    with recursive tree as (
        select c.oid, c.relkind, c.relpersistence from pg_class c where c.oid = {oid}
        union all
        select c.oid, c.relkind, c.relpersistence
        from tree t
        join pg_inherits i on i.inhparent = t.oid
        join pg_class c on c.oid = i.inhrelid
        where t.relkind = 'p'
    )"""
"""The table with this oid, and its partitions, at any depth."""

_INTEGERS: Final[Mapping[str, pa.DataType]] = {"smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64()}
TEXTS: Final = ("text", "character varying")
_KEY_FORMS: Final[Mapping[str, tuple[str, str]]] = {
    "uuid": (UUID_KEY_PATTERN, ", as a key is written: in lower case, with hyphens"),
    "character": (r"^$|[^ ]$", ", as a key is written: without spaces at its end, which the table does not compare"),
}
_CITEXT: Final = "citext"
"""As the catalog shows it where its schema is in the search path: elsewhere its operators would be those of text."""
_JSON: Final[Mapping[str, BinaryForm]] = {"json": BinaryForm.JSON, "jsonb": BinaryForm.JSONB}
_KEY_BYTES_MAX: Final = 2_600
"""An entry of a B-tree holds at most 2,704 bytes, including its header and fixed-size columns; longer keys are refused."""
_TABLES: Final = ("r", "p")
"""Relation kinds that are written: a table, a partitioned table."""
_NO_TABLE: Final[Mapping[str, tuple[str, str]]] = {
    "v": ("a view", "Name the table below it, and let its triggers stand there"),
    "m": ("a materialized view", "Name the table that it is made from, and refresh the view by yourself"),
    "f": (
        "a foreign table",
        "Its rows are not part of our transaction. Name the table in its own database: database=URL",
    ),
    "i": ("an index", "Name its table"),
    "I": ("an index", "Name its table"),
    "S": ("a sequence", "Name a table"),
    "c": ("a composite type", "Name a table"),
}
"""What another relation kind is, and what to do."""
_NAME_BYTES_MAX: Final = 63
"""Postgres cuts a longer name without an error: another table or column might have what is left of it."""


def key_form(base: str) -> tuple[str, str] | None:
    """Of a type that takes several texts for one: the pattern of a key's text, by which each key has one, and what it asks.
    None: the type has no such pattern.
    """
    if base == _CITEXT:
        return _lower_case(), ", as a key is written: in lower case, as by str.lower()"
    return _KEY_FORMS.get(base)


@cache
def _lower_case() -> str:
    """Texts that `lower` gives back as they are, by any collation. What is not assigned may become a capital letter with
    a newer Unicode of the server's; the emoji and Han behind it may not.
    """
    others = [c for c in range(0x1F000) if category(chr(c)) == "Cn" or chr(c).lower() != chr(c)]
    runs = ([c for _, c in run] for _, run in groupby(enumerate(others), lambda one: one[1] - one[0]))
    return "^[^{}]*$".format("".join(rf"\x{{{run[0]:x}}}-\x{{{run[-1]:x}}}" for run in runs))


_FORM: Final = 'write TABLE or SCHEMA.TABLE, and a name with a dot in quotes: "a.b"'
_PART: Final = re.compile(r'"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[^".][^.]*)')


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name, with its schema where one is given; otherwise the connection's search path decides."""

    schema: str | None
    table: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `table` or `schema.table`; names are taken letter by letter. One with a dot in it is written in quotes, as
        in SQL: `"a.b"`, `public."a.b"`.

        Raises:
            TopologyError: it is no such name, or longer than Postgres's names are.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"{shown(text)} is not a table's name; {_FORM}")
        parts, at = list[str](), 0
        while (match := _PART.match(text, at)) is not None:
            parts.append(match["plain"] or (match["quoted"] or "").replace('""', '"'))
            at = match.end() + 1
            if text[match.end() : at] != ".":
                break
        if at <= len(text) or not 1 <= len(parts) <= 2 or "" in parts or "\0" in text:
            raise TopologyError(f"{text!r} is not a table's name; {_FORM}")
        for part in parts:
            require_name(part, f"table {text!r}")
        return cls(parts[0], parts[1]) if len(parts) == 2 else cls(None, parts[0])

    @property
    def identifier(self) -> sql.Identifier:
        """For statements."""
        return sql.Identifier(self.table) if self.schema is None else sql.Identifier(self.schema, self.table)

    @property
    def quoted(self) -> str:
        """For a statement that a person runs."""
        return ".".join(quoted(part) for part in (self.schema, self.table) if part is not None)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ".".join(_shown(part) for part in (self.schema, self.table) if part is not None)


def _shown(part: str) -> str:
    return quoted(part) if "." in part or part.startswith('"') else part


def require_name(name: str, where: str) -> None:
    """Raise TopologyError for a name that Postgres would cut."""
    size = len(name.encode())
    if size > _NAME_BYTES_MAX:
        raise TopologyError(
            f"{where}: the name {name!r} has {size} bytes in UTF-8; Postgres keeps {_NAME_BYTES_MAX}. Choose a shorter one"
        )


@dataclass(frozen=True, slots=True)
class Table:
    """An existing table: its oid, its name with its schema, its columns, and whether its rows survive a crash."""

    oid: int
    name: TableName
    kind: str
    persistence: str
    columns: tuple[Column, ...]
    unique_keys: tuple[frozenset[str], ...]
    partitioned_by: tuple[str | None, ...] = ()
    """The columns by which it or a partition of it is partitioned; None among them: by an expression, too."""


# A domain is read as the type at its bottom: its own checks, NOT NULL and default hold on the way down.
_COLUMNS: Final = """
    with recursive c as (
        select attnum, attname::text as name, format_type(atttypid, atttypmod) as shown, atttypid as type,
               atttypmod as modifier, attnotnull as not_null, atthasdef or attidentity <> '' as has_default,
               attgenerated <> '' or attidentity = 'a' as generated
        from pg_attribute where attrelid = {oid} and attnum > 0 and not attisdropped
        union all
        select c.attnum, c.name, c.shown, t.typbasetype, t.typtypmod, c.not_null or t.typnotnull,
               c.has_default or t.typdefault is not null, c.generated
        from c join pg_type t on t.oid = c.type and t.typtype = 'd'
    )
    select c.name, c.shown, format_type(c.type, null), c.modifier, c.not_null, c.has_default, c.generated,
           case when coalesce(e.typtype, t.typtype) = 'e' then
               (select coalesce(json_agg(enumlabel), '[]') from pg_enum where enumtypid = coalesce(e.oid, t.oid)) end,
           (select string_agg(format_type(a.atttypid, a.atttypmod), E'\\n') from pg_attribute a
            where a.attrelid = coalesce(e.typrelid, t.typrelid) and a.attnum > 0 and not a.attisdropped)
    from c join pg_type t on t.oid = c.type and t.typtype <> 'd'
    left join pg_type e on e.oid = t.typelem and t.typcategory = 'A' order by c.attnum
"""

_KEYS: Final = """
    select array_agg(a.attname::text)
    from pg_index i
    cross join lateral unnest(i.indkey[0:i.indnkeyatts - 1]) as k (attnum)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = {oid} and i.indisunique and not i.indisexclusion and i.indimmediate and i.indisvalid
      and i.indpred is null and i.indexprs is null
    group by i.indexrelid order by i.indexrelid
"""

# Of `TREE`.
_PARTITIONED_BY: Final = """
    select distinct a.attname::text
    from tree join pg_partitioned_table p on p.partrelid = tree.oid
    cross join lateral unnest(p.partattrs::int2[]) as k (attnum)
    left join pg_attribute a on a.attrelid = p.partrelid and a.attnum = k.attnum order by 1
"""

TABLE: Final = f"""
    select c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
           (select json_agg(row_to_json(found)) from ({_COLUMNS}) as found),
           (select json_agg(row_to_json(found)) from ({_KEYS}) as found),
           (select json_agg(row_to_json(found)) from ({_PARTITIONED_BY}) as found)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = {{oid}}
"""
"""What the catalog says of the table with this oid, behind `TREE` and in one row: see `table_of`."""
_TABLE: Final = (TREE + TABLE).replace("{oid}", "%(oid)s").encode()


def find_oid(connection: psycopg.Connection, name: TableName) -> int | None:
    """The table's oid now."""
    row = connection.execute("select to_regclass(%s)::oid", (name.identifier.as_string(connection),)).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def read_table(connection: psycopg.Connection, oid: int) -> Table:
    """What the catalog says of a table."""
    row = connection.execute(_TABLE, {"oid": oid}).fetchone()
    return Table(oid, TableName("", ""), "", "", (), ()) if row is None else table_of(row)


def table_of(row: Sequence[Any]) -> Table:
    """The table of a row of `TABLE`."""
    oid, schema, name, kind, persistence, columns, keys, partitioned_by = row
    return Table(
        int(oid),
        TableName(schema, name),
        kind,
        persistence,
        tuple(Column(*column.values()) for column in columns or ()),
        tuple(frozenset(names) for (names,) in map(dict.values, keys or ())),
        tuple(column for (column,) in map(dict.values, partitioned_by or ())),
    )


def as_changed(table: Table, changes: tuple[SchemaChange, ...]) -> Table:
    """The table as it will be, for the checks of rows that are written before it is changed."""
    columns = {column.name: column for column in table.columns}
    for change in changes:
        base, modifier = change.becomes, -1
        if base.startswith("numeric("):
            precision, scale = (int(digits) for digits in base[8:-1].split(","))
            base, modifier = "numeric", (precision << 16 | scale) + 4
        new = Column(change.column, change.becomes, base, modifier, not_null=False, has_default=False, generated=False)
        old = columns.get(change.column)
        kept = new if old is None else replace(old, type=new.type, base=new.base, modifier=new.modifier)
        columns[change.column] = kept
    return replace(table, columns=tuple(columns.values()))


def check_types(schema: pa.Schema, where: str) -> None:
    """Raise TopologyError for a column that no Postgres table of ours can hold."""
    for field in schema:
        require_name(field.name, where)
        if column_type(field.type) is None:
            hint = "; use microseconds" if pa.types.is_temporal(field.type) else ""
            raise TopologyError(
                f"{where}: column {field.name!r} is {field.type}, which has no Postgres type here{hint}",
                field=field.name,
            )


def check_flat_types(schema: pa.Schema, where: str) -> None:
    """Raise TopologyError for a column whose values cannot be read back as they were written: nested ones, times, uuids."""
    check_types(schema, where)
    for field in schema:
        kind = field.type
        if pa.types.is_nested(kind) or is_uuid(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
            raise TopologyError(
                f"{where}: column {field.name!r} is {kind}, which cannot be read back from Postgres here",
                field=field.name,
            )


def create_statement(name: TableName, input_: SinkInput) -> sql.Composed:
    """The statement that makes the table for such rows."""
    parts: list[sql.Composable] = []
    for field in input_.schema:
        kind = sql.SQL(column_type(field.type) or "")  # pyright: ignore[reportArgumentType]
        not_null = sql.SQL(" not null" if field.name in input_.keys else "")
        parts.append(sql.SQL("{} {}{}").format(sql.Identifier(field.name), kind, not_null))
        mean = (field.metadata or {}).get(MEAN, b"").decode()
        if mean and mean not in input_.schema.names:
            parts.append(_shown_mean(mean, field.name))
    if input_.is_by_key:
        keys = sql.SQL(", ").join(map(sql.Identifier, input_.keys))
        parts.append(sql.SQL("primary key ({})").format(keys))
    return sql.SQL("create table if not exists {} ({})").format(name.identifier, sql.SQL(", ").join(parts))


def _shown_mean(mean: str, total: str) -> sql.Composed:
    """The generated column of a mean, beside its sum and its count."""
    return sql.SQL("{} double precision generated always as ({}::double precision / nullif({}, 0)) stored").format(
        sql.Identifier(mean), sql.Identifier(total), sql.Identifier(f"{mean}_count")
    )


def require_table(table: Table, input_: SinkInput, where: str) -> None:
    """Refuse a table that cannot hold such rows, or would not keep them.

    Raises:
        SinkRefused: names the column and both types, or what is wrong with the table.
    """
    if table.kind not in _TABLES:
        what, way_on = _NO_TABLE.get(table.kind, (f"a relation of kind {table.kind!r}", "Name a table"))
        raise SinkRefused(f"{where}: it is {what}, not a table. {way_on}", relation_kind=table.kind)
    if table.persistence == "t":
        raise SinkRefused(
            f"{where}: the table is temporary: it ends with the session that made it. Name a permanent table"
        )
    if table.persistence != "p":
        raise SinkRefused(
            f"{where}: the table is unlogged, and a crash of the server empties it. "
            f"Run: alter table {table.name.quoted} set logged"
        )
    there = {column.name: column for column in table.columns}
    for field in input_.schema:
        column = there.pop(field.name, None)
        if column is None:
            raise SinkRefused(f"{where}: the table has no column {field.name!r}", column=field.name)
        if column.generated:
            raise SinkRefused(
                f"{where}: column {field.name!r} is generated by the table (GENERATED ALWAYS). Leave it out of the stream",
                column=field.name,
            )
        if wire_field(field, column) is None:
            raise SinkRefused(
                f"{where}: column {field.name!r} is {column.type} in the table and {field.type} in the rows "
                f"({column_type(field.type)}){why_not(column.base)}",
                column=field.name,
                table_type=column.type,
                rows_type=str(field.type),
            )
        _require_comparable(field, column, input_, where)
    require_lineage_takes_null(input_, {column.name for column in table.columns if column.not_null}, where)
    for column in there.values():
        if column.not_null and not column.has_default and not column.generated:
            raise SinkRefused(
                f"{where}: the table's column {column.name!r} is NOT NULL without a default, and the rows lack it",
                column=column.name,
            )
    if input_.is_by_key and frozenset(input_.keys) not in table.unique_keys:
        raise SinkRefused(
            f"{where}: the table has no primary key, unique constraint or unique index on exactly ({_listed(input_.keys)}), "
            "so a row could not be found by its key. One that is deferrable, partial or invalid does not count. "
            + _unique(table, input_),
            key=[*input_.keys],
        )


def _unique(table: Table, input_: SinkInput) -> str:
    """How the table gets the unique index that its key lacks, in words."""
    others = [column for column in table.partitioned_by if column not in input_.keys]
    if None in others:
        return (
            "It, or a partition of it, is partitioned by an expression, and Postgres makes no unique index on such a table: "
            "name a table that is partitioned by columns alone, or not at all"
        )
    keys = [*input_.keys, *filter(None, others)]
    statement = f"CREATE UNIQUE INDEX ON {table.name.identifier.as_string()} ({_listed(keys)})"
    if not others:
        return f"Make one: {statement}; and start again"
    return (
        f"It is partitioned by ({_listed(filter(None, table.partitioned_by))}), and Postgres makes a unique index only with "
        f"all of these in it. Where a row is found by ({_listed(keys)}), name these as the key, and make one: "
        f"{statement}; and start again. Otherwise name a table that is not partitioned by other columns than the key's"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(quoted, names))


def _require_comparable(field: pa.Field, column: Column, input_: SinkInput, where: str) -> None:
    """Refuse a key, a column of `order_by`, and a folded text, that the column compares otherwise than batches do: text by
    its bytes.
    """
    if field.name in input_.order_by and _is_spelled_anew(field, column):
        raise SinkRefused(
            f"{where}: order_by names {field.name!r}, which is {column.type} in the table and text in the rows: the table "
            "keeps one text for several, so rows compare otherwise than they came; make it text, or order by another column",
            column=field.name,
        )
    fold = input_.folds.get(field.name)
    if isinstance(fold, SetUnion) and is_string(field.type.value_type) and column.base != "text[]":
        raise SinkRefused(
            f"{where}: column {field.name!r} is {column.type} in the table, and only text[] is sorted by its bytes; "
            "make it text[]",
            column=field.name,
        )
    if isinstance(fold, SetUnion) and step_us(column) > 1:
        raise SinkRefused(
            f"{where}: column {field.name!r} is {column.type} in the table, which rounds the values of a set; make it "
            f"{column.base}",
            column=field.name,
        )
    if column.base in TEXTS or not is_string(field.type):
        return
    form = text_form(column)
    is_one_text = key_form(column.base) is not None or (form is not None and form.is_key)
    if field.name in input_.keys and input_.is_by_key and not is_one_text:
        raise SinkRefused(
            f"{where}: key column {field.name!r} is {column.type} in the table and text in the rows, which are compared by "
            "their bytes: the type takes several texts for one key. Make it text, and bring the key into one form in a "
            "function; or give the stream a type of its own, as decimal for numeric",
            column=field.name,
        )
    if field.name in input_.folds:
        raise SinkRefused(
            f"{where}: column {field.name!r} is {column.type} in the table, and only text has a {input_.folds[field.name]} "
            "by its bytes; make it text",
            column=field.name,
        )


def _is_spelled_anew(field: pa.Field, column: Column) -> bool:
    """Whether the table keeps one text for several that the rows may have."""
    is_cast = text_form(column) is not None and not column.is_enum
    return is_string(field.type) and (is_cast or column.base in ("uuid", "jsonb", "character"))


def kept_otherwise(table: Table, input_: SinkInput) -> tuple[str, ...]:
    """The columns whose values the table keeps otherwise than they come, so that they cannot tell which row is later: text
    that is cast or spelled anew, and timestamps that are rounded.

    A column of `order_by` is none of them: `require_table` refuses texts, and the writer's checks what would be rounded.
    """
    there = {column.name: column for column in table.columns}
    return tuple(
        field.name
        for field in input_.schema
        if field.name not in input_.order_by
        and field.name in there
        and (_is_spelled_anew(field, there[field.name]) or step_us(there[field.name]) > 1)
    )


def wire_field(field: pa.Field, column: Column, *, is_key: bool = False) -> pa.Field | None:
    """The field of a wire schema whose form the column reads; None where it holds no such values."""
    sent = _binary_field(field, column)
    kind, is_array = field.type, column.base.endswith("[]")
    if sent is not None or is_list(kind) != is_array or text_form(column) is None:
        return sent
    if not _is_text(kind.value_type if is_array else kind):
        return None
    return as_text(
        field.name, pa.list_(pa.string()) if is_array else pa.string(), cast_name(column.base), is_key=is_key
    )


def _is_text(kind: pa.DataType) -> bool:
    return is_string(kind) or (pa.types.is_dictionary(kind) and is_string(kind.value_type))


def _binary_field(field: pa.Field, column: Column) -> pa.Field | None:
    kind, base = field.type, column.base
    text = _is_text(kind)
    if base in _JSON and (text or pa.types.is_nested(kind)):
        return formed(field.name, _JSON[base]) if column_type(kind) is not None else None
    if is_list(kind) and base.endswith("[]"):
        # An array's wire form names the type of its values, and Postgres takes no other, be it as alike as varchar and text.
        if _is_text(kind.value_type) and base != "text[]":
            return None
        element = _binary_field(pa.field("", kind.value_type), replace(column, base=base.removesuffix("[]")))
        if element is None or element.metadata:
            return None
        if pa.types.is_timestamp(element.type) and element.type.tz is not None:
            return formed(field.name, BinaryForm.INSTANTS)
        values = element.type
        return pa.field(field.name, pa.large_list(values) if pa.types.is_large_list(kind) else pa.list_(values))
    if text and base == "uuid":
        return formed(field.name, BinaryForm.UUID)
    if text and column.is_enum and not base.endswith("[]"):
        return of_type(pa.field(field.name, pa.string()), base)
    sent = _wire_type(kind, column, text=text)
    return None if sent is None else pa.field(field.name, sent)


def _wire_type(kind: pa.DataType, column: Column, *, text: bool) -> pa.DataType | None:
    made = column_type(kind)
    if pa.types.is_integer(kind):
        return _INTEGERS.get(column.base) if made is not None else None
    if text:
        taken = column.base in (*TEXTS, "character") or column.base.rpartition(".")[2] == "citext"
        if not taken:
            return None
        return kind if is_string(kind) else kind.value_type
    if made == "real" and column.base == "double precision":
        return pa.float64()
    if pa.types.is_decimal128(kind):
        return kind if column.base == "numeric" and _numeric_holds(column, kind) else None
    if made != column.base:
        return pa.binary(16) if is_uuid(kind) and column.base == "bytea" else None
    if pa.types.is_time(kind):
        return pa.time64("us")
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _numeric_holds(column: Column, kind: pa.DataType) -> bool:
    if column.modifier < 0:
        return True
    precision, scale = (column.modifier - 4) >> 16, (column.modifier - 4) & 0x7FF
    return bool(scale >= kind.scale and precision - scale >= kind.precision - kind.scale)


def wire_schema(table: Table, input_: SinkInput) -> pa.Schema:
    """The rows' schema as it is sent to the table, for `to_wire`; `require_table` has passed."""
    there = {column.name: column for column in table.columns}
    keys = input_.keys if input_.is_by_key else ()
    return pa.schema([wire_field(f, there[f.name], is_key=f.name in keys) for f in input_.schema])


def column_limits(table: Table, input_: SinkInput) -> Limits:
    """What the writer stage checks before anything is written."""
    there = {column.name: column for column in table.columns}
    # The index would refuse a longer key in the middle of the commit, and so block the whole batch.
    texts = sum(not pa.types.is_primitive(input_.schema.field(key).type) for key in input_.keys)
    required = {*input_.keys, *input_.order_by}
    decisive = required | {name for name, fold in input_.folds.items() if isinstance(fold, ByOrder)}
    limits: list[ColumnLimit] = []
    for field in input_.schema:
        column = there[field.name]
        base = column.base.removesuffix("[]")
        bits = _INTEGERS[base].bit_width if base in _INTEGERS else None
        cast = text_form(column) or TextForm()
        pattern, form = (UUID_PATTERN if base == "uuid" else cast.pattern), cast.form
        if field.name in input_.keys and is_string(field.type):
            pattern, form = key_form(base) or (pattern, form)
        limits.append(
            ColumnLimit(
                field.name,
                column.type,
                not_null=column.not_null or field.name in required,
                no_nul=True,
                chars_max=column.modifier - 4 if base.startswith("character") and column.modifier > 4 else None,
                bytes_max=_KEY_BYTES_MAX // max(texts, 1) if field.name in input_.keys else None,
                low=None if bits is None else -(2 ** (bits - 1)),
                high=None if bits is None else 2 ** (bits - 1) - 1,
                pattern=pattern,
                form=form,
                step_us=step_us(column) if field.name in decisive else 1,
            )
        )
    return Limits(tuple(limits))


_BYTE: Final = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_WORD: Final = "[1-9a-f][0-9a-f]{0,3}"
_NOT_FFFF: Final = "(?:[1-9a-f][0-9a-f]{0,2}|[1-9a-e][0-9a-f]{3}|f[0-9a-e][0-9a-f]{2}|ff[0-9a-e][0-9a-f]|fff[0-9a-e])"


@dataclass(frozen=True, slots=True)
class MapKey:
    """As what type a key is compared. Only text that matches `pattern` is the type's own; `form` says so, for messages.
    `may_grow`: the type may get more values.
    """

    type: str
    pattern: str | None = None
    form: str = ""
    may_grow: bool = False

    def own(self, keys: pa.Array) -> list[object]:
        """The keys, with None for each text that no row of the table can have as its key."""
        if self.pattern is None:
            return list(keys.to_pylist())
        texts = plain(keys)
        found = pc.match_substring_regex(texts, self.pattern)
        return list(pc.if_else(found, texts, pa.scalar(None, texts.type)).to_pylist())


def map_keys(table: Table, input_: SinkInput, where: str) -> dict[str, MapKey]:
    """How the table compares each key. A map finds its rows by comparing keys of the stream with those of the table.

    Raises:
        SinkRefused: a key is text in the stream, and of a type in the table that no map compares with text.
    """
    keys: dict[str, MapKey] = {}
    for column in table.columns:
        if column.name not in input_.keys:
            continue
        kind = input_.schema.field(column.name).type
        key = key_of_text(column) if is_string(kind) else MapKey(column_type(kind) or "")
        if key is None:
            raise SinkRefused(
                f"{where}: key column {column.name!r} is {column.type} in the table and text in the stream; a map's key of "
                "text is text, varchar, char(n), citext, uuid, inet or an enum in the table",
                column=column.name,
            )
        keys[column.name] = key
    return keys


def with_keys(limits: Limits, keys: dict[str, MapKey]) -> Limits:
    """The limits of the table's columns, with the texts that its keys are written as."""
    return Limits(
        tuple(
            limit
            if (key := keys.get(limit.name)) is None or key.pattern is None
            else replace(limit, pattern=key.pattern, form=key.form, may_grow=key.may_grow)
            for limit in limits.columns
        )
    )


def key_of_text(column: Column) -> MapKey | None:
    """How a column compares a key that is text in the stream; None where a map has no such key."""
    if column.base in TEXTS:
        return MapKey("text")
    kind = cast_name(column.base)
    if (form := key_form(column.base)) is not None:
        return MapKey(kind, *form)
    if column.labels is not None:
        return MapKey(kind, f"^(?:{'|'.join(map(re.escape, column.labels))})$", may_grow=True)
    return MapKey(kind, _inet(), ", as a key is written: as Postgres shows it") if column.base == "inet" else None


@cache
def _inet() -> str:
    """The texts that Postgres gives back of addresses; those that begin with :: and IPv4 (of ffff, or of nothing) apart."""
    # Where the longest run of zeros is, is the same for all addresses with a zero in the same words.
    masks = [str(IPv6Address(sum((mask >> at & 1) << 16 * at for at in range(8)))) for mask in range(4, 256)]
    forms = "|".join(re.sub("^::W(?=:.:.$)", "::N", text.replace("1", "W")) for text in masks)
    ipv6 = forms.replace("W", _WORD).replace("N", _NOT_FFFF)
    mapped = f"::ffff:{_IPV4}"
    return rf"^(?:{_IPV4}(?:/(?:[12]?\d|3[01]))?|(?:::|::{_WORD}|{mapped}|{ipv6})(?:/(?:1[01]\d|12[0-7]|[1-9]?\d))?)$"
