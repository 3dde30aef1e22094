"""When a MERGE lets a row replace the one that the table holds for its key: a condition in SQL."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from stormproof.core.sink import SinkInput
from stormproof.sinks.latest import compared_columns


def later_condition(input_: SinkInput, quoted: Callable[[str], str]) -> str | None:
    """Whether the added row (`s`) is later than the held one (`t`), in the order of `sinks.latest`; None: always.

    The SQL is DataFusion's and Spark's alike; `quoted` quotes a name as one of them does. It is one flat CASE, since parsers
    bound how deeply expressions are nested.
    """
    if not input_.order_by:
        return None
    cases: list[str] = []
    for name in compared_columns(input_):
        for held, added in zip(_terms("t", name, input_, quoted), _terms("s", name, input_, quoted), strict=True):
            cases.append(f"WHEN {added} > {held} OR ({held} IS NULL AND {added} IS NOT NULL) THEN true")
            cases.append(f"WHEN {held} > {added} OR ({added} IS NULL AND {held} IS NOT NULL) THEN false")
    return f"CASE {' '.join(cases)} ELSE false END"


def _terms(side: str, name: str, input_: SinkInput, quoted: Callable[[str], str]) -> list[str]:
    """What is compared of a column. DataFusion orders NaN by its sign and -0.0 before 0.0: both are taken out."""
    column = f"{side}.{quoted(name)}"
    if not pa.types.is_floating(input_.schema.field(name).type):
        return [column]
    number = f"CASE WHEN isnan({column}) THEN NULL WHEN abs({column}) = 0 THEN abs({column}) ELSE {column} END"
    return [f"(CASE WHEN isnan({column}) THEN 0 WHEN {column} IS NOT NULL THEN 1 END)", f"({number})"]
