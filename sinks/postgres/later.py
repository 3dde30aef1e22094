"""When ON CONFLICT lets a row replace the one that the table holds for its key: a condition in SQL."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from psycopg import sql

from stormproof.core.sink import SinkInput
from stormproof.sinks.latest import compared_columns

_NUMBER: Final = (sql.SQL("({0} <> 'NaN')"), sql.SQL("nullif({0}, 'NaN')"))
"""Postgres takes NaN for the greatest number; here it is less than any."""

_TEXT: Final = (sql.SQL("convert_to({0}::text, 'UTF8')"),)
"""By bytes, whatever the column's collation."""

_CASE: Final = sql.SQL(
    "when {added} > {held} or ({held} is null and {added} is not null) then true "
    "when {held} > {added} or ({added} is null and {held} is not null) then false"
)


def later_condition(input_: SinkInput) -> sql.Composable | None:
    """Whether the row `excluded` is later than the row `held`, in the order of `sinks.latest`; None: always."""
    if not input_.order_by:
        return None
    cases = [
        _CASE.format(held=held, added=added)
        for name in compared_columns(input_)
        for held, added in zip(_terms(input_, name, "held"), _terms(input_, name, "excluded"), strict=True)
    ]
    return sql.SQL("case {} else false end").format(sql.SQL(" ").join(cases))


def latest_first(input_: SinkInput) -> sql.Composable:
    """The sort keys that put the last row of a key first."""
    terms = [term for name in compared_columns(input_) for term in _terms(input_, name, None)]
    return sql.SQL(", ").join(sql.SQL("{} desc nulls last").format(term) for term in terms)


def _terms(input_: SinkInput, name: str, side: str | None) -> list[sql.Composed]:
    kind = input_.schema.field(name).type
    column = sql.Identifier(name) if side is None else sql.Identifier(side, name)
    forms: tuple[sql.SQL, ...]
    if pa.types.is_floating(kind):
        forms = _NUMBER
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        forms = _TEXT
    else:
        forms = (sql.SQL("{0}"),)
    return [form.format(column) for form in forms]
