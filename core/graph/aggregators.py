"""The kinds of aggregates that users write: combiners, reducers and aggregators, row by row.

The `**_: Any` in their signatures only tells type checkers that a subclass names the fields that it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import pyarrow as pa


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
