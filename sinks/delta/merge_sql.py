"""A MERGE by key in SQL, DataFusion's and Spark's alike: `t` is the table, `s` the rows that are added.

A question about a merged row is a SELECT that joins the same two, where a row of the table has `HELD` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from stormproof.core.folds import AnyFold, Fold
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta.checks import TableRule
from stormproof.sinks.delta.newer_wins import later_condition

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


def ranges(input_: SinkInput, quoted: Quoted) -> list[TableRule]:
    """What is asked of the sums in `merged_columns`."""
    sums = [name for name, fold in input_.folds.items() if fold is Fold.SUM]
    return [TableRule(name, quoted(FITS + name), f"the range of its column {name!r}") for name in sums]
