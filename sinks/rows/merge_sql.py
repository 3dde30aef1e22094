"""A merge by key in SQL, in the dialects of DataFusion, Spark and Postgres: `held` is the table's row, `added` the new one.

An older row never replaces a newer one (`later_condition`), and a column with a fold is folded (`folded`). A question about
a merged row is a SELECT that joins the same two, where a row of the table has `HELD` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.contract.fold import AnyFold, ByOrder, End, Fold, SetTruncated, SetUnion
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.rows.by_key import compared_columns
from stormproof.sinks.rows.limits import is_string

Quoted: TypeAlias = Callable[[str], str]
"""Quotes a name as the engine does that reads the SQL."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine writes what engines write in different ways. The texts are filled in by `str.format`.

    `floats` and `texts` are what is compared of such a column, the weightiest first: text is compared by its bytes, and NaN
    is behind all numbers in either direction. `union` are the values of two sets, each once; `least` the first of them, in
    order; `size` their number. `total` adds two values: one that does not fit its type is an error, or NULL if `tried`.
    """

    quoted: Quoted
    floats: tuple[str, ...]
    is_nan: str
    union: str
    least: str
    size: str
    total: Callable[[str, str, pa.DataType, bool], str]
    texts: tuple[str, ...] = ("{0}",)
    bytewise: str = ""
    """How texts in a set are compared by their bytes."""
    held: str = "t"
    added: str = "s"

    def both(self, name: str) -> tuple[str, str]:
        """A column of the table's row, and of the one that is added."""
        return f"{self.held}.{self.quoted(name)}", f"{self.added}.{self.quoted(name)}"

    def forms(self, kind: pa.DataType) -> tuple[str, ...]:
        """What is compared of a column."""
        if pa.types.is_floating(kind):
            return self.floats
        return self.texts if is_string(kind) else ("{0}",)


def quoted(name: str) -> str:
    """A column's name, quoted so that DataFusion and Postgres take it letter by letter."""
    return '"' + name.replace('"', '""') + '"'


def spark_quoted(name: str) -> str:
    """A column's name, quoted for Spark."""
    return "`" + name.replace("`", "``") + "`"


_PLAIN_TOTAL: Final = "COALESCE({0} + {1}, {0}, {1})"
_INTEGERS: Final = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}
_WIDE_DIGITS: Final = 76


def _total_of_datafusion(held: str, added: str, kind: pa.DataType, tried: bool) -> str:
    """By way of wider decimals: DataFusion's sum of integers wraps, and a sum of decimals is stored even with a digit more
    than its type has.
    """
    narrow = "TRY_CAST" if tried else "CAST"
    if pa.types.is_decimal(kind):
        wide = f"DECIMAL({_WIDE_DIGITS}, {kind.scale})"
        total = f"COALESCE(CAST({held} AS {wide}) + CAST({added} AS {wide}), {held}, {added})"
        return f"{narrow}({total} AS DECIMAL({kind.precision}, {kind.scale}))"
    if not pa.types.is_integer(kind):
        return _PLAIN_TOTAL.format(held, added)
    wide = _PLAIN_TOTAL.format(*(f"CAST({value} AS DECIMAL(38, 0))" for value in (held, added)))
    return f"{narrow}({wide} AS {_INTEGERS[kind.bit_width]})"


def _total_of_spark(held: str, added: str, kind: pa.DataType, tried: bool) -> str:
    """With ANSI arithmetic."""
    total = f"try_add({held}, {added})" if tried else f"{held} + {added}"
    if pa.types.is_decimal(kind):
        total = f"{'TRY_CAST' if tried else 'CAST'}({total} AS DECIMAL({kind.precision}, {kind.scale}))"
    return f"CASE WHEN {held} IS NULL THEN {added} WHEN {added} IS NULL THEN {held} ELSE {total} END"


_NUMBERS: Final = (
    "(CASE WHEN isnan({0}) THEN 0 WHEN {0} IS NOT NULL THEN 1 END)",
    "(CASE WHEN isnan({0}) THEN NULL WHEN abs({0}) = 0 THEN abs({0}) ELSE {0} END)",
)
"""DataFusion orders NaN by its sign and -0.0 before 0.0: both are taken out."""

DATAFUSION: Final = Dialect(
    quoted,
    floats=_NUMBERS,
    is_nan="isnan({0})",
    union="array_distinct(array_concat(COALESCE({0}, {1}), COALESCE({1}, {0})))",
    least="array_slice(array_sort({0}), 1, {1})",
    size="COALESCE(array_length({0}), 0)",
    total=_total_of_datafusion,
)
SPARK: Final = Dialect(
    spark_quoted,
    floats=_NUMBERS,
    is_nan="isnan({0})",
    union="array_union(COALESCE({0}, {1}), COALESCE({1}, {0}))",
    least="slice(array_sort({0}), 1, {1})",
    size="COALESCE(cardinality({0}), 0)",
    total=_total_of_spark,
)
POSTGRES: Final = Dialect(
    quoted,
    floats=("({0} <> 'NaN')", "nullif({0}, 'NaN')"),
    is_nan="{0} = 'NaN'",
    union="(select distinct v{2} as v from unnest({0} || {1}) as u (v) where v is not null) as d",
    least="array(select v from {0} order by v limit {1})",
    size="(select count(*) from {0})",
    total=lambda held, added, *_: _PLAIN_TOTAL.format(held, added),
    texts=("convert_to({0}::text, 'UTF8')",),  # whatever the column's collation, by which least() compares
    bytewise=' collate "C"',
    held="held",
    added="excluded",
)


def later_condition(input_: SinkInput, dialect: Dialect, undecided: Sequence[str] = ()) -> str | None:
    """Whether the added row is later than the held one, in the order of `sinks.rows.by_key`; None: always."""
    if not input_.order_by:
        return None
    return _wins_by_order(input_.schema, compared_columns(input_, undecided), End.LAST, dialect)


def _wins_by_order(schema: pa.Schema, compared: Sequence[str], end: End, dialect: Dialect) -> str:
    """Whether the added row is further at this end than the held one; see `ByOrder`.

    It is one flat CASE, since parsers bound how deeply expressions are nested.
    """
    cases: list[str] = []
    for name in compared:
        for form in dialect.forms(schema.field(name).type):
            held, added = map(form.format, dialect.both(name))
            least = end is End.FIRST and form is not dialect.floats[0]  # a number comes before NaN at either end
            one, other = (held, added) if least else (added, held)
            cases.append(f"WHEN {one} > {other} OR ({held} IS NULL AND {added} IS NOT NULL) THEN true")
            cases.append(f"WHEN {other} > {one} OR ({added} IS NULL AND {held} IS NOT NULL) THEN false")
    return f"CASE {' '.join(cases)} ELSE false END"


_WINS: Final[Mapping[Fold, str]] = {Fold.MIN: "<", Fold.MAX: ">"}


def folded(name: str, schema: pa.Schema, fold: AnyFold, dialect: Dialect, *, tried: bool = False) -> str:
    """The column's new value. A NULL adds nothing and never wins; NaN wins only over NULL.

    A sum that does not fit its type is an error; `tried`, NULL.
    """
    kind, (held, added) = schema.field(name).type, dialect.both(name)
    if isinstance(fold, ByOrder):
        wins = _wins_by_order(schema, fold.compared, fold.end, dialect)
        return f"CASE WHEN {wins} THEN {added} ELSE {held} END"
    if isinstance(fold, (SetUnion, SetTruncated)):
        of = fold.of if isinstance(fold, SetTruncated) else name
        bytewise = dialect.bytewise if is_string(schema.field(of).type.value_type) else ""
        union = dialect.union.format(*dialect.both(of), bytewise)
        if isinstance(fold, SetUnion):
            return dialect.least.format(union, fold.at_most)
        more = f"{dialect.size.format(union)} > {fold.at_most}"
        return f"(COALESCE({held}, false) OR COALESCE({added}, false) OR {more})"
    return dialect.total(held, added, kind, tried) if fold is Fold.SUM else _better(held, added, kind, fold, dialect)


def _better(held: str, added: str, kind: pa.DataType, fold: Fold, dialect: Dialect) -> str:
    """NaN is never compared: DataFusion orders it by its sign bit, and Postgres takes it for the greatest number."""
    cases = [f"WHEN {added} IS NULL THEN {held}", f"WHEN {held} IS NULL THEN {added}"]
    form = "{0}"
    if pa.types.is_floating(kind):
        cases += [f"WHEN {dialect.is_nan.format(one)} THEN {other}" for one, other in ((held, added), (added, held))]
    else:
        (form,) = dialect.forms(kind)
    wins = f"{form.format(added)} {_WINS[fold]} {form.format(held)}"
    return f"CASE {' '.join(cases)} WHEN {wins} THEN {added} ELSE {held} END"


HELD: Final = "_stormproof_held"
"""Beside a row of the table that has the same key: true."""
FITS: Final = "_stormproof_fits_"
"""How the column beside a sum begins that says whether it fits its type."""


def same_key(input_: SinkInput, dialect: Dialect) -> str:
    """Whether both rows have one key."""
    return " AND ".join(" = ".join(dialect.both(key)) for key in input_.keys)


def written_where_held(input_: SinkInput) -> list[str]:
    """The columns that are folded or replaced in a row that the table holds; of none, it is left as it is."""
    return [name for name in input_.schema.names if name not in (*input_.keys, *input_.keep)]


def assignments(input_: SinkInput, dialect: Dialect) -> dict[str, str]:
    """These columns, quoted, each with its new value."""
    schema, folds = input_.schema, input_.folds
    return {
        dialect.quoted(name): folded(name, schema, folds[name], dialect) if name in folds else dialect.both(name)[1]
        for name in written_where_held(input_)
    }


def is_written(input_: SinkInput, dialect: Dialect) -> str | None:
    """Whether the row that is added changes anything in the table; None: it always does."""
    is_new = f"{dialect.held}.{HELD} IS NULL"
    if not written_where_held(input_):
        return is_new
    later = later_condition(input_, dialect)
    return None if later is None else f"{is_new} OR {later}"


def merged_columns(
    names: Iterable[str], input_: SinkInput, dialect: Dialect, default: Callable[[str], str] = lambda _: "NULL"
) -> list[str]:
    """The table's columns of these names as the MERGE leaves them, with their names.

    A sum that does not fit is NULL, and the column beside it, `FITS`, says so. `default` is what a new row has in a column
    that is not added.
    """
    columns: list[str] = []
    for name in names:
        held, added = dialect.both(name)
        fold = input_.folds.get(name)
        if name not in input_.schema.names:
            value = _if_held(dialect, held, default(name))
        elif fold is not None:
            value = _if_held(dialect, folded(name, input_.schema, fold, dialect, tried=True), added)
        else:
            value = _if_held(dialect, held, added) if name in input_.keep else added
        columns.append(f"{value} AS {dialect.quoted(name)}")
        if fold is Fold.SUM:
            columns.append(f"({value} IS NOT NULL OR {added} IS NULL) AS {dialect.quoted(FITS + name)}")
    return columns


def _if_held(dialect: Dialect, then: str, otherwise: str) -> str:
    return f"CASE WHEN {dialect.held}.{HELD} THEN {then} ELSE {otherwise} END"
