"""What is computed of groups: built-in aggregations, users' combiners, reducers and aggregators; which keys group which
rows.

`stormproof.core.task` computes it (`combine`, `reduce`). The `**_: Any` in signatures that users write only tells type
checkers that a subclass names the fields that it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.fold import AnyFold
from stormproof.core.contract.schema import can_be_key


class EmitRow(Protocol):
    """What an aggregator emits a row with."""

    def __call__(self, values: object, /) -> None:
        """Emit a row: the value itself where the result has one field, else a tuple, list or dict of values."""
        ...


class UserKind(StrEnum):
    """Which of the three a user's aggregate is."""

    COMBINER = "combiner"
    REDUCER = "reducer"
    AGGREGATOR = "aggregator"


class _OfUser(ABC):
    """What a combiner, a reducer and an aggregator have in common."""

    _kind: ClassVar[UserKind]
    result: ClassVar[str]

    def over(self, *fields: str) -> UserAggregate:
        """This, of the named fields instead of all of them."""
        return UserAggregate(self._kind, self, fields)


class CombinerAggregator(_OfUser):
    """An aggregate of values that combine in any order: each task combines its own before the exchange.

    `combine` must be associative and commutative, and `zero` neutral, or the result depends on how tuples were divided.
    `result` is the type of a value. Nothing may be kept in `self`: any task may make any of the calls, and again.

    An exception out of `init` fails the message of its tuple. One out of `combine` belongs to no single message: the
    batch's job fails, and the batch is tried in parts until the culprit stands alone.
    """

    _kind = UserKind.COMBINER

    @abstractmethod
    def init(self, *values: Any, **_: Any) -> object:
        """The value of one tuple, given its fields."""

    @abstractmethod
    def combine(self, one: Any, other: Any, /) -> object:
        """Two values as one."""

    @abstractmethod
    def zero(self) -> object:
        """The value of no tuples."""


class ReducerAggregator(_OfUser):
    """An aggregate that takes in tuple after tuple of a group, after the exchange; no order is promised.

    `result` is the type of its value. Nothing may be kept in `self`. An exception out of `reduce` fails the message of
    the tuple in hand, and the group is reduced again without it.
    """

    _kind = UserKind.REDUCER

    @abstractmethod
    def init(self) -> object:
        """The value of no tuples."""

    @abstractmethod
    def reduce(self, value: Any, /, *values: Any, **_: Any) -> object:
        """The value with one more tuple, given its fields. `value` itself may be changed and returned."""


class Aggregator(_OfUser):
    """An aggregate that sees every tuple of a group, after the exchange, and may emit any number of rows.

    `result` is a schema such as "rank int, word string". Failures: see `ReducerAggregator`; one out of `complete` belongs
    to no single message.
    """

    _kind = UserKind.AGGREGATOR

    def init(self) -> Any:
        """The state that a group begins with."""
        return None

    @abstractmethod
    def aggregate(self, state: Any, emit: EmitRow, /, *values: Any, **_: Any) -> object:
        """Take in one tuple, given its fields; returns the new state, or None to keep the one that was given."""

    def complete(self, state: Any, emit: EmitRow, /) -> None:
        """The group is at its end."""


@dataclass(frozen=True, slots=True)
class UserAggregate:
    """A user's aggregate, and the fields that it takes (none: all)."""

    kind: UserKind
    code: _OfUser
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UserAggregation:
    """A user's aggregate in a group: `results` are its columns; only an aggregator may have several."""

    kind: UserKind
    code: Any
    fields: tuple[str, ...]
    results: pa.Schema

    @property
    def combines(self) -> bool:
        """Whether values of parts of a group can be merged to the value of the whole."""
        return self.kind is UserKind.COMBINER

    @property
    def output(self) -> str:
        """Its first column's name."""
        return str(self.results.names[0])

    @property
    def name(self) -> str:
        """For people."""
        return f"{type(self.code).__name__}({', '.join(self.fields)})"


def arguments(columns: Sequence[pa.Array]) -> list[tuple[object, ...]]:
    """The fields of each row, as a call takes them."""
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


# ---- descriptions of what is computed of groups

DECIMAL_DIGITS_MAX: Final = 38


MEAN: Final = b"stormproof.mean"
"""In the metadata of a column that is the sum of a mean: the mean's name. Its count is the column `NAME_count`."""


class AggregationKind(StrEnum):
    """What is computed of a group, column by column."""

    COUNT = "count"
    VALUES = "values"
    """The number of values of a field, without NULL: one half of a mean that is kept across batches."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    DISTINCT = "distinct"
    SET = "collect_set"
    TRUNCATED = "truncated"
    """Whether a set has more values than its bound."""
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One built-in result column: `output` is the number of the group's rows, or is computed from `field`."""

    output: str
    kind: AggregationKind
    field: str | None = None
    mean: str | None = None
    """The name of the mean of which it is the sum; a sink may show it beside sum and count."""
    compared: tuple[str, ...] = ()
    """Of a first and a last: the fields by which rows are compared, the weightiest first; `field` is one of them."""
    at_most: int | None = None
    """Of a set: the number of its least values that are kept."""
    fold: AnyFold | None = None
    """How it is folded into what a sink holds, where its kind alone does not say so."""

    @property
    def combines(self) -> bool:
        """Always: results of parts of a group can be merged to the result of the whole."""
        return True

    @property
    def name(self) -> str:
        """For people."""
        by = [name for name in self.compared if name != self.field]
        return f"{self.kind}({self.field or ''}{' by ' if by else ''}{', '.join(by)})"

    def result(self, schema: pa.Schema, component: str) -> pa.Field:
        """The result's column: counts and sums of integers are 64 bit, sums of decimals have all 38 digits.

        Raises:
            TopologyError: the field is unknown, or its type does not allow this.
        """
        if self.kind is AggregationKind.COUNT and self.field is None:
            return pa.field(self.output, pa.int64())
        if self.field not in schema.names:
            known = ", ".join(schema.names)
            verb = "sums" if self.kind is AggregationKind.SUM else f"is the {self.kind} of"
            raise TopologyError(
                f"component {component!r}: {self.output} {verb} the unknown field {self.field!r}; known: {known}",
                component=component,
                field=str(self.field),
            )
        for name in self.compared:
            self._require_comparable(schema, name, component)
        type_ = schema.field(self.field).type
        found = self._result_type(type_)
        if found is None:
            raise TopologyError(
                f"component {component!r}: field {self.field!r} is {type_}, which has no {self._noun}",
                component=component,
                field=self.field,
            )
        return pa.field(self.output, found, metadata=None if self.mean is None else {MEAN: self.mean.encode()})

    def _require_comparable(self, schema: pa.Schema, name: str, component: str) -> None:
        where = f"component {component!r}: {self.output} = {self.name}"
        if name not in schema.names:
            known = ", ".join(schema.names)
            raise TopologyError(f"{where}: unknown field {name!r}; known: {known}", component=component, field=name)
        type_ = schema.field(name).type
        if not has_extremes(type_):
            what = "no order that every store shares"
            if name == self.field:
                what += ", and the values of two rows that are equal in order_by must be told apart"
            raise TopologyError(
                f"{where}: field {name!r} is {type_}, which has {what}; use a number, a time or a text",
                component=component,
                field=name,
            )

    @property
    def _noun(self) -> str:
        nouns = {
            AggregationKind.DISTINCT: "exact distinct count",
            AggregationKind.SET: "set that every store sorts alike",
        }
        return nouns.get(self.kind, str(self.kind))

    def _result_type(self, type_: pa.DataType) -> pa.DataType | None:
        match self.kind:
            case AggregationKind.COUNT | AggregationKind.VALUES:
                return pa.int64()
            case AggregationKind.SUM:
                return _sum_type(type_)
            case AggregationKind.MEAN:
                return None if _sum_type(type_) is None else pa.float64()
            case AggregationKind.DISTINCT:
                return pa.int64() if can_be_key(type_) else None
            case AggregationKind.SET:
                return pa.list_(type_) if has_sets(type_) else None
            case AggregationKind.TRUNCATED:
                return pa.bool_() if has_sets(type_) else None
            case AggregationKind.FIRST | AggregationKind.LAST:
                return type_
            case AggregationKind.MIN | AggregationKind.MAX:
                return type_ if has_extremes(type_) else None

    def partials(self, given: pa.Schema | None, result: pa.Field) -> list[pa.Field]:
        """The columns of a partial result."""
        match self.kind:
            case AggregationKind.MEAN:
                assert given is not None
                total = _sum_type(given.field(self.field).type)
                return [pa.field(f"{self.output}\x00sum", total), pa.field(f"{self.output}\x00count", pa.int64())]
            case AggregationKind.DISTINCT | AggregationKind.SET | AggregationKind.TRUNCATED:
                assert given is not None
                return [pa.field(self.output, pa.list_(given.field(self.field).type))]
            case AggregationKind.FIRST | AggregationKind.LAST:
                assert given is not None
                compared = [given.field(name).with_nullable(True) for name in self.compared]
                return [pa.field(self.output, pa.struct(compared))]
            case _:
                return [result]

    def finished(self, partials: Sequence[pa.ChunkedArray]) -> pa.Array | pa.ChunkedArray:
        """The result of merged partial columns."""
        match self.kind:
            case AggregationKind.MEAN:
                total, number = (pc.cast(column, pa.float64(), safe=False) for column in partials)
                return pc.divide(total, pc.if_else(pc.equal(number, 0.0), pa.scalar(None, pa.float64()), number))
            case AggregationKind.DISTINCT:
                return pc.cast(pc.list_value_length(partials[0]), pa.int64())
            case AggregationKind.SET if self.at_most is not None:
                return pc.list_slice(partials[0], 0, self.at_most, return_fixed_size_list=False)
            case AggregationKind.TRUNCATED:
                return pc.greater(pc.list_value_length(partials[0]), self.at_most)
            case AggregationKind.FIRST | AggregationKind.LAST:
                return pc.struct_field(partials[0], [self.compared.index(str(self.field))])
            case _:
                return partials[0]


def has_extremes(type_: pa.DataType) -> bool:
    """Whether values of this type have a least and a greatest one; NaN is neither where there is a number."""
    return can_be_key(type_) or pa.types.is_float32(type_) or pa.types.is_float64(type_)


def has_sets(type_: pa.DataType) -> bool:
    """Whether every store sorts sets of such values alike: not of floats, and delta-rs joins no arrays of bytes."""
    return can_be_key(type_) and not pa.types.is_binary(type_)


def _sum_type(type_: pa.DataType) -> pa.DataType | None:
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(DECIMAL_DIGITS_MAX, type_.scale)
    return None


AnyAggregation: TypeAlias = Aggregation | UserAggregation


@dataclass(frozen=True, slots=True)
class GroupBy:
    """Which rows (`given`) are grouped by which keys into which results (`schema`). No keys: one group.

    Where all results combine, each task combines its rows to one partial row a key (`partial`); partial rows are merged
    behind the exchange, and finished at the end.
    """

    component: str
    keys: tuple[str, ...]
    aggregations: tuple[AnyAggregation, ...]
    schema: pa.Schema
    given: pa.Schema | None = None

    @property
    def combines(self) -> bool:
        """Whether rows may be combined before the exchange."""
        return all(a.combines for a in self.aggregations)

    @property
    def partial(self) -> pa.Schema:
        """The schema of partial rows."""
        fields = [self.schema.field(k) for k in self.keys]
        for a in self.aggregations:
            fields += self.partials_of(a)
        return pa.schema(fields)

    def partials_of(self, aggregation: AnyAggregation) -> list[pa.Field]:
        """The columns of one aggregation in a partial row."""
        if isinstance(aggregation, Aggregation):
            return aggregation.partials(self.given, self.schema.field(aggregation.output))
        return list(aggregation.results)

    def only_combining(self) -> GroupBy:
        """The same without the aggregations that do not combine; rows are prepared alike for both."""
        if self.combines:
            return self
        kept = tuple(a for a in self.aggregations if a.combines)
        fields = [self.schema.field(name) for name in (*self.keys, *(a.output for a in kept))]
        return GroupBy(self.component, self.keys, kept, pa.schema(fields), self.given)
