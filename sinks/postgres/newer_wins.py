"""An older row never replaces a newer one: the condition in SQL under which ON CONFLICT replaces the held row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from psycopg import sql

from stormproof.core.folds import End
from stormproof.core.sink import SinkInput
from stormproof.sinks.latest import compared_columns

_NUMBER: Final = (sql.SQL("({0} <> 'NaN')"), sql.SQL("nullif({0}, 'NaN')"))
"""Postgres takes NaN for the greatest number; here it is behind all of them, in either direction."""

_TEXT: Final = (sql.SQL("convert_to({0}::text, 'UTF8')"),)
"""By bytes, whatever the column's collation."""

_PLAIN: Final = (sql.SQL("{0}"),)

_CASE: Final = sql.SQL(
    "when {one} > {other} or ({held} is null and {added} is not null) then true "
    "when {other} > {one} or ({added} is null and {held} is not null) then false"
)


def later_condition(input_: SinkInput, undecided: Sequence[str] = ()) -> sql.Composable | None:
    """Whether the row `excluded` is later than the row `held`, in the order of `sinks.latest`; None: always."""
    if not input_.order_by:
        return None
    return wins_by_order(input_.schema, compared_columns(input_, undecided), End.LAST)


def wins_by_order(schema: pa.Schema, compared: Sequence[str], end: End) -> sql.Composable:
    """Whether the row `excluded` is further at this end than the row `held`; see `ByOrder`."""
    cases: list[sql.Composed] = []
    for name in compared:
        for form in _forms(schema.field(name).type):
            held, added = (form.format(sql.Identifier(side, name)) for side in ("held", "excluded"))
            least = end is End.FIRST and form is not _NUMBER[0]  # a number comes before NaN at either end
            one, other = (held, added) if least else (added, held)
            cases.append(_CASE.format(one=one, other=other, held=held, added=added))
    return sql.SQL("case {} else false end").format(sql.SQL(" ").join(cases))


def _forms(kind: pa.DataType) -> tuple[sql.SQL, ...]:
    """What is compared of a column."""
    if pa.types.is_floating(kind):
        return _NUMBER
    return _TEXT if pa.types.is_string(kind) or pa.types.is_large_string(kind) else _PLAIN
