"""How a MERGE folds a column: the expression over the table's value (`t`) and the added value (`s`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from stormproof.core.folds import AnyFold, ByOrder, Fold, SetTruncated, SetUnion
from stormproof.sinks.delta.newer_wins import wins_by_order

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
