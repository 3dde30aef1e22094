"""The columns of a table: which take text of a stream by the server's own cast, what text, and which as keys; which give
values back as they came, and what the evidence of a txid says of its rows' content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa
from psycopg import sql

from stormproof.sinks.content import Content, kind_of
from stormproof.sinks.totals import Totals


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
