"""A MERGE by key in SQL, DataFusion's and Spark's alike: `t` is the table, `s` the rows that are added.

An older row never replaces a newer one (`later_condition`), and a column with a fold is folded (`fold_expression`). A
question about a merged row is a SELECT that joins the same two, where a row of the table has `HELD` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.folds import AnyFold, ByOrder, End, Fold, SetTruncated, SetUnion
from stormproof.core.sink import SinkInput
from stormproof.sinks.latest import compared_columns


def later_condition(input_: SinkInput, quoted: Callable[[str], str]) -> str | None:
    """Whether the added row (`s`) is later than the held one (`t`), in the order of `sinks.latest`; None: always."""
    if not input_.order_by:
        return None
    return wins_by_order(input_.schema, compared_columns(input_), End.LAST, quoted)


def wins_by_order(schema: pa.Schema, compared: Sequence[str], end: End, quoted: Callable[[str], str]) -> str:
    """Whether the added row (`s`) is further at this end than the held one (`t`); see `ByOrder`.

    The SQL is DataFusion's and Spark's alike; `quoted` quotes a name as one of them does. It is one flat CASE, since parsers
    bound how deeply expressions are nested.
    """
    cases: list[str] = []
    for name in compared:
        for form in _forms(schema.field(name).type):
            held, added = (form.format(f"{side}.{quoted(name)}") for side in ("t", "s"))
            least = end is End.FIRST and form is not _NUMBER[0]  # a number comes before NaN at either end
            one, other = (held, added) if least else (added, held)
            cases.append(f"WHEN {one} > {other} OR ({held} IS NULL AND {added} IS NOT NULL) THEN true")
            cases.append(f"WHEN {other} > {one} OR ({added} IS NULL AND {held} IS NOT NULL) THEN false")
    return f"CASE {' '.join(cases)} ELSE false END"


_NUMBER: Final = (
    "(CASE WHEN isnan({0}) THEN 0 WHEN {0} IS NOT NULL THEN 1 END)",
    "(CASE WHEN isnan({0}) THEN NULL WHEN abs({0}) = 0 THEN abs({0}) ELSE {0} END)",
)
"""DataFusion orders NaN by its sign and -0.0 before 0.0: both are taken out."""


def _forms(kind: pa.DataType) -> tuple[str, ...]:
    """What is compared of a column."""
    return _NUMBER if pa.types.is_floating(kind) else ("{0}",)


_INTEGERS: Final = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}
_WIDE_DIGITS: Final = 76
_WINS: Final[Mapping[Fold, str]] = {Fold.MIN: "<", Fold.MAX: ">"}


def quoted(name: str) -> str:
    """A column's name, quoted so that DataFusion takes it letter by letter."""
    return '"' + name.replace('"', '""') + '"'


def fold_expression(name: str, schema: pa.Schema, fold: AnyFold, narrow: str = "CAST") -> str:
    """The column's new value. A NULL adds nothing and never wins; NaN wins only over NULL.

    `narrow` brings a sum back to its type: with TRY_CAST one that does not fit is NULL, and no error.
    """
    kind = schema.field(name).type
    held, added = f"t.{quoted(name)}", f"s.{quoted(name)}"
    if isinstance(fold, ByOrder):
        return _by_order(held, added, wins_by_order(schema, fold.compared, fold.end, quoted))
    if isinstance(fold, (SetUnion, SetTruncated)):
        of = quoted(fold.of if isinstance(fold, SetTruncated) else name)
        union = f"array_distinct(array_concat(COALESCE(t.{of}, s.{of}), COALESCE(s.{of}, t.{of})))"
        if isinstance(fold, SetUnion):
            return f"array_slice(array_sort({union}), 1, {fold.at_most})"
        return _truncated(held, added, f"COALESCE(array_length({union}), 0)", fold)
    return _sum(held, added, kind, narrow) if fold is Fold.SUM else _better(held, added, kind, _WINS[fold])


def _sum(held: str, added: str, kind: pa.DataType, narrow: str) -> str:
    """By way of wider decimals: DataFusion's sum of integers wraps, and a sum of decimals is stored even with a digit more
    than its type has. A cast that does not fit is an error.
    """
    if pa.types.is_decimal(kind):
        wide = f"DECIMAL({_WIDE_DIGITS}, {kind.scale})"
        total = f"COALESCE(CAST({held} AS {wide}) + CAST({added} AS {wide}), {held}, {added})"
        return f"{narrow}({total} AS DECIMAL({kind.precision}, {kind.scale}))"
    if not pa.types.is_integer(kind):
        return f"COALESCE({held} + {added}, {held}, {added})"
    held, added = f"CAST({held} AS DECIMAL(38, 0))", f"CAST({added} AS DECIMAL(38, 0))"
    return f"{narrow}(COALESCE({held} + {added}, {held}, {added}) AS {_INTEGERS[kind.bit_width]})"


def _better(held: str, added: str, kind: pa.DataType, wins: str) -> str:
    """Text is compared by its bytes. DataFusion orders NaN by its sign bit, so NaN is never compared."""
    cases = [f"WHEN {added} IS NULL THEN {held}", f"WHEN {held} IS NULL THEN {added}"]
    if pa.types.is_floating(kind):
        cases += [f"WHEN isnan({held}) THEN {added}", f"WHEN isnan({added}) THEN {held}"]
    return f"CASE {' '.join(cases)} WHEN {added} {wins} {held} THEN {added} ELSE {held} END"


def _by_order(held: str, added: str, wins: str) -> str:
    return f"CASE WHEN {wins} THEN {added} ELSE {held} END"


def _truncated(held: str, added: str, values: str, fold: SetTruncated) -> str:
    return f"(COALESCE({held}, false) OR COALESCE({added}, false) OR {values} > {fold.at_most})"


def spark_quoted(name: str) -> str:
    """A column's name, quoted for Spark."""
    return "`" + name.replace("`", "``") + "`"


def spark_fold_expression(name: str, schema: pa.Schema, fold: AnyFold, *, tried: bool = False) -> str:
    """The same in Spark's SQL, with ANSI arithmetic: a sum that does not fit its type is an error; `tried`, NULL."""
    kind = schema.field(name).type
    held, added = f"t.{spark_quoted(name)}", f"s.{spark_quoted(name)}"
    if isinstance(fold, ByOrder):
        return _by_order(held, added, wins_by_order(schema, fold.compared, fold.end, spark_quoted))
    if isinstance(fold, (SetUnion, SetTruncated)):
        of = spark_quoted(fold.of if isinstance(fold, SetTruncated) else name)
        union = f"array_union(COALESCE(t.{of}, s.{of}), COALESCE(s.{of}, t.{of}))"
        if isinstance(fold, SetUnion):
            return f"slice(array_sort({union}), 1, {fold.at_most})"
        return _truncated(held, added, f"COALESCE(cardinality({union}), 0)", fold)
    if fold is Fold.SUM:
        total = f"try_add({held}, {added})" if tried else f"{held} + {added}"
        if pa.types.is_decimal(kind):
            total = f"{'TRY_CAST' if tried else 'CAST'}({total} AS DECIMAL({kind.precision}, {kind.scale}))"
        return f"CASE WHEN {held} IS NULL THEN {added} WHEN {added} IS NULL THEN {held} ELSE {total} END"
    return _better(held, added, kind, _WINS[fold])


Quoted: TypeAlias = Callable[[str], str]
"""Quotes a name as the engine does that reads the SQL."""

HELD: Final = "_stormproof_held"
"""Beside a row of the table that has the same key: true."""
FITS: Final = "_stormproof_fits_"
"""How the column beside a sum begins that says whether it fits its type."""


def same_key(input_: SinkInput, quoted: Quoted) -> str:
    """Whether both rows have one key."""
    return " AND ".join(f"t.{quoted(key)} = s.{quoted(key)}" for key in input_.keys)


def written_where_held(input_: SinkInput) -> list[str]:
    """The columns that are folded or replaced in a row that the table holds; of none, it is left as it is."""
    return [name for name in input_.schema.names if name not in (*input_.keys, *input_.keep)]


def is_written(input_: SinkInput, quoted: Quoted) -> str | None:
    """Whether the row that is added changes anything in the table; None: it always does."""
    if not written_where_held(input_):
        return f"t.{HELD} IS NULL"
    later = later_condition(input_, quoted)
    return None if later is None else f"t.{HELD} IS NULL OR {later}"


def merged_columns(
    names: Iterable[str],
    input_: SinkInput,
    quoted: Quoted,
    folded: Callable[[str, AnyFold], str],
    default: Callable[[str], str],
) -> list[str]:
    """The table's columns of these names as the MERGE leaves them, with their names.

    `folded` is a column's fold of both rows: NULL where a sum does not fit, and the column beside it, `FITS`, says so.
    `default` is what a new row has in a column that is not added.
    """
    columns: list[str] = []
    for name in names:
        added, held = f"s.{quoted(name)}", f"t.{quoted(name)}"
        fold = input_.folds.get(name)
        if name not in input_.schema.names:
            value = _if_held(held, default(name))
        elif fold is not None:
            value = _if_held(folded(name, fold), added)
        else:
            value = _if_held(held, added) if name in input_.keep else added
        columns.append(f"{value} AS {quoted(name)}")
        if fold is Fold.SUM:
            columns.append(f"({value} IS NOT NULL OR {added} IS NULL) AS {quoted(FITS + name)}")
    return columns


def _if_held(then: str, otherwise: str) -> str:
    return f"CASE WHEN t.{HELD} THEN {then} ELSE {otherwise} END"
