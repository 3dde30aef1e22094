"""The topology graph: named components, checked as they are added.

t = Topology("word-count")
lines = t.spout("lines", PostgresQueue("lines", schema="line string"))
words = t.bolt("split", SplitSentence(), lines.shuffle(), schema="word string")
counts = t.bolt("count", WordCount(), words.fields("word"), schema="word string, n long")
t.sink(DeltaSink("lake/word_counts"), counts)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.arguments import instead_of, lacks, said_of, shown
from stormproof.core.bolt import DEFAULT_STREAM, AnyBolt, ArrowBolt, BasicBolt, Bolt, Streams
from stormproof.core.bolt.checks import refuse_unfit_bolt, refuse_unfit_function
from stormproof.core.calls import refuse_unfit_call
from stormproof.core.errors import TopologyError
from stormproof.core.graph.aggregation import Aggregation, AggregationKind, AnyAggregation
from stormproof.core.graph.aggregators import UserAggregation
from stormproof.core.graph.checks import refuse_unfit_aggregate
from stormproof.core.graph.grouping import Grouping, GroupingKind, TaskFunction
from stormproof.core.graph.join import JoinOn
from stormproof.core.graph.keyhash import can_be_key
from stormproof.core.guarantee import Guarantee
from stormproof.core.schema import SchemaLike, parse_schema
from stormproof.core.sink import Fold, SinkInput, SinkSpec, require_mode, require_tables_apart
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.protocol import Source

NAME_MAX_CHARACTERS: Final = 64
TASKS_MAX: Final = 1_024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

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
    """The tuple itself with what the function gives as further fields."""
    FLAT_EACH = "flat_each"
    """The same for each of any number of results."""
    PROJECT = "project"
    """Some of its fields, under other names where asked; no function is called."""
    PEEK = "peek"
    """The tuple itself, after the function saw it."""
    ARROW = "arrow"
    """A record batch to a record batch, and for each row of that the row that it was made of."""


_WITHOUT_SCHEMA: Final = frozenset({OperationKind.FILTER, OperationKind.PEEK, OperationKind.PROJECT})
"""What gives the tuple itself, or says by itself which fields it gives."""
_FLAT: Final = frozenset({OperationKind.FLAT_MAP, OperationKind.FLAT_EACH})
_ADDING: Final = frozenset({OperationKind.EACH, OperationKind.FLAT_EACH})

NO_EXCHANGE: Final = Grouping(GroupingKind.NONE)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One output stream of a component, and how its tuples reach the subscriber's tasks."""

    component: str
    stream: str = DEFAULT_STREAM
    grouping: Grouping = NO_EXCHANGE
    tasks: int | None = None
    """How many tasks an exchange leads to; None: as many as the engine has."""
    graph: TopologyGraph | None = field(default=None, repr=False, compare=False)
    """The topology whose component it names, where that is known."""


class OutputStream:
    """One output stream of a component: what a bolt subscribes to, by one of the groupings.

    Given to `bolt` as it is, it means `none()`: no exchange, the subscriber runs in the task that made the tuple.
    `output["late"]` is another output stream of the same component.
    """

    def __init__(self, graph: TopologyGraph, component: str, stream: str = DEFAULT_STREAM) -> None:
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
        """The very task that made the tuple: no exchange."""
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
    """A function over tuples. `fields` are its arguments; `schema` is what it gives."""

    name: str
    inputs: tuple[Subscription, ...]
    kind: OperationKind
    function: UserFunction
    fields: tuple[str, ...]
    schema: pa.Schema

    @property
    def streams(self) -> Mapping[str, pa.Schema]:
        """One."""
        return {DEFAULT_STREAM: self.schema}


@dataclass(frozen=True, slots=True)
class BoltComponent:
    """A bolt that is an object; each task works with a copy of its own, made anew for each batch."""

    name: str
    inputs: tuple[Subscription, ...]
    bolt: AnyBolt
    streams: Mapping[str, pa.Schema]


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


class TopologyGraph:
    """An acyclic graph of named components: spouts, bolts and aggregates, and a sink at every end.

    Each component names inputs that are there already, so that there cannot be a cycle. `guarantee` is the default of
    `run`; None is exactly-once. `ackers` is the number of acker tasks for a batch whose verdict has to be taken message by
    message; None is one a core; 0 turns tracking off, which is at-most-once. `message_timeout_s` is how long a message may
    stay without any progress on its batch; None leaves it to the settings.
    """

    def __init__(
        self,
        name: str,
        guarantee: Guarantee | str | None = None,
        *,
        ackers: int | None = None,
        message_timeout_s: float | None = None,
    ) -> None:
        self.name = checked_name(name, "topology")
        self.guarantee = None if guarantee is None else as_guarantee(guarantee, f"topology {name!r}")
        if ackers is not None and not (_is_number(ackers, int) and ackers >= 0):
            raise TopologyError(f"topology {name!r}: ackers is {ackers!r}; use 1 or more, or 0 for no tracking")
        if message_timeout_s is not None and not (_is_number(message_timeout_s, int, float) and message_timeout_s > 0):
            raise TopologyError(
                f"topology {name!r}: message_timeout_s is {message_timeout_s!r}; it must be a number of seconds above 0"
            )
        self.ackers = ackers
        self.message_timeout_s = message_timeout_s
        if ackers == 0:
            self.guarantee = self.guarantee or Guarantee.AT_MOST_ONCE
            self.require_tracking(self.guarantee)
        self._components: dict[str, Component] = {}

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, each after its inputs."""
        return tuple(self._components.values())

    @property
    def spouts(self) -> tuple[Spout, ...]:
        """The spouts, in the order in which they were added.

        Raises:
            TopologyError: there is none.
        """
        found = tuple(c for c in self._components.values() if isinstance(c, Spout))
        if not found:
            raise TopologyError(f"topology {self.name!r} is empty; begin with t.stream(name, source)")
        return found

    @property
    def source(self) -> Source:
        """The spout's source, or those of several spouts as one."""
        spouts = self.spouts
        return spouts[0].source if len(spouts) == 1 else SourceGroup({spout.name: spout.source for spout in spouts})

    @property
    def sinks(self) -> tuple[SinkSpec, ...]:
        """The sinks, in the order in which they were added."""
        return tuple(c.spec for c in self._components.values() if isinstance(c, SinkComponent))

    def subscribers(self, name: str, stream: str = DEFAULT_STREAM) -> tuple[tuple[Component, Subscription], ...]:
        """Who takes an output stream, and how, in the order in which they were added."""
        return tuple(
            (component, input_)
            for component in self._components.values()
            for input_ in component.inputs
            if (input_.component, input_.stream) == (name, stream)
        )

    def schema_of(self, name: str, stream: str = DEFAULT_STREAM) -> pa.Schema:
        """The tuples of an output stream.

        Raises:
            TopologyError: there is no such component, or it has no such stream.
        """
        component = self._component(name)
        if isinstance(component, SinkComponent):
            raise TopologyError(f"nothing can follow the sink {name!r}", component=name)
        schema = component.streams.get(stream)
        if schema is None:
            raise TopologyError(
                f"component {name!r} has no output stream {stream!r}; known: "
                f"{', '.join(component.streams) or 'none: give it a schema'}",
                component=name,
                stream=stream,
            )
        return schema

    def require_tracking(self, guarantee: Guarantee) -> None:
        """Raise TopologyError where this guarantee needs the tracking that `ackers=0` turns off."""
        if self.ackers == 0 and guarantee.tracked:
            raise TopologyError(
                f"topology {self.name!r} has ackers=0: nothing is tracked, and each message is confirmed at once. That is "
                f"at-most-once; for {guarantee.value} leave `ackers` out, or give the number of acker tasks"
            )

    # -- building, bolt by bolt --------------------------------------------------------------------------------------

    def spout(self, name: str, source: Source) -> OutputStream:
        """Add a source of messages.

        Raises:
            TopologyError: the name is taken or cannot be one, or the same source is there already.
        """
        return OutputStream(self, self.add_spout(name, source))

    def bolt(
        self,
        name: str,
        bolt: BoltOrFunction,
        *inputs: BoltInput,
        schema: SchemaLike | None = None,
        streams: Mapping[str, SchemaLike] | None = None,
    ) -> OutputStream:
        """Add a bolt behind one or more output streams.

        A plain function gets the fields as arguments and gives any number of tuples for each (an iterable); its inputs
        must all have the same fields. `schema` is that of the stream "default", `streams` names
        further ones; a bolt's own `streams` hold where neither is given. A bolt without output streams is an end.

        Raises:
            TopologyError: a name is taken or unknown, a grouping's field is missing, there is no input, or a function or a
                bolt's method takes other arguments than it gets.
        """
        checked_name(name, "bolt")
        if not inputs:
            raise TopologyError(f"bolt {name!r} has no input; name one like words.fields('word')", component=name)
        taken = tuple(self._subscription(name, input_) for input_ in inputs)
        self._require_agreed_tasks(name, taken)
        refuse_unfit_bolt(name, bolt)
        if isinstance(bolt, (Bolt, BasicBolt, ArrowBolt)):
            return OutputStream(
                self, self._add(BoltComponent(name, taken, bolt, _streams(name, bolt.streams, schema, streams)))
            )
        if not callable(bolt):
            raise TopologyError(
                f"bolt {name!r}: {shown(bolt)} is no bolt; give a function, or an object of a Bolt, BasicBolt or ArrowBolt",
                component=name,
            )
        if streams is not None or schema is None:
            raise TopologyError(
                f"bolt {name!r}: a function has the one output stream {DEFAULT_STREAM!r}; say what it gives, like "
                "schema='word string', or write a BasicBolt for several",
                component=name,
            )
        instead = "it gets all fields of its input: change its parameters, or project the fields that it takes before"
        refuse_unfit_call(name, f"bolt {name!r}", bolt, self._stream_schema(taken[0]).names, instead)
        made = self.add_operation(name, taken, OperationKind.FLAT_MAP, bolt, fields=(), schema=schema)
        return OutputStream(self, made)

    def sink(self, sink: SinkSpec, stream: OutputStream) -> None:
        """End an output stream in a sink.

        Raises:
            TopologyError: the sink's name is taken, or it cannot take such tuples; or `stream` is no output stream.
        """
        require_sink(sink, f"topology {self.name!r}")
        where = f"sink {sink.name!r}"
        if not isinstance(stream, OutputStream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"{where}: {shown(stream)} is no output stream; a sink takes one as it is, without a grouping",
                component=sink.name,
            )
        self._require_own(stream.graph, stream.component, where)
        self.add_sink(Subscription(stream.component, stream.stream), sink)

    # -- what both ways of building use ------------------------------------------------------------------------------

    def add_spout(self, name: str, source: Source) -> str:
        """Add a spout.

        Raises:
            TopologyError: the name is taken or cannot be one, this is no source, or it is there already.
        """
        checked_name(name, "spout")
        if lacks(source, "name", "decoder", "serves", "open", "readers", "confirm"):
            raise TopologyError(
                f"spout {name!r}: {shown(source)} is no source; "
                + instead_of(source, "give one like PostgresQueue('lines') or MemorySource('lines', [b'a line'])"),
                component=name,
            )
        for component in self._components.values():
            if isinstance(component, Spout) and component.source is source:
                raise TopologyError(
                    f"topology {self.name!r}: spouts {component.name!r} and {name!r} have the same source; let several "
                    "bolts subscribe to one spout",
                    component=name,
                )
        return self._add(Spout(name, source, source.decoder.schema))

    def add_operation(
        self,
        name: str | None,
        inputs: Sequence[Subscription],
        kind: OperationKind,
        function: UserFunction,
        *,
        fields: Sequence[str],
        schema: SchemaLike | None,
    ) -> str:
        """Add a function. No fields: all of them, in order. No schema, where the kind needs none: that of its input.

        Raises:
            TopologyError: the name cannot be one, a field is unknown, the schema is missing or none, or the function takes
                other arguments than it gets.
        """
        given = self._stream_schema(inputs[0])
        name = self._own_name(name, kind, function)
        if not callable(function):
            raise TopologyError(
                f"component {name!r}: {kind} needs a function, got {shown(function)}; write one that takes fields, "
                f"like f({', '.join(given.names)})",
                component=name,
            )
        refuse_unfit_function(name, function, yields=kind in _FLAT)
        self._require_agreed_tasks(name, inputs)
        for other in inputs[1:]:
            if not _alike(self._stream_schema(other), given):
                raise TopologyError(
                    f"component {name!r}: its inputs have different fields ({_shown(given)} and "
                    f"{_shown(self._stream_schema(other))}); a function takes one kind of tuple, a BasicBolt several",
                    component=name,
                )
        self._require_fields(name, fields, given)
        taken = tuple(fields) or tuple(given.names)
        if kind is not OperationKind.PROJECT:
            self._require_call(name, kind, function, taken, named=bool(fields))
        if schema is None and kind in _WITHOUT_SCHEMA:
            nullable = [any(self._stream_schema(i).field(f.name).nullable for i in inputs) for f in given]
            found = pa.schema([f.with_nullable(n) for f, n in zip(given, nullable, strict=True)])
        else:
            found = schema_for(f"component {name!r}", name, schema)
        if kind in _ADDING:
            both = [*given, *found]
            _refuse_twice(name, [f.name for f in both])
            found = pa.schema(both)
        return self._add(Operation(name, tuple(inputs), kind, function, taken, found))

    def add_aggregate(
        self,
        name: str | None,
        input_: Subscription,
        keys: Sequence[str],
        aggregations: Sequence[AnyAggregation],
        *,
        persistent: bool,
        local: bool = False,
    ) -> str:
        """Add groups; no keys make one group of everything."""
        given = self._stream_schema(input_)
        name = self._own_name(name, "aggregate", None)
        if not aggregations:
            raise TopologyError(f"component {name!r}: no results; name one like n=count()", component=name)
        self._require_fields(name, keys, given)
        for key in keys:
            if not can_be_key(given.field(key).type):
                raise TopologyError(
                    f"component {name!r}: field {key!r} is {given.field(key).type}, which can't be a group's key: its "
                    "values do not compare alike everywhere; use a string, an integer, a decimal, a date or a boolean",
                    component=name,
                    field=key,
                )
        results: list[pa.Field] = []
        for a in aggregations:
            if isinstance(a, Aggregation):
                results.append(a.result(given, name))
            else:
                self._require_fields(name, a.fields, given)
                refuse_unfit_aggregate(name, a)
                results += list(a.results)
            if persistent:
                _require_fold(name, a)
        _refuse_twice(name, [*keys, *(f.name for f in results)])
        schema = pa.schema([given.field(key) for key in keys] + results)
        return self._add(
            Aggregate(name, input_, tuple(keys), tuple(aggregations), persistent, schema, given, local=local)
        )

    def add_join(
        self, name: str | None, left: Subscription, right: Subscription, keys: Mapping[str, str], kind: str
    ) -> str:
        """Add a join of two streams by `keys`, the left side's fields and their partners on the right side.

        Raises:
            TopologyError: see `JoinOn.of`.
        """
        name = self._own_name(name, "join", None)
        on = JoinOn.of(name, kind, keys, self._stream_schema(left), self._stream_schema(right))
        return self._add(Join(name, left, right, on))

    def add_reader(self, name: str | None, input_: Subscription, bolt: ArrowBolt, schema: pa.Schema) -> str:
        """Add a bolt that reads a state; it may also follow a persistent aggregate, beside the state that it folds into."""
        name = self._own_name(name, "state", None)
        self._require_agreed_tasks(name, [input_])
        _refuse_twice(name, schema.names)
        return self._add(BoltComponent(name, (input_,), bolt, {DEFAULT_STREAM: schema}))

    def add_sink(self, input_: Subscription, spec: SinkSpec) -> str:
        """Add a sink; its own name is the component's.

        Raises:
            TopologyError: the name is taken, the sink cannot take such rows, or another sink has its table.
        """
        require_sink(spec, f"component {input_.component!r}")
        schema = self.schema_of(input_.component, input_.stream)
        component = self._component(input_.component)
        rows = SinkInput(schema)
        if isinstance(component, Aggregate) and component.persistent:
            if not component.keys:
                raise TopologyError(
                    f"component {component.name!r}: a sink holds results by key, and this aggregate has none; group by a "
                    "field, or keep the result in a State",
                    component=component.name,
                )
            folds = {a.output: _fold_of(a) for a in component.aggregations}
            rows = SinkInput.for_fold(schema, component.keys, folds)
        name = checked_name(spec.name, "sink")
        require_mode(spec, rows)
        # What a sink can take is known now; whether it serves the guarantee, again when one is chosen.
        spec.check(rows, self.guarantee or Guarantee.AT_LEAST_ONCE)
        self._require_new(name)
        require_tables_apart(self.name, [*self.sinks, spec])
        return self._add(SinkComponent(name, input_, spec, rows))

    def validate(self) -> None:
        """Check what can only be seen at the end.

        Raises:
            TopologyError: there is no spout, a component or one of its output streams leads nowhere, or nothing ends in a
                sink or in a bolt without output.
        """
        first = self.spouts[0]
        ends = [c for c in self._components.values() if not c.streams]
        if not ends:
            raise TopologyError(
                f"topology {self.name!r} has no sink; end {first.name!r} with .into(...) or t.sink(...)",
                component=first.name,
            )
        for component in self._components.values():
            if component.streams and not any(self.subscribers(component.name, s) for s in component.streams):
                raise TopologyError(
                    f"topology {self.name!r}: component {component.name!r} leads nowhere; end it with .into(...), or "
                    "leave it out",
                    component=component.name,
                )

    def _subscription(self, name: str, given: BoltInput) -> Subscription:
        subscription = given.none() if isinstance(given, OutputStream) else given
        if not isinstance(subscription, Subscription):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"bolt {name!r}: {shown(given)} is no output stream; write words.shuffle() or words.fields('word')"
                f"{', with the output of this stream for words' if hasattr(given, 'output') else ''}",
                component=name,
            )
        self._require_own(subscription.graph, subscription.component, f"bolt {name!r}")
        schema = self._stream_schema(subscription)
        subscription.grouping.check(schema, name)
        if subscription.tasks is not None:
            checked_tasks(subscription.tasks, name)
        emitter = self._component(subscription.component)
        if subscription.grouping.kind is GroupingKind.DIRECT and not isinstance(emitter, BoltComponent):
            raise TopologyError(
                f"bolt {name!r}: a direct grouping needs a bolt that names tasks with emit(..., task=n); "
                f"{emitter.name!r} is none",
                component=name,
            )
        is_arrow = isinstance(emitter, BoltComponent) and isinstance(emitter.bolt, ArrowBolt)
        if subscription.grouping.kind is GroupingKind.DIRECT and is_arrow:
            raise TopologyError(
                f"bolt {name!r}: a direct grouping needs a bolt that names tasks with emit(..., task=n); "
                f"{emitter.name!r} is an ArrowBolt, which cannot: make it a BasicBolt, or use custom()",
                component=name,
            )
        return subscription

    def _require_own(self, graph: TopologyGraph | None, component: str, where: str) -> None:
        """Raise TopologyError where a component is another topology's: this one may have another of that name."""
        if graph is not None and graph is not self:
            raise TopologyError(
                f"{where}: {component!r} belongs to topology {graph.name!r}, which is another one than {self.name!r} here; "
                "use output streams of this one",
                component=component,
            )

    def _require_call(
        self, name: str, kind: OperationKind, function: UserFunction, fields: Sequence[str], *, named: bool
    ) -> None:
        given = fields
        if kind is OperationKind.ARROW:
            given, instead = ["rows"], "write one that takes a record batch"
        elif named:
            instead = "change its parameters, or the fields that are named behind it"
        else:
            call = "each" if kind is OperationKind.FLAT_EACH else kind
            instead = (
                f"it gets all fields, since none is named: name those that it takes, as in {call}(f, {fields[0]!r}), or "
                "change its parameters"
            )
        refuse_unfit_call(name, f"component {name!r}", function, given, instead)

    def _component(self, name: str) -> Component:
        component = self._components.get(name)
        if component is None:
            raise TopologyError(
                f"no component {name!r}; known: {', '.join(self._components) or 'none'}", component=name
            )
        return component

    def _stream_schema(self, input_: Subscription) -> pa.Schema:
        schema = self.schema_of(input_.component, input_.stream)
        component = self._component(input_.component)
        if isinstance(component, Aggregate) and component.persistent:
            raise TopologyError(
                f"component {component.name!r} is a persistent aggregate: what it gives is folded into sinks, so only "
                ".into(...) can follow; use .agg(...) for groups of a batch",
                component=component.name,
            )
        return schema

    def _require_agreed_tasks(self, name: str, inputs: Sequence[Subscription]) -> None:
        """Equal keys of two inputs meet in one task only where both have as many."""
        asked = {i.tasks for i in inputs if not i.grouping.fused}
        if len(asked) > 1:
            shown = " and ".join(sorted("the engine's number" if n is None else str(n) for n in asked))
            raise TopologyError(
                f"component {name!r}: its inputs ask for different numbers of tasks: {shown}; give them one parallelism",
                component=name,
            )

    def _require_fields(self, name: str, fields: Sequence[str], schema: pa.Schema) -> None:
        require_fields(f"component {name!r}", name, fields, schema)
        _refuse_twice(name, fields)

    def _own_name(self, name: str | None, kind: str, function: UserFunction | None) -> str:
        if name is not None:
            return checked_name(name, "component")
        called = getattr(function, "__name__", "")
        base = called if isinstance(called, str) and _NAME.fullmatch(called) and called != "<lambda>" else kind
        base = base[: NAME_MAX_CHARACTERS - 4]
        names = [base, *(f"{base}-{i}" for i in range(2, len(self._components) + 3))]
        return next(n for n in names if n not in self._components)

    def _require_new(self, name: str) -> None:
        if any(there.name.lower() == name.lower() for there in self._components.values()):
            raise TopologyError(
                f"topology {self.name!r} has two components called {name!r}; give one of them another name",
                component=name,
            )

    def _add(self, component: Component) -> str:
        self._require_new(component.name)
        self._components[component.name] = component
        return component.name


def checked_name(name: str, what: str) -> str:
    """The name, where it can be part of a file's name and of a transaction identifier.

    Raises:
        TopologyError: it cannot.
    """
    if not isinstance(name, str) or len(name) > NAME_MAX_CHARACTERS or _NAME.fullmatch(name) is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{what} name {name!r}: use letters, digits, '_', '.' and '-', beginning with a letter or digit, at most "
            f"{NAME_MAX_CHARACTERS} characters"
        )
    return name


def as_guarantee(guarantee: Guarantee | str, where: str | None = None) -> Guarantee:
    """The guarantee by its name; `where` it stands, for the error.

    Raises:
        TopologyError: there is none of that name.
    """
    try:
        return Guarantee(guarantee)
    except ValueError:
        known = ", ".join(g.value for g in Guarantee)
        before = "" if where is None else f"{where}: "
        raise TopologyError(f"{before}no guarantee {guarantee!r}; known: {known}") from None


def schema_for(where: str, component: str, schema: SchemaLike | None) -> pa.Schema:
    """The schema that a component was given.

    Raises:
        TopologyError: it is none; names the component.
    """
    if schema is None:
        raise TopologyError(
            f"{where} needs a schema, which says what it gives, like schema='word string, n long'", component=component
        )
    with said_of(where, component=component):
        return parse_schema(schema)


def require_fields(where: str, component: str, fields: Sequence[str], schema: pa.Schema) -> None:
    """Raise TopologyError where one of the fields is not in the schema."""
    known = ", ".join(schema.names)
    for name in fields:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"{where}: {shown(name)} is no field's name; give names one by one, like 'id', 'amount'; known: {known}",
                component=component,
            )
        if name not in schema.names:
            raise TopologyError(f"{where}: unknown field {name!r}; known: {known}", component=component, field=name)


def checked_tasks(tasks: int, component: str) -> int:
    """The number of tasks that an exchange may lead to.

    Raises:
        TopologyError: it is none.
    """
    if isinstance(tasks, bool) or not isinstance(tasks, int) or not 1 <= tasks <= TASKS_MAX:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"component {component!r}: parallelism is {tasks!r}; use 1 to {TASKS_MAX}: every task tells every task of the "
            "next stage what it sent there",
            component=component,
        )
    return tasks


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def require_sink(sink: SinkSpec, where: str) -> None:
    """Raise TopologyError where this is no sink."""
    if not lacks(sink, "name", "target", "check", "open", "placed"):
        if not lacks(sink, "modes", "table_key", "check_sources", "description"):
            return
        instead = "let its class inherit stormproof.sinks.protocol.Sink, which has the methods that it lacks"
        raise TopologyError(f"{where}: {shown(sink)} is no sink; {instead}", argument="sinks")
    if isinstance(sink, (list, tuple)):
        instead = "give them one by one: .into(one, other)"
    elif not lacks(sink, "kind", "target", "make"):
        instead = "it is a state: give it a name among the sinks, as in StateSink('totals', ...)"
    else:
        instead = instead_of(sink, "give one like DeltaSink('lake/table') or PostgresSink('table')")
    raise TopologyError(f"{where}: {shown(sink)} is no sink; {instead}", argument="sinks")


def _require_fold(component: str, aggregation: AnyAggregation) -> None:
    """Raise TopologyError where results of two batches do not make one: such cannot be kept across batches."""
    if isinstance(aggregation, UserAggregation):
        if aggregation.combines:
            return
        why = f"a {aggregation.kind}'s values of two batches do not make one; write a CombinerAggregator"
    elif aggregation.kind is AggregationKind.MEAN:
        why = (
            f"two means do not make one; write total=sum_({aggregation.field!r}), n=count() and divide when you read "
            "(count() also counts NULLs: filter them out before)"
        )
    elif aggregation.kind is AggregationKind.DISTINCT:
        why = (
            f"two distinct counts do not make one; add {aggregation.field!r} to the fields of group_by, write n=count(), "
            "and count the rows when you read"
        )
    else:
        return
    raise TopologyError(
        f"component {component!r}: {aggregation.output} = {aggregation.name} can't be persisted across batches: {why}",
        component=component,
        field=aggregation.output,
    )


def _fold_of(aggregation: AnyAggregation) -> Fold:
    """How a batch's result is added to what is held."""
    if isinstance(aggregation, UserAggregation):
        return Fold.OWN
    return {AggregationKind.MIN: Fold.MIN, AggregationKind.MAX: Fold.MAX}.get(aggregation.kind, Fold.SUM)


def _alike(one: pa.Schema, other: pa.Schema) -> bool:
    """Whether two streams have the same fields, NULLs aside."""
    return bool(one.names == other.names and one.types == other.types)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def _refuse_twice(component: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise TopologyError(
                f"component {component!r}: field {name!r} stands twice", component=component, field=name
            )
        seen.add(name.lower())


def _streams(
    bolt: str, declared: Streams, schema: SchemaLike | None, streams: Mapping[str, SchemaLike] | None
) -> dict[str, pa.Schema]:
    """A bolt's output streams: what `bolt` was told, else what its class declares."""
    if schema is None and streams is None:
        if isinstance(declared, Mapping):
            streams = declared
        else:
            schema = declared
    if streams is not None and not isinstance(streams, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"bolt {bolt!r}: streams is {shown(streams)}; it must be a mapping, like {{'late': 'word string'}}",
            component=bolt,
        )
    found = {} if schema is None else {DEFAULT_STREAM: schema_for(f"bolt {bolt!r}", bolt, schema)}
    for name, given in (streams or {}).items():
        if name in found:
            raise TopologyError(
                f"bolt {bolt!r}: schema= and streams= both say what stream {name!r} gives; leave one of them out",
                component=bolt,
                stream=name,
            )
        checked_name(name, f"bolt {bolt!r}: stream")
        found[name] = schema_for(f"bolt {bolt!r}, stream {name!r}", bolt, given)
    return found
