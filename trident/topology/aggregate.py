"""Aggregates for groups: the ready ones, the columns of users' own ones, and the parts of `persistent_aggregate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arguments import instead_of, require_whole, shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.fold import ByOrder, End, SetTruncated, SetUnion
from stormproof.core.graph.aggregation import (
    Aggregation,
    AggregationKind,
    Aggregator,
    AnyAggregation,
    CombinerAggregator,
    ReducerAggregator,
    UserAggregate,
    UserAggregation,
    UserKind,
)
from stormproof.core.graph.checks import checked_name, schema_for
from stormproof.core.graph.components import Aggregate
from stormproof.core.graph.topology import TopologyGraph

if TYPE_CHECKING:
    from stormproof.trident.state.protocol import Merge, StateFactory


@dataclass(frozen=True, slots=True)
class ReadyAggregate:
    """A ready aggregate without its result's name: the `count()` of `agg(n=count())`."""

    kind: AggregationKind
    field: str | None = None
    order_by: tuple[str, ...] = ()
    at_most: int | None = None

    def named(self, output: str) -> Aggregation:
        """The aggregate with its result's name."""
        compared = tuple(dict.fromkeys((*self.order_by, str(self.field)))) if self.order_by else ()
        return Aggregation(output, self.kind, self.field, compared=compared, at_most=self.at_most)


OneResult: TypeAlias = ReadyAggregate | CombinerAggregator | ReducerAggregator | UserAggregate
"""An aggregate with one column, which its keyword names."""

SeveralResults: TypeAlias = Aggregator | UserAggregate
"""An aggregate that names its columns itself, and gives any number of rows."""


def count() -> ReadyAggregate:
    """The number of a group's tuples, as a long."""
    return ReadyAggregate(AggregationKind.COUNT)


def sum_(field: str) -> ReadyAggregate:
    """The sum of a field over a group: a long of integers, a double of floats, a decimal(38,s) of decimals.

    NULLs add nothing; the sum of only NULLs is 0. A sum that does not fit ends the batch's job with an error that names the
    column; it never wraps.
    """
    return ReadyAggregate(AggregationKind.SUM, field)


def min_(field: str) -> ReadyAggregate:
    """The least value of a field, text by its bytes; NULL if all are NULL. NaN counts only if there is no number."""
    return ReadyAggregate(AggregationKind.MIN, field)


def max_(field: str) -> ReadyAggregate:
    """The greatest value of a field, text by its bytes; NULL if all are NULL. NaN counts only if there is no number."""
    return ReadyAggregate(AggregationKind.MAX, field)


def mean(field: str) -> ReadyAggregate:
    """The mean of a field as a double, from an exact sum for integers and decimals; NULL if all are NULL."""
    return ReadyAggregate(AggregationKind.MEAN, field)


def distinct_count(field: str) -> ReadyAggregate:
    """The exact number of different values of a field, without NULL. All different values of a group are kept in memory."""
    return ReadyAggregate(AggregationKind.DISTINCT, field)


def first(field: str, *, order_by: str | Sequence[str]) -> ReadyAggregate:
    """The value of a field in a group's first tuple, by the fields `order_by`, the weightiest first; it may be NULL.

    Of tuples that are equal in `order_by` it is the least value, text by its bytes. A tuple with NULL or NaN in `order_by`
    stands behind all others, so it is first only if there is no other; among equal ones so does a NULL or NaN value.

    Raises:
        TopologyError: `order_by` names no field.
    """
    return ReadyAggregate(AggregationKind.FIRST, field, _order("first", order_by))


def last(field: str, *, order_by: str | Sequence[str]) -> ReadyAggregate:
    """The value of a field in a group's last tuple, by the fields `order_by`, the weightiest first; it may be NULL.

    Of tuples that are equal in `order_by` it is the greatest value, text by its bytes. A tuple with NULL or NaN in
    `order_by` stands before all others, so it is last only if there is no other; among equal ones so does a NULL or NaN
    value.

    Raises:
        TopologyError: `order_by` names no field.
    """
    return ReadyAggregate(AggregationKind.LAST, field, _order("last", order_by))


def collect_set(field: str, *, at_most: int | None = None) -> ReadyAggregate:
    """The different values of a field over a group, without NULL, as a sorted array, text by its bytes. Empty if all are
    NULL.

    With `at_most` only so many values are kept, the least ones, and one more column, ``NAME_truncated``, is true where there
    were more. What is kept across batches needs `at_most`. Without it all different values of a group are kept in memory.

    Raises:
        UsageError: `at_most` is no number from 1 on.
    """
    if at_most is not None:
        require_whole("collect_set()", "at_most", at_most, 1)
    return ReadyAggregate(AggregationKind.SET, field, at_most=at_most)


def _order(function: str, order_by: object) -> tuple[str, ...]:
    names = (order_by,) if isinstance(order_by, str) else tuple(cast("Sequence[object]", order_by or ()))
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TopologyError(
            f"{function}(): order_by={shown(order_by)} names no fields; name what tells which of two tuples is later: "
            f"{function}('city', order_by='at')",
            argument="order_by",
        )
    return cast("tuple[str, ...]", names)


def named(
    component: str, given: pa.Schema, several: tuple[object, ...], results: dict[str, object]
) -> list[AnyAggregation]:
    """The aggregates behind a component with their columns' names; those that name no fields are of all fields.

    Raises:
        TopologyError: one is no aggregate, is given with or without a name wrongly, or does not declare its result.
    """
    made: list[AnyAggregation] = []
    where = f"aggregate behind {component!r}"
    for aggregate in several:
        own = _of_user(aggregate)
        if own is None or own.kind is not UserKind.AGGREGATOR:
            raise TopologyError(
                f"{where}: {shown(aggregate)}: only an Aggregator stands without a name; write result=..., as in n=count()",
                component=component,
            )
        name = type(own.code).__name__
        made.append(_named(own, given, schema_for(f"{where}: {name}.result", component, _result_of(own, where)), where))
    for output, aggregate in results.items():
        if isinstance(aggregate, ReadyAggregate):
            made.append(aggregate.named(output))
            continue
        own = _of_user(aggregate)
        if own is None:
            raise TopologyError(
                f"{where}: {output}={shown(aggregate)} is no aggregate; "
                + instead_of(aggregate, "write count() or sum_('field')"),
                component=component,
            )
        name = type(own.code).__name__
        if own.kind is UserKind.AGGREGATOR:
            raise TopologyError(
                f"{where}: {output}={name}: an Aggregator names its columns itself, in `result`; give it without a name",
                component=component,
            )
        result = f"`{output.replace('`', '``')}` {_result_of(own, where)}"
        made.append(_named(own, given, schema_for(f"{where}: {name}.result", component, result), where))
    return made


def with_marks(aggregations: Sequence[AnyAggregation]) -> list[AnyAggregation]:
    """The aggregates; behind each set with a bound, the column that says whether it was truncated."""
    marked: list[AnyAggregation] = []
    for one in aggregations:
        marked.append(one)
        if isinstance(one, Aggregation) and one.kind is AggregationKind.SET and one.at_most is not None:
            marked[-1] = replace(one, fold=SetUnion(one.at_most))
            fold = SetTruncated(one.output, one.at_most)
            output = f"{one.output}_truncated"
            marked.append(replace(one, output=output, kind=AggregationKind.TRUNCATED, fold=fold))
    return marked


def kept_across_batches(aggregations: Sequence[AnyAggregation]) -> list[AnyAggregation]:
    """The aggregates as columns that can be folded: a mean as ``NAME_sum`` and ``NAME_count``, which can be added up; a
    first or last as ``NAME``, and ``NAME_FIELD`` for each field of its order.
    """
    kept: list[AnyAggregation] = []
    for one in with_marks(aggregations):
        if isinstance(one, Aggregation) and one.kind is AggregationKind.MEAN:
            kept.append(Aggregation(f"{one.output}_sum", AggregationKind.SUM, one.field, mean=one.output))
            kept.append(Aggregation(f"{one.output}_count", AggregationKind.VALUES, one.field))
        elif isinstance(one, Aggregation) and one.compared:
            kept += _kept_by_order(one)
        else:
            kept.append(one)
    return kept


def _kept_by_order(one: Aggregation) -> list[Aggregation]:
    columns = {f"{one.output}_{field}": field for field in one.compared if field != one.field}
    fold = ByOrder(
        End(one.kind.value), tuple(one.output if f == one.field else f"{one.output}_{f}" for f in one.compared)
    )
    return [replace(one, fold=fold), *(replace(one, output=name, field=f, fold=fold) for name, f in columns.items())]


def _of_user(aggregate: object) -> UserAggregate | None:
    if isinstance(aggregate, UserAggregate):
        return aggregate
    if isinstance(aggregate, (CombinerAggregator, ReducerAggregator, Aggregator)):
        return aggregate.over()
    return None


def _result_of(aggregate: UserAggregate, where: str) -> str:
    result = cast("object", getattr(aggregate.code, "result", None))
    if not isinstance(result, str):
        example = "'rank int, word string'" if aggregate.kind is UserKind.AGGREGATOR else "'long'"
        raise TopologyError(
            f"{where}: {type(aggregate.code).__name__} does not say what it gives; write result = {example}"
        )
    return result


def _named(aggregate: UserAggregate, given: pa.Schema, results: pa.Schema, where: str) -> UserAggregation:
    name = type(aggregate.code).__name__
    if aggregate.kind is not UserKind.AGGREGATOR and len(results) != 1:
        raise TopologyError(f"{where}: {name}: a {aggregate.kind} gives one value; its result is one type, like 'long'")
    return UserAggregation(aggregate.kind, aggregate.code, aggregate.fields or tuple(given.names), results)


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
    from stormproof.trident.state.map import RowMerge

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
        from stormproof.trident.state.matrix import require_factory

        require_factory(state, where, component)
        if name is not None:
            checked_name(name, f"{where}: state_name:")
    elif name is not None:
        raise TopologyError(
            f"{where}: state_name={name!r} names no state; pass state=..., such as PostgresMap('totals'), or leave it out",
            component=component,
        )
