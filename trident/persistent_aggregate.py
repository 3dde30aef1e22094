"""The parts of `persistent_aggregate`: the key of a result for all tuples, and how a state merges users' combiners."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.errors import TopologyError
from stormproof.core.graph.aggregators import (
    Aggregator,
    CombinerAggregator,
    ReducerAggregator,
    UserAggregate,
    UserAggregation,
)
from stormproof.core.graph.checks import checked_name
from stormproof.core.graph.components import Aggregate
from stormproof.core.graph.topology import TopologyGraph
from stormproof.trident.aggregate import OneResult, SeveralResults

if TYPE_CHECKING:
    from stormproof.trident.state.protocol import Merge, StateFactory

_AnyResult = TypeVar("_AnyResult", bound=OneResult | SeveralResults)

EVERYTHING: Final = "everything"
"""The key of an aggregate that has none."""


def everything(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """The rows with the same key for all, as an operation on record batches gives them."""
    columns = [*rows.columns, pa.repeat(True, rows.num_rows)]
    made = pa.RecordBatch.from_arrays(columns, names=[*rows.schema.names, EVERYTHING])
    return made, np.arange(rows.num_rows)


def over(aggregate: _AnyResult, fields: tuple[str, ...]) -> _AnyResult | UserAggregate:
    """The aggregate; where it names no fields, over these."""
    if isinstance(aggregate, UserAggregate):
        return aggregate if aggregate.fields else replace(aggregate, fields=fields)
    if isinstance(aggregate, (CombinerAggregator, ReducerAggregator, Aggregator)):
        return aggregate.over(*fields)
    return aggregate


def with_key(schema: pa.Schema) -> pa.Schema:
    """The fields, and behind them the key `everything`."""
    return pa.schema([*schema, pa.field(EVERYTHING, pa.bool_())])


def own_merges(topology: TopologyGraph, aggregate: str) -> dict[str, Merge]:
    """For each result of a user's combiner in a persistent aggregate, how a state merges it into what it holds."""
    from stormproof.trident.state.merge import RowMerge

    (component,) = (c for c in topology.components if c.name == aggregate)
    assert isinstance(component, Aggregate)
    return {a.output: RowMerge(a.code.combine) for a in component.aggregations if isinstance(a, UserAggregation)}


def require_state(component: str, state: StateFactory | None, name: str | None) -> None:
    """Check the state of a persistent aggregate and its name.

    Raises:
        TopologyError: it is no state, its name cannot be one, or there is a name without a state.
    """
    where = f"persistent_aggregate after {component!r}"
    if state is not None:
        from stormproof.trident.state.checks import require_factory

        require_factory(state, where, component)
        if name is not None:
            checked_name(name, f"{where}: state_name:")
    elif name is not None:
        raise TopologyError(
            f"{where}: state_name={name!r} names no state; pass state=..., such as PostgresMap('totals'), or leave it out",
            component=component,
        )
