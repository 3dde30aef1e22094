"""What a topology is made of: components, their output streams, and subscriptions to these by groupings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

import pyarrow as pa

from stormproof.core.base.errors import TopologyError
from stormproof.core.bolt import DEFAULT_STREAM, AnyBolt
from stormproof.core.contract.schema import refuse_twice, require_fields, require_key
from stormproof.core.contract.sink import SinkInput, SinkSpec
from stormproof.core.contract.source import Source
from stormproof.core.graph.aggregation import AnyAggregation
from stormproof.core.graph.join import JoinOn
from stormproof.core.user_code.functions import refuse_unfit_call

TaskFunction: TypeAlias = Callable[[pa.RecordBatch, int], object]
"""A custom grouping: rows and the number of tasks to an array of integers, the task number of each row."""

_BY_KEY: Final = frozenset({"fields", "partial_key"})


class GroupingKind(StrEnum):
    """How tuples reach the tasks of a subscriber.

    Each promise is kept by every emitting task for the tuples that this task sends; none depends on what others send.
    A message that is replayed, and a task that Spark runs again, may route a tuple elsewhere, but for `FIELDS`,
    `GLOBAL` and `ALL`.
    """

    SHUFFLE = "shuffle"
    """Round robin: the numbers of tuples that one emitting task sent to any two tasks differ by at most 1."""
    FIELDS = "fields"
    """Equal values of the fields go to the same task: of one batch and of all, whoever emits them, for as long as the
    number of tasks is the same. NULL is a value like any other: all NULLs of a field are equal. Nothing is promised
    of balance: a heavy key makes a heavy task."""
    ALL = "all"
    """Every task gets a copy of every tuple, and each copy is tracked: all of them must be acked."""
    GLOBAL = "global"
    """Task 0 gets every tuple."""
    NONE = "none"
    """It does not matter. The tuples stay in the task that emitted them: nothing is promised of balance."""
    LOCAL_OR_SHUFFLE = "local_or_shuffle"
    """The tuples stay in the task that emitted them, which here always runs the subscriber, too."""
    PARTIAL_KEY = "partial_key"
    """Each value of the fields has two candidate tasks and goes to no other; of the two, the one that got less.

    The power of two choices: M. A. U. Nasir et al., "The power of both choices: practical load balancing for
    distributed stream processing engines", ICDE 2015. A key's results come from two tasks: what follows merges them.
    By Zipf's law (any exponent; ten keys a task and more, once a task has some hundred tuples) no task gets more than
    1.1 times the mean where the heaviest key has at most 1 / tasks of all tuples, and 1.5 times where it has at most
    2 / tasks. A heavier key fits into no two tasks: its candidates then get half of it each. Values are equal as they
    are for `FIELDS`."""
    DIRECT = "direct"
    """The emitter names the task of each tuple."""
    CUSTOM = "custom"
    """A function names the task of each tuple, a record batch at a time."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a stream's tuples reach the tasks of one subscriber; see `GroupingKind` for what each kind promises.

    `fields` are the key of fields and partial_key. `function` is a custom grouping's: it takes the rows and the number
    of tasks, and gives an integer from 0 to the number of tasks - 1 for each row. It is called for a record batch at a
    time, never for an empty one, and should depend on nothing but the rows: Spark may run it again. Where it raises or
    gives no valid numbers, it is called again with halves of the batch, until the rows to blame are found.
    """

    kind: GroupingKind
    fields: tuple[str, ...] = ()
    function: TaskFunction | None = None

    @property
    def fused(self) -> bool:
        """Whether the subscriber runs in the emitting task, without an exchange."""
        return self.kind in (GroupingKind.NONE, GroupingKind.LOCAL_OR_SHUFFLE)

    def check(self, schema: pa.Schema, component: str) -> None:
        """Check the grouping by which a component subscribes to a stream of this schema.

        Raises:
            TopologyError: a field is unknown, stands twice or cannot be a key; fields or the function are missing, or
                there where the kind has no use for them.
        """
        where = f"component {component!r}, {self.kind} grouping"
        if self.kind in _BY_KEY and not self.fields:
            known = ", ".join(schema.names)
            raise TopologyError(f"{where}: name at least one field; known: {known}", component=component)
        if self.fields and self.kind not in _BY_KEY:
            raise TopologyError(
                f"{where}: it takes no fields, got {', '.join(map(repr, self.fields))}; use a fields grouping for "
                "equal values to the same task",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM and not callable(self.function):
            raise TopologyError(
                f"{where}: it needs a function of the rows and the number of tasks, got {self.function!r}",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM:
            instead = "write one like f(rows, tasks), which gives the number of a task for each row"
            refuse_unfit_call(component, where, self.function, ("rows", "tasks"), instead)
        if self.kind is not GroupingKind.CUSTOM and self.function is not None:
            raise TopologyError(f"{where}: it takes no function; only a custom grouping does", component=component)
        require_fields(where, component, self.fields, schema)
        refuse_twice(where, component, self.fields)
        for name in self.fields:
            require_key(where, component, name, schema.field(name).type)


# ---- components and their output streams

UserFunction: TypeAlias = Callable[..., object]


class OperationKind(StrEnum):
    """What an operation makes of a tuple."""

    MAP = "map"
    """One tuple."""
    FLAT_MAP = "flat_map"
    """Any number of tuples."""
    FILTER = "filter"
    """The tuple itself, or nothing."""
    EACH = "each"
    """The tuple itself with the function's result as further fields."""
    FLAT_EACH = "flat_each"
    """As `EACH`, once for each of any number of results."""
    PROJECT = "project"
    """Some of its fields, perhaps under other names; no function is called."""
    PEEK = "peek"
    """The tuple itself, after the function saw it."""
    ARROW = "arrow"
    """A record batch to a record batch, and for each of its rows the number of the row that it was made from."""


NO_EXCHANGE: Final = Grouping(GroupingKind.NONE)


class OwnsStreams(Protocol):
    """What an output stream needs of its topology."""

    name: str

    def schema_of(self, name: str, stream: str = ...) -> pa.Schema:
        """The tuples of a component's output stream.

        Raises:
            TopologyError: there is no such component, or it has no such stream.
        """
        ...


@dataclass(frozen=True, slots=True)
class Subscription:
    """One output stream of a component, and how its tuples reach the subscriber's tasks."""

    component: str
    stream: str = DEFAULT_STREAM
    grouping: Grouping = NO_EXCHANGE
    tasks: int | None = None
    """How many tasks an exchange leads to; None: as many as the engine has."""
    graph: OwnsStreams | None = field(default=None, repr=False, compare=False)
    """The topology of the component, where it is known."""


class OutputStream:
    """One output stream of a component, to which a bolt subscribes by one of the groupings.

    Passed to `bolt` without a grouping, it means `none()`: no exchange, the subscriber runs in the task that made the tuple.
    `output["late"]` is another output stream of the same component.
    """

    def __init__(self, graph: OwnsStreams, component: str, stream: str = DEFAULT_STREAM) -> None:
        self.graph = graph
        self.component = component
        self.stream = stream

    def __getitem__(self, stream: str) -> OutputStream:
        """Another output stream of this component.

        Raises:
            TopologyError: it has none of that name.
        """
        self.graph.schema_of(self.component, stream)
        return OutputStream(self.graph, self.component, stream)

    @property
    def schema(self) -> pa.Schema:
        """The fields of its tuples.

        Raises:
            TopologyError: the component has no stream of this name.
        """
        return self.graph.schema_of(self.component, self.stream)

    def shuffle(self) -> Subscription:
        """Evenly over the subscriber's tasks."""
        return self._by(GroupingKind.SHUFFLE)

    def fields(self, *fields: str) -> Subscription:
        """Tuples of a batch with equal values in these fields go to one task."""
        return self._by(GroupingKind.FIELDS, fields)

    def partial_key(self, *fields: str) -> Subscription:
        """As `fields`, but each key has two tasks, so that a frequent key burdens none alone."""
        return self._by(GroupingKind.PARTIAL_KEY, fields)

    def all(self) -> Subscription:
        """Every task gets a copy of every tuple; the tracking counts each."""
        return self._by(GroupingKind.ALL)

    def global_(self) -> Subscription:
        """Everything goes to the task of the lowest number."""
        return self._by(GroupingKind.GLOBAL)

    def none(self) -> Subscription:
        """It does not matter which task: no exchange."""
        return self._by(GroupingKind.NONE)

    def local_or_shuffle(self) -> Subscription:
        """The task that made the tuple: no exchange."""
        return self._by(GroupingKind.LOCAL_OR_SHUFFLE)

    def direct(self) -> Subscription:
        """The task that the emitting bolt names in `emit(..., task=n)`."""
        return self._by(GroupingKind.DIRECT)

    def custom(self, function: Callable[[pa.RecordBatch, int], object]) -> Subscription:
        """The task that `function(rows, tasks)` gives for each row, as an array of task numbers."""
        return self._by(GroupingKind.CUSTOM, function=function)

    def _by(
        self, kind: GroupingKind, fields: tuple[str, ...] = (), function: TaskFunction | None = None
    ) -> Subscription:
        return Subscription(self.component, self.stream, Grouping(kind, fields, function), graph=self.graph)


@dataclass(frozen=True, slots=True)
class Spout:
    """Where messages come from."""

    name: str
    source: Source
    schema: pa.Schema

    @property
    def inputs(self) -> tuple[Subscription, ...]:
        """None: it is a root."""
        return ()

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """One."""
        return {DEFAULT_STREAM: self.schema}


@dataclass(frozen=True, slots=True)
class Operation:
    """A function over tuples. `fields` are its arguments; `schema` is that of its results.

    `concurrency` is how many calls a task makes at a time; None: it calls the function itself, one row after the other.
    """

    name: str
    inputs: tuple[Subscription, ...]
    kind: OperationKind
    function: UserFunction
    fields: tuple[str, ...]
    schema: pa.Schema
    concurrency: int | None = None
    is_async: bool = False

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """One."""
        return {DEFAULT_STREAM: self.schema}


@dataclass(frozen=True, slots=True)
class BoltComponent:
    """A bolt that is an object; each task works with a copy of its own, made anew for each batch.

    `reads_state`: it reads a state that the topology's batches change.
    """

    name: str
    inputs: tuple[Subscription, ...]
    bolt: AnyBolt
    streams: Mapping[str, pa.Schema]
    reads_state: bool = False


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Groups within a batch; no keys: one group. `persistent`: the results are folded into what its sinks hold.

    `local`: each task groups what it has, without an exchange.
    """

    name: str
    input: Subscription
    keys: tuple[str, ...]
    aggregations: tuple[AnyAggregation, ...]
    persistent: bool
    schema: pa.Schema
    given: pa.Schema
    local: bool = False

    @property
    def inputs(self) -> tuple[Subscription, ...]:
        """One."""
        return (self.input,)

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """One."""
        return {DEFAULT_STREAM: self.schema}


@dataclass(frozen=True, slots=True)
class Join:
    """Two streams joined within a batch; both reach it by their keys."""

    name: str
    left: Subscription
    right: Subscription
    on: JoinOn

    @property
    def inputs(self) -> tuple[Subscription, ...]:
        """The left side, and the right one."""
        return (self.left, self.right)

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """One."""
        return {DEFAULT_STREAM: self.on.schema}


@dataclass(frozen=True, slots=True)
class SinkComponent:
    """Where results go."""

    name: str
    subscription: Subscription
    spec: SinkSpec
    input: SinkInput

    @property
    def inputs(self) -> tuple[Subscription, ...]:
        """One."""
        return (self.subscription,)

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """None: it is an end."""
        return {}


Component: TypeAlias = Spout | Operation | BoltComponent | Aggregate | Join | SinkComponent
BoltOrFunction: TypeAlias = AnyBolt | UserFunction
BoltInput: TypeAlias = Subscription | OutputStream
