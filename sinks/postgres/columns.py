"""The columns of a table: which take text of a stream by the server's own cast, what text, and which as keys; which give
values back as they came, and what the evidence of a txid says of its rows' content. And how values get into them: the Arrow
type that is sent, and its binary form where Arrow has none. Nested values are sent as JSON text, with values written as
Postgres's own `to_jsonb` writes them.

The schema of what is sent (`wire_schema`) says so in its fields' metadata, so that it can be handed to another process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from psycopg import sql

from stormproof.core.base.arrow import pc
from stormproof.sinks.rows.content import Content, Totals, kind_of
from stormproof.sinks.rows.limits import as_list, is_bytes, is_list, is_string, lengths_of, parents_of, plain


@dataclass(frozen=True, slots=True)
class Column:
    """One column of an existing table."""

    name: str
    type: str
    """As `format_type` shows it, with its modifier."""
    base: str
    """The same without the modifier; of a domain, the type below it."""
    modifier: int
    not_null: bool
    has_default: bool
    generated: bool
    labels: Sequence[str] | None = None
    """Of an enum, or an array of one."""
    parts: str | None = None
    """Of a composite type, or an array of one: the types of its attributes, a line each."""

    @property
    def is_enum(self) -> bool:
        """Whether it is an enum, or an array of one."""
        return self.labels is not None


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a type takes text. What it does not take the server refuses; `pattern` refuses before that what it would take for
    another value: digits that it rounds, a time without a zone, `now`; `form` says so. `{p}` stands for the digits that the
    column keeps.
    """

    pattern: str | None = None
    form: str = ""
    is_key: bool = False
    """Whether equal values have one text, as the type writes it, so that it can be a key."""
    is_fixed: bool = True
    """Whether what it writes is the same in every session."""


_DATE: Final = r"\d{4}-\d\d-\d\d"
_TIME: Final = r"\d\d:\d\d(?::[0-5]\d(?:\.\d{0,{p}})?)?"
_ZONE: Final = r"(?:Z|[+-]\d\d(?::\d\d){0,2})"


def _ranges(bound: str) -> tuple[str, str]:
    """The patterns of a range and of a multirange."""
    bound = rf'(?:"?(?:{bound}|-?infinity)"?)?'
    one = rf"(?:empty|[\[(]{bound},{bound}[\])])"
    return f"^{one}$", rf"^\{{(?:{one}(?:,{one})*)?\}}$"


def _of_ranges(kind: str, bound: str, form: str, *, is_fixed: bool = True, is_key: bool = False) -> dict[str, TextForm]:
    one, several = _ranges(bound)
    return {
        f"{kind}range": TextForm(one, form, is_fixed=is_fixed, is_key=is_key),
        f"{kind}multirange": TextForm(several, form, is_fixed=is_fixed, is_key=is_key),
    }


_PLAIN, _KEY = TextForm(), TextForm(is_key=True)
_DIGITS: Final = ", in the digits that the column keeps"
FORMS: Final[Mapping[str, TextForm]] = {
    **dict.fromkeys(("inet", "cidr", "macaddr", "macaddr8", "ltree", "bit", "bit varying"), _KEY),
    **dict.fromkeys(("int4range", "int8range", "int4multirange", "int8multirange"), _KEY),
    **dict.fromkeys(("numrange", "nummultirange"), _PLAIN),
    **_of_ranges("date", _DATE, ", with dates as 2026-01-31", is_key=True),
    **_of_ranges("ts", f"{_DATE}[ T]{_TIME}", ", with times as 2026-01-31 12:30:00", is_key=True),
    **_of_ranges("tstz", f"{_DATE}[ T]{_TIME}{_ZONE}", ", with times as 2026-01-31 12:30:00+00", is_fixed=False),
    "interval": TextForm(
        # A fraction of seconds to months; of nothing smaller, which is rounded, nor of years, which are rounded to months.
        r"(?i)^(?:[^.a-z\d]|\d|[a-df-z][a-z]*"
        r"|\.\d{0,{p}}(?:\s*(?:$|[^\w\s.]|(?:s|h|w|min|mon|da)[a-z]*|[md](?:t|[^a-z.]|$))|\s+\d))*$",
        _DIGITS,
    ),
    "time without time zone": TextForm(f"^{_TIME}$", ", as 12:30:00" + _DIGITS, is_key=True),
    "time with time zone": TextForm(f"^{_TIME}{_ZONE}$", ", as 12:30:00+00" + _DIGITS, is_key=True),
    "numeric": TextForm(r"^(?:NaN|[+-]?(?:\d+(?:\.\d{0,{p}})?|\.\d{1,{p}}))$", _DIGITS),
}
_IN_ARRAYS: Final[Mapping[str, TextForm]] = dict.fromkeys(("uuid", "character varying", "character", "citext"), _PLAIN)
"""Types that take a text in binary form, but no array of such."""
_PARTS: Final = re.compile(r"(?:smallint|integer|bigint|boolean|numeric|text|uuid|character varying)(?:\[\])?")
"""What the attributes of a composite type may be besides types of text without a pattern: types that keep what they read."""
_WHY_NOT: Final[Mapping[str, str]] = {
    "money": "its text follows the server's lc_monetary; make it numeric",
    "name": "it cuts text to 63 bytes; make it text",
    '"char"': "it cuts text to one byte; make it text",
    "interval": "it keeps some of an interval's fields, or its seconds to some digits alone; make it interval",
}


def text_form(column: Column) -> TextForm | None:
    """How the column, or the values of its array, takes text by a cast; None where it does not."""
    base = column.base.removesuffix("[]")
    known = base if base in FORMS else base.rpartition(".")[2]
    if column.is_enum:
        return _KEY
    if column.parts:
        parts = (re.sub(r"^\w+\.", "", part) for part in column.parts.split("\n"))
        return _PLAIN if all(_PARTS.fullmatch(part) or FORMS.get(part) in (_KEY, _PLAIN) for part in parts) else None
    found = FORMS.get(known) or (_IN_ARRAYS.get(known) if column.base.endswith("[]") else None)
    if found is None or found.pattern is None:
        return found
    if base == "numeric" and column.modifier < 0:
        return _PLAIN
    digits = _digits(base, column.modifier)
    return (
        None
        if digits is None
        else TextForm(found.pattern.replace("{p}", digits), found.form, found.is_key, found.is_fixed)
    )


def _digits(base: str, modifier: int) -> str | None:
    """How many digits behind the point it keeps, as they stand in a pattern."""
    if modifier < 0:
        return "6"
    if base == "interval":
        return "6" if modifier & 0xFFFF == 6 and modifier >> 16 == 0x7FFF else None
    scale = (modifier - 4) & 0x7FF if base == "numeric" else modifier
    return str(scale) if scale <= 1000 else None


def cast_name(base: str) -> str:
    """The type's name in a cast that keeps every length: `bit` and `character` alone are one long."""
    return re.sub(r"^(?:(bit)|character)(?=$|\[)", lambda found: '"bit"' if found[1] else "bpchar", base)


def why_not(base: str) -> str:
    """Why a column of this type takes no text, and what to do."""
    kind = base.removesuffix("[]")
    if kind.startswith("reg"):
        return "; it is the number of what has the name at that moment; make it text"
    return f"; {_WHY_NOT[kind]}" if kind in _WHY_NOT else ""


def step_us(column: Column) -> int:
    """The microseconds to which the column rounds a timestamp."""
    return 10 ** (6 - column.modifier) if column.base.startswith("timestamp") and 0 <= column.modifier < 6 else 1


Kinds: TypeAlias = tuple[tuple[str, str], ...]
"""The columns of a content, with their kinds."""

_BASES: Final[Mapping[str, frozenset[str]]] = {
    "integer": frozenset({"smallint", "integer", "bigint", "boolean"}),
    "float": frozenset({"real", "double precision"}),
    "text": frozenset({"text", "character varying"}),
    "bytes": frozenset({"bytea"}),
    "date": frozenset({"date"}),
    "timestamp": frozenset({"timestamp without time zone", "timestamp with time zone"}),
    "decimal": frozenset({"numeric"}),
}
"""The types, by the kind of the rows' column, that keep a value as it came."""


_BY_VALUE: Final = frozenset().union(*(_BASES[kind] for kind in _BASES if kind != "text"), {"uuid"})
_BY_TEXT: Final = frozenset({"text", "character varying", "character", "citext", "json", "jsonb"})
_POSTGRES: Final = "postgres "
"""Before the type of a column that the server itself hashed, in the kinds of a content."""


def row_hash(columns: Sequence[Column], names: Collection[str]) -> tuple[sql.Composed, Kinds]:
    """The server's own hash of a row of `held`, a bigint that dumps and major versions keep as they keep partitions by hash;
    and the columns that it covers. Text is hashed by its bytes, whatever its collation.
    """
    covered = list[tuple[str, str, sql.Composable]]()
    for column in sorted(columns, key=lambda column: column.name):
        value = sql.SQL("held.{}").format(sql.Identifier(column.name))
        form = text_form(column)
        is_text = column.base.rpartition(".")[2] in _BY_TEXT or (form is not None and form.is_fixed)
        if column.name in names and is_text and column.base not in _BY_VALUE:
            covered.append((column.name, column.type, sql.SQL('{}::text collate "C"').format(value)))
        elif column.name in names and column.base in _BY_VALUE:
            covered.append((column.name, column.type, value))
    hashed = sql.SQL("hash_record_extended(row({}), 0)").format(sql.SQL(", ").join(one for _, _, one in covered))
    return hashed, tuple((name, _POSTGRES + kind) for name, kind, _ in covered)


def is_by_server(kinds: Kinds) -> bool:
    """Whether a content of these kinds is a sum of `row_hash`."""
    return any(kind.startswith(_POSTGRES) for _, kind in kinds)


def hashed_columns(columns: Sequence[Column], schema: pa.Schema) -> tuple[str, ...]:
    """The rows' columns whose values the table gives back as they came."""
    there = {column.name: column for column in columns}
    kinds = {field.name: kind_of(field.type) for field in schema}
    return tuple(n for n, kind in kinds.items() if kind is not None and n in there and keeps(there[n], kind))


def keeps(column: Column, kind: str) -> bool:
    """Whether a column gives values of this kind back as they came."""
    if kind == "timestamp" and step_us(column) > 1:
        return False
    citext = kind == "text" and (column.is_enum or column.base.rpartition(".")[2] == "citext")
    return citext or column.base in _BASES[kind.partition("(")[0]]


def known_content(content: Content | Totals, *, began_empty: bool) -> str:
    """The evidence's `content` of a txid; `began_empty`: it is the first one, and the table was empty before it."""
    return json.dumps({**json.loads(content.to_text()), **({"began_empty": True} if began_empty else {})})


def unknown_content(why: str, *, began_empty: bool = False) -> str:
    """The evidence's `content` of a txid whose rows cannot be compared."""
    return json.dumps({"v": 0, "why": why, **({"began_empty": True} if began_empty else {})})


_TEXT: Final = pa.large_string()
_ESCAPED: Final = '[\\x00-\\x1f"\\\\]'
_NOT_NUMBERS: Final = (("nan", '"NaN"'), ("inf", '"Infinity"'), ("-inf", '"-Infinity"'))


def json_text(column: pa.Array) -> pa.Array:
    r"""Each value as JSON; NULL stays NULL.

    Numbers keep their digits; NaN and infinities, dates, times and timestamps are strings, bytes are ``"\\x..."``. The
    keys of a map are its objects' names. Text must be UTF-8 and hold no NUL: `Limits` has checked that.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_struct(kind):
        made = _object(column)
    elif is_list(kind):
        made = _between("[", _joined(column, _value(column.flatten())), "]")
    elif pa.types.is_map(kind):
        entries = as_list(column)
        keys, items = entries.flatten().flatten()
        pairs = pc.binary_join_element_wise(_name(keys), _value(items), pa.scalar(":", _TEXT))
        made = _between("{", _joined(entries, pairs), "}")
    else:
        return _scalar(column)
    return pc.if_else(pc.is_valid(column), made, pa.scalar(None, _TEXT))


def _value(column: pa.Array) -> pa.Array:
    return pc.fill_null(json_text(column), "null")


def _object(column: pa.Array) -> pa.Array:
    parts: list[Any] = []
    for i, child in enumerate(column.flatten()):
        name = json.dumps(column.type.field(i).name, ensure_ascii=False)
        parts += [pa.scalar(f"{'{' if i == 0 else ','}{name}:", _TEXT), _value(child)]
    return pc.binary_join_element_wise(*parts, pa.scalar("}", _TEXT), pa.scalar("", _TEXT))


def _joined(column: pa.Array, values: pa.Array) -> pa.Array:
    """The values of each row with commas between them."""
    offsets = np.concatenate(([0], np.cumsum(lengths_of(column))))
    rows = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pc.binary_join(rows, pa.scalar(",", _TEXT))


def _between(left: str, text: pa.Array, right: str) -> pa.Array:
    return pc.binary_join_element_wise(pa.scalar(left, _TEXT), text, pa.scalar(right, _TEXT), pa.scalar("", _TEXT))


def _name(keys: pa.Array) -> pa.Array:
    """The keys of a map as names: strings, whatever they are."""
    made = json_text(keys)
    if is_string(plain(keys).type):
        return made
    bare = pc.replace_substring(made, '"', "")
    return _between('"', bare, '"')


def _scalar(column: pa.Array) -> pa.Array:
    kind = column.type
    if is_string(kind):
        return _between('"', _escaped(column.cast(_TEXT)), '"')
    if is_bytes(kind):
        return _between('"\\\\x', hex_text(column), '"')
    text = pc.cast(column, _TEXT)
    if pa.types.is_floating(kind):
        for found, shown in _NOT_NUMBERS:
            text = pc.if_else(pc.equal(text, found), pa.scalar(shown, _TEXT), text)
        return text
    if pa.types.is_timestamp(kind):
        text = pc.replace_substring(text, " ", "T")
    if pa.types.is_temporal(kind):
        return _between('"', text, '"')
    return text


def _escaped(text: pa.Array) -> pa.Array:
    if not pc.any(pc.match_substring_regex(text, _ESCAPED)).as_py():
        return text
    text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
    for code in range(0x20):
        if pc.any(pc.match_substring(text, chr(code))).as_py():
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return text


def hex_text(column: pa.Array) -> pa.Array:
    """Bytes as text of hexadecimal digits."""
    whole = pc.fill_null(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
    data = whole.buffers()[2]
    digits = b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]].hex().encode()
    text = pa.Array.from_buffers(
        _TEXT, len(whole), [None, pa.py_buffer((offsets - offsets[0]) * 2), pa.py_buffer(digits)]
    )
    return pc.if_else(pc.is_valid(column), text, pa.scalar(None, _TEXT))


UUID_PATTERN: Final = r"^(?:\{[0-9a-fA-F]{4}(?:-?[0-9a-fA-F]{4}){7}\}|[0-9a-fA-F]{4}(?:-?[0-9a-fA-F]{4}){7})$"
"""What Postgres takes for a uuid."""
UUID_KEY_PATTERN: Final = r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
"""The one spelling that Postgres gives back of it."""

_FORM: Final = b"stormproof.form"
_CAST: Final = b"stormproof.cast"
_AS_KEY: Final = b"stormproof.key"
_TYPE: Final = b"stormproof.type"
_EPOCH_US: Final = 946_684_800_000_000
"""Postgres counts time from the year 2000."""
_TIMESTAMPTZ: Final = 1184


class BinaryForm(StrEnum):
    """A binary form that is made here, since the encoder has none."""

    UUID = "uuid"
    """Text as 16 bytes."""
    JSON = "json"
    """Text as it is, nested values as JSON text."""
    JSONB = "jsonb"
    """The same behind a version byte."""
    INSTANTS = "timestamptz[]"
    """Arrays of timestamps with time zone: the encoder gives their values the type without one."""


def formed(name: str, form: BinaryForm) -> pa.Field:
    """A field of a wire schema whose values are sent in this form."""
    return pa.field(name, pa.large_binary(), metadata={_FORM: form.value.encode()})


def as_text(name: str, kind: pa.DataType, cast: str, *, is_key: bool) -> pa.Field:
    """A field whose text, or texts, the server casts to a type that has another binary form; a key only where the type
    writes it so.
    """
    return pa.field(name, kind, metadata={_CAST: cast.encode(), **({_AS_KEY: b""} if is_key else {})})


def of_type(field: pa.Field, kind: str) -> pa.Field:
    """The field with the name of its column's type, where that does not follow from the field's."""
    return field.with_metadata({_TYPE: kind.encode()})


def sent_type(field: pa.Field) -> str:
    """The type of a column that takes the field's wire form."""
    known = field.metadata or {}
    return (known.get(_FORM) or known.get(_TYPE) or (column_type(field.type) or "").encode()).decode()


def cast_of(field: pa.Field, value: sql.Composable) -> sql.Composable | None:
    """The cast of a value that was sent as text; None where it was not.

    A key with another text than the type's own is refused as text that the type does not take: it would be one with that.
    """
    known = field.metadata or {}
    if _CAST not in known:
        return None
    cast = sql.SQL("{}::{}").format(value, sql.SQL(known[_CAST].decode()))  # pyright: ignore[reportArgumentType]
    if _AS_KEY not in known:
        return cast
    refused = sql.SQL("({0} || ', as a key is written: ' || format('%s', {1}))::{2}").format(
        value,
        cast,
        sql.SQL(known[_CAST].decode()),  # pyright: ignore[reportArgumentType]
    )
    return sql.SQL("case when format('%s', {0}) = {1} then {0} else {2} end").format(cast, value, refused)


def to_wire(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as they are sent: cast to the types of the wire schema, or brought into the form that its fields name.

    Raises:
        ArrowInvalid: a value does not fit its type.
    """
    columns: list[pa.Array] = []
    for field in schema:
        column = rows.column(field.name)
        form = (field.metadata or {}).get(_FORM)
        columns.append(plain(column).cast(field.type) if form is None else _MAKE[BinaryForm(form.decode())](column))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _uuids(column: pa.Array) -> pa.Array:
    digits = pc.replace_substring_regex(plain(column).cast(pa.large_string()), "[{}-]", "")
    whole = pc.fill_null(digits, "0" * 32)
    if not pc.all(pc.equal(pc.binary_length(whole), 32)).as_py():
        raise pa.ArrowInvalid("a text is no uuid")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
    data = b"" if not len(whole) else bytes(memoryview(whole.buffers()[2])[offsets[0] : offsets[-1]])
    values = pa.Array.from_buffers(pa.binary(16), len(whole), [None, pa.py_buffer(bytes.fromhex(data.decode()))])
    return pc.if_else(pc.is_valid(column), values.cast(pa.large_binary()), pa.scalar(None, pa.large_binary()))


def _json(column: pa.Array) -> pa.Array:
    flat = plain(column)
    text = flat.cast(pa.large_string()) if is_string(flat.type) else json_text(column)
    return text.cast(pa.large_binary())


def _jsonb(column: pa.Array) -> pa.Array:
    version, nothing = pa.scalar(b"\x01", pa.large_binary()), pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(version, _json(column), nothing)


def _instants(column: pa.Array) -> pa.Array:
    """The wire form of arrays: dimensions, whether there are NULLs, the values' type; per dimension length and lower bound;
    then each value behind its length. All of it is in words of four bytes.
    """
    values, lengths, parents = column.flatten(), lengths_of(column), parents_of(column)
    there = pc.is_valid(values).to_numpy(zero_copy_only=False)
    numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False) - _EPOCH_US
    words = np.where(there, 3, 1)
    before = np.concatenate(([0], np.cumsum(words)))  # words of all values before this one
    first = np.concatenate(([0], np.cumsum(lengths)))  # number of each row's first value
    valid = pc.is_valid(column).to_numpy(zero_copy_only=False)
    sizes = np.where(valid, np.where(lengths > 0, 5 + before[first[1:]] - before[first[:-1]], 3), 0)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    out = np.zeros(starts[-1], ">i4")
    at, full = starts[:-1][valid], lengths[valid] > 0
    out[at] = full
    out[at + 2] = _TIMESTAMPTZ
    nulls = np.bincount(parents[~there], minlength=len(column))[valid] > 0
    out[at + 1] = nulls
    out[at[full] + 3] = lengths[valid][full]
    out[at[full] + 4] = 1
    places = starts[parents] + 5 + before[:-1] - before[first[parents]]
    out[places] = np.where(there, 8, -1)
    out[places[there] + 1] = (numbers >> 32)[there]
    out[places[there] + 2] = (numbers & 0xFFFFFFFF).astype(np.uint32).view(np.int32)[there]
    made = pa.Array.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(starts * 4), pa.py_buffer(out.tobytes())]
    )
    return pc.if_else(pc.is_valid(column), made, pa.scalar(None, pa.large_binary()))


_MAKE: Final[Mapping[BinaryForm, Callable[[pa.Array], pa.Array]]] = {
    BinaryForm.UUID: _uuids,
    BinaryForm.JSON: _json,
    BinaryForm.JSONB: _jsonb,
    BinaryForm.INSTANTS: _instants,
}


def is_uuid(kind: pa.DataType) -> bool:
    """Whether it is Arrow's uuid, or bytes of that length."""
    if isinstance(kind, pa.BaseExtensionType):
        return bool(kind.extension_name == "arrow.uuid")
    return bool(pa.types.is_fixed_size_binary(kind) and kind.byte_width == 16)


def column_type(kind: pa.DataType) -> str | None:
    """The type of a new column for Arrow's type; None where there is none.

    An array of plain values is a Postgres array. A struct, a map, and an array of such or of arrays is jsonb.
    """
    flat = _flat_type(kind)
    if flat is not None:
        return flat
    if is_list(kind):
        element = _flat_type(kind.value_type)
        if element is not None and element != "uuid":
            return f"{element}[]"
    return "jsonb" if pa.types.is_nested(kind) and _is_json(kind) else None


_SCALARS: Final[tuple[tuple[Callable[[pa.DataType], bool], str], ...]] = (
    (is_string, "text"),
    (pa.types.is_int8, "smallint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_date32, "date"),
    (is_uuid, "uuid"),
    (is_bytes, "bytea"),
    (pa.types.is_time32, "time without time zone"),
)


def _flat_type(kind: pa.DataType) -> str | None:
    if pa.types.is_dictionary(kind):
        return "text" if is_string(kind.value_type) else None
    for matches, name in _SCALARS:
        if matches(kind):
            return name
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return "timestamp without time zone" if kind.tz is None else "timestamp with time zone"
    if pa.types.is_time64(kind) and kind.unit == "us":
        return "time without time zone"
    if pa.types.is_duration(kind) and kind.unit == "us":
        return "interval"
    if pa.types.is_decimal128(kind):
        return f"numeric({kind.precision},{kind.scale})"
    return None


def _is_json(kind: pa.DataType) -> bool:
    """Whether JSON can hold the type: all that columns can hold, but for intervals, uuids, and keys that are nested."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if is_list(kind):
        return _is_json(kind.value_type)
    if pa.types.is_map(kind):
        return not pa.types.is_nested(kind.key_type) and _is_json(kind.key_type) and _is_json(kind.item_type)
    return _flat_type(kind) not in (None, "interval", "uuid")
