"""An older row never replaces a newer one: the condition in SQL under which a MERGE lets a row replace the held one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from stormproof.core.folds import End
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
