"""How an upsert folds a column: the assignment over the table's value (`held`) and the added value (`excluded`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from psycopg import sql

from stormproof.core.folds import AnyFold, ByOrder, Fold, SetTruncated, SetUnion
from stormproof.sinks.leaves import is_string
from stormproof.sinks.postgres.newer_wins import wins_by_order

_SUM: Final = sql.SQL("coalesce(held.{0} + excluded.{0}, held.{0}, excluded.{0})")

_BETTER: Final[Mapping[Fold, sql.SQL]] = {
    Fold.MIN: sql.SQL("least(held.{0}, excluded.{0})"),
    Fold.MAX: sql.SQL("greatest(held.{0}, excluded.{0})"),
}
"""Both ignore NULLs."""

_BETTER_FLOAT: Final[Mapping[Fold, sql.SQL]] = {
    Fold.MIN: _BETTER[Fold.MIN],
    Fold.MAX: sql.SQL(
        "coalesce(greatest(nullif(held.{0}, 'NaN'), nullif(excluded.{0}, 'NaN')), held.{0}, excluded.{0})"
    ),
}
"""Postgres takes NaN for the greatest number. Here it is never the least or the greatest, unless there is no number."""

_BETTER_TEXT: Final[Mapping[Fold, sql.SQL]] = {
    Fold.MIN: sql.SQL(
        "case when held.{0} is null or convert_to(excluded.{0}, 'UTF8') < convert_to(held.{0}, 'UTF8') "
        "then excluded.{0} else held.{0} end"
    ),
    Fold.MAX: sql.SQL(
        "case when held.{0} is null or convert_to(excluded.{0}, 'UTF8') > convert_to(held.{0}, 'UTF8') "
        "then excluded.{0} else held.{0} end"
    ),
}
"""By bytes, as batches are aggregated. least() would compare by the column's collation, which differs between databases."""


def fold_assignment(name: str, schema: pa.Schema, fold: AnyFold) -> sql.Composed:
    """`column = new value`. A NULL adds nothing and never wins; NaN wins only over NULL."""
    kind = schema.field(name).type
    if isinstance(fold, ByOrder):
        wins = wins_by_order(schema, fold.compared, fold.end)
        return sql.SQL("{0} = case when {1} then excluded.{0} else held.{0} end").format(sql.Identifier(name), wins)
    if isinstance(fold, (SetUnion, SetTruncated)):
        return _set_assignment(name, schema, fold)
    if fold is Fold.SUM:
        value = _SUM
    elif pa.types.is_floating(kind):
        value = _BETTER_FLOAT[fold]
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        value = _BETTER_TEXT[fold]
    else:
        value = _BETTER[fold]
    column = sql.Identifier(name)
    return sql.SQL("{} = {}").format(column, value.format(column))


_UNION: Final = sql.SQL("select distinct v{0} as v from unnest(held.{1} || excluded.{1}) as u (v) where v is not null")
"""The values of both sets; text is compared by its bytes, whatever the column's collation."""


def _set_assignment(name: str, schema: pa.Schema, fold: SetUnion | SetTruncated) -> sql.Composed:
    of = fold.of if isinstance(fold, SetTruncated) else name
    text = is_string(schema.field(of).type.value_type)
    union = _UNION.format(sql.SQL(' collate "C"' if text else ""), sql.Identifier(of))
    if isinstance(fold, SetUnion):
        statement = "{} = array(select v from ({}) as d order by v limit {})"
        return sql.SQL(statement).format(sql.Identifier(name), union, sql.Literal(fold.at_most))
    statement = (
        "{0} = coalesce(held.{0}, false) or coalesce(excluded.{0}, false) or (select count(*) from ({1}) as d) > {2}"
    )
    return sql.SQL(statement).format(sql.Identifier(name), union, sql.Literal(fold.at_most))
