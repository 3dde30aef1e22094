"""The topology graph: named components, checked as they are added.

t = Topology("word-count")
lines = t.spout("lines", PostgresQueue("lines", schema="line string"))
words = t.bolt("split", SplitSentence(), lines.shuffle(), schema="word string")
counts = t.bolt("count", WordCount(), words.fields("word"), schema="word string, n long")
t.sink(DeltaSink("lake/word_counts"), counts)

"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from stormproof.core.base.arguments import instead_of, lacks, shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.bolt import DEFAULT_STREAM, ArrowBolt, BasicBolt, Bolt
from stormproof.core.contract.schema import SchemaLike, refuse_twice, require_fields, require_key, shown_fields
from stormproof.core.contract.sink import SinkInput, SinkMode, SinkSpec, require_mode, require_tables_apart
from stormproof.core.contract.source import Source
from stormproof.core.graph import checks
from stormproof.core.graph.aggregation import Aggregation, AnyAggregation
from stormproof.core.graph.checks import NAME, NAME_MAX_CHARACTERS
from stormproof.core.graph.components import (
    Aggregate,
    BoltComponent,
    BoltInput,
    BoltOrFunction,
    Component,
    Grouping,
    GroupingKind,
    Join,
    Operation,
    OperationKind,
    OutputStream,
    OwnsStreams,
    SinkComponent,
    Spout,
    Subscription,
    UserFunction,
)
from stormproof.core.graph.join import JoinOn
from stormproof.core.source.group import SourceGroup
from stormproof.core.user_code.functions import ASYNC, ASYNC_GENERATOR, GENERATOR, never_begins, refuse_unfit_call

_WITHOUT_SCHEMA: Final = frozenset({OperationKind.FILTER, OperationKind.PEEK, OperationKind.PROJECT})
"""Operations whose result has the fields of their input, unless they name others."""
_KEEPING: Final = frozenset(
    {OperationKind.FILTER, OperationKind.PEEK, OperationKind.EACH, OperationKind.FLAT_EACH, OperationKind.PROJECT}
)
"""Operations whose results have the fields of their input, unchanged; a projection has some of them."""
_BY_KEY: Final = "-by-key"
_ONE_RESULT: Final = (frozenset({ASYNC}), "return the result, or use flat_map for one that yields")
_SEVERAL: Final = (frozenset({ASYNC, GENERATOR, ASYNC_GENERATOR}), "")
_BY_KIND: Final = {
    OperationKind.FLAT_MAP: _SEVERAL,
    OperationKind.FLAT_EACH: _SEVERAL,
    OperationKind.ARROW: (frozenset[str](), "return the record batch and the row numbers"),
}
"""The kinds of functions that an operation takes though calling them runs nothing of them, and what to do about others."""
_ADDING: Final = frozenset({OperationKind.EACH, OperationKind.FLAT_EACH})


class TopologyGraph:
    """An acyclic graph of named components, each added after its inputs: spouts, bolts and aggregates; every end is a sink.

    `guarantee` is the default of `run`; None is exactly-once. `ackers` is the number of acker tasks for a batch that needs a
    verdict message by message; None is one a core; 0 turns tracking off, which is at-most-once. `message_timeout_s` is how
    long a batch's job may show no progress before it is cancelled; None leaves it to the settings.
    """

    def __init__(
        self,
        name: str,
        guarantee: Guarantee | str | None = None,
        *,
        ackers: int | None = None,
        message_timeout_s: float | None = None,
    ) -> None:
        self.name = checks.checked_name(name, "topology")
        self._components: dict[str, Component] = {}
        self.guarantee = None if guarantee is None else as_guarantee(guarantee, f"topology {name!r}")
        if ackers is not None and not (checks.is_number(ackers, int) and ackers >= 0):
            raise TopologyError(f"topology {name!r}: ackers is {ackers!r}; use 1 or more, or 0 for no tracking")
        if message_timeout_s is not None and not (
            checks.is_number(message_timeout_s, int, float) and message_timeout_s > 0
        ):
            raise TopologyError(
                f"topology {name!r}: message_timeout_s is {message_timeout_s!r}; it must be a number of seconds above 0"
            )
        self.ackers = ackers
        self.message_timeout_s = message_timeout_s
        if ackers == 0:
            self.guarantee = self.guarantee or Guarantee.AT_MOST_ONCE
            self.require_tracking(self.guarantee)

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

    def validate(self) -> None:
        """Check the whole topology.

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
        must all have the same fields. `schema` is that of the stream "default", `streams` names further ones; without
        either the bolt's own `streams` count. A bolt without output streams is an end.

        Raises:
            TopologyError: a name is taken or unknown, a grouping's field is missing, there is no input, or a function or a
                bolt's method takes other arguments than it gets.
        """
        checks.checked_name(name, "bolt")
        if not inputs:
            raise TopologyError(f"bolt {name!r} has no input; name one like words.fields('word')", component=name)
        taken = tuple(self._subscription(name, input_) for input_ in inputs)
        checks.require_agreed_tasks(name, taken)
        checks.require_agreed_keys(name, [(input_, self._stream_schema(input_)) for input_ in taken])
        refuse_unfit_bolt(name, bolt)
        if isinstance(bolt, (Bolt, BasicBolt, ArrowBolt)):
            return OutputStream(
                self,
                self._add(
                    BoltComponent(name, taken, bolt, checks.streams_of_bolt(name, bolt.streams, schema, streams))
                ),
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
        checks.require_sink(sink, f"topology {self.name!r}")
        where = f"sink {sink.name!r}"
        if not isinstance(stream, OutputStream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"{where}: {shown(stream)} is no output stream; a sink takes one as it is, without a grouping",
                component=sink.name,
            )
        self._require_own(stream.graph, stream.component, where)
        self.add_sink(Subscription(stream.component, stream.stream), sink)

    # -- used by this class and by Trident's streams -------------------------------------------------------------------

    def add_spout(self, name: str, source: Source) -> str:
        """Add a spout.

        Raises:
            TopologyError: the name is taken or cannot be one, this is no source, or it is there already.
        """
        checks.checked_name(name, "spout")
        if lacks(source, "name", "decoder", "serves", "for_run", "open", "readers", "confirm"):
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
        concurrency: int | None = None,
    ) -> str:
        """Add a function. Without `fields` it takes all of them, in order. Without a schema, where its kind needs none, it
        gives the fields of its input.

        Raises:
            TopologyError: the name cannot be one, a field is unknown, the schema is missing or none, the function takes
                other arguments than it gets, or its concurrency is not one.
        """
        given = self._stream_schema(inputs[0])
        name = self._own_name(name, kind, function)
        if not callable(function):
            raise TopologyError(
                f"component {name!r}: {kind} needs a function, got {shown(function)}; write one that takes fields, "
                f"like f({', '.join(given.names)})",
                component=name,
            )
        taken, instead = _BY_KIND.get(kind, _ONE_RESULT)
        is_async = refuse_unfit_function(name, function, taken=taken, instead=instead) in (ASYNC, ASYNC_GENERATOR)
        concurrency = checks.checked_concurrency(name, concurrency, is_async=is_async)
        checks.require_agreed_tasks(name, inputs)
        for other in inputs[1:]:
            if not checks.alike(self._stream_schema(other), given):
                raise TopologyError(
                    f"component {name!r}: its inputs have different fields ({shown_fields(given)} and "
                    f"{shown_fields(self._stream_schema(other))}); a function takes one kind of tuple, "
                    "a BasicBolt several",
                    component=name,
                )
        self._require_fields(name, fields, given)
        taken_fields = tuple(fields) or tuple(given.names)
        if kind is not OperationKind.PROJECT:
            checks.require_call(name, kind, function, taken_fields, named=bool(fields))
        if schema is None and kind in _WITHOUT_SCHEMA:
            nullable = [any(self._stream_schema(i).field(f.name).nullable for i in inputs) for f in given]
            found = pa.schema([f.with_nullable(n) for f, n in zip(given, nullable, strict=True)])
        else:
            found = checks.schema_for(f"component {name!r}", name, schema)
        if kind in _ADDING:
            both = [*given, *found]
            refuse_twice(f"component {name!r}", name, [f.name for f in both])
            found = pa.schema(both)
        return self._add(
            Operation(name, tuple(inputs), kind, function, taken_fields, found, concurrency, is_async=is_async)
        )

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
        """Add an aggregation by `keys`; without keys all rows are one group."""
        given = self._stream_schema(input_)
        name = self._own_name(name, "aggregate", None)
        if not aggregations:
            raise TopologyError(f"component {name!r}: no results; name one like n=count()", component=name)
        self._require_fields(name, keys, given)
        for key in keys:
            require_key(f"component {name!r}", name, key, given.field(key).type, "a group's key")
        results: list[pa.Field] = []
        for a in aggregations:
            if isinstance(a, Aggregation):
                results.append(a.result(given, name))
            else:
                self._require_fields(name, a.fields, given)
                checks.refuse_unfit_aggregate(name, a)
                results += list(a.results)
            if persistent:
                checks.require_fold(name, a)
        refuse_twice(f"component {name!r}", name, [*keys, *(f.name for f in results)])
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
        checks.require_agreed_tasks(name, [input_])
        refuse_twice(f"component {name!r}", name, schema.names)
        return self._add(BoltComponent(name, (input_,), bolt, {DEFAULT_STREAM: schema}, reads_state=True))

    def add_sink(self, input_: Subscription, spec: SinkSpec) -> str:
        """Add a sink; its own name is the component's.

        Raises:
            TopologyError: the name is taken, the sink cannot take such rows, or another sink has its table.
        """
        checks.require_sink(spec, f"component {input_.component!r}")
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
            folds = {a.output: checks.fold_of(a) for a in component.aggregations}
            rows = SinkInput.for_fold(schema, component.keys, folds)
        rows = spec.input_of(rows)
        name = checks.checked_name(spec.name, "sink")
        require_mode(spec, rows)
        # Checked again under the guarantee of the run, which may be chosen later.
        spec.check(rows, self.guarantee or Guarantee.AT_LEAST_ONCE)
        self._require_new(name)
        require_tables_apart(self.name, [*self.sinks, spec])
        if rows.mode is SinkMode.UPSERT and not self._is_together(input_, rows.keys):
            input_ = self._by_key(input_, name, rows.keys)
        return self._add(SinkComponent(name, input_, spec, rows))

    def _is_together(self, input_: Subscription, keys: tuple[str, ...]) -> bool:
        """Whether all rows of a key are in one task already, by an exchange on some of its columns that stand unchanged."""
        component = self._component(input_.component)
        match component:
            case Aggregate():
                return not component.local and set(component.keys) <= set(keys) and bool(component.keys)
            case Operation(inputs=(before,)) if component.kind in _KEEPING:
                kept = set(keys)
                if component.kind is OperationKind.PROJECT:
                    same = zip(component.schema.names, component.fields, strict=True)
                    kept &= {name for name, taken in same if name == taken}
                if before.grouping.fused:
                    return self._is_together(before, tuple(kept))
                by_fields = before.grouping.kind is GroupingKind.FIELDS and set(before.grouping.fields) <= kept
                return by_fields or before.grouping.kind is GroupingKind.GLOBAL
            case _:
                return False

    def _by_key(self, input_: Subscription, sink: str, keys: tuple[str, ...]) -> Subscription:
        """The same rows behind an exchange on the key, for a sink that takes the last row of each."""
        name = f"{sink[: NAME_MAX_CHARACTERS - len(_BY_KEY)]}{_BY_KEY}"
        grouped = replace(input_, grouping=Grouping(GroupingKind.FIELDS, keys))
        return Subscription(self.add_operation(name, [grouped], OperationKind.PROJECT, by_key, fields=(), schema=None))

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
            checks.checked_tasks(subscription.tasks, name)
        emitter = self._component(subscription.component)
        if subscription.grouping.kind is GroupingKind.DIRECT:
            why = None if isinstance(emitter, BoltComponent) else "is none"
            if isinstance(emitter, BoltComponent) and isinstance(emitter.bolt, ArrowBolt):
                why = "is an ArrowBolt, which cannot: make it a BasicBolt, or use custom()"
            if why is not None:
                raise TopologyError(
                    f"bolt {name!r}: a direct grouping needs a bolt that names tasks with emit(..., task=n); "
                    f"{emitter.name!r} {why}",
                    component=name,
                )
        return subscription

    def _require_fields(self, name: str, fields: Sequence[str], schema: pa.Schema) -> None:
        where = f"component {name!r}"
        require_fields(where, name, fields, schema)
        refuse_twice(where, name, fields)

    def _require_own(self, graph: OwnsStreams | None, component: str, where: str) -> None:
        """Raise TopologyError where a component is another topology's; this one may have a component of that name, too."""
        if graph is not None and graph is not self:
            raise TopologyError(
                f"{where}: {component!r} belongs to topology {graph.name!r}, which is another one than {self.name!r} here; "
                "use output streams of this one",
                component=component,
            )

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

    def _own_name(self, name: str | None, kind: str, function: UserFunction | None) -> str:
        if name is not None:
            return checks.checked_name(name, "component")
        called = getattr(function, "__name__", "")
        base = called if isinstance(called, str) and NAME.fullmatch(called) and called != "<lambda>" else kind
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


def by_key(*values: object) -> object:
    """Stands for the exchange before a keyed sink; never called."""
    return values


# ---- refuses bolts and functions that would lose tuples silently, before anything runs

_CALLS: Final[Mapping[type, Mapping[str, tuple[str, ...]]]] = {
    Bolt: {"prepare": ("context", "collector"), "execute": ("tuple",), "finish": (), "cleanup": ()},
    BasicBolt: {"prepare": ("context",), "execute": ("tuple", "emit"), "cleanup": ()},
    ArrowBolt: {"prepare": ("context",), "execute": ("rows",), "cleanup": ()},
}
"""The methods of each kind of bolt that are called, with their arguments."""
_BOLTS: Final = tuple(_CALLS)


def refuse_unfit_bolt(name: str, bolt: object) -> None:
    """Refuse a bolt that is a class, or with a method that is a generator, is `async`, or takes other arguments.

    Calling a generator or an `async` method runs nothing of it: every tuple would be acked unread.

    Raises:
        TopologyError: the bolt is one of these.
    """
    if isinstance(bolt, type) and issubclass(bolt, _BOLTS):
        raise TopologyError(
            f"bolt {name!r}: {bolt.__name__} is a class; give an object of it: {bolt.__name__}()", component=name
        )
    calls = next((calls for kind, calls in _CALLS.items() if isinstance(bolt, kind)), {})
    for called, given in calls.items():
        method = getattr(bolt, called)
        kind = never_begins(method)
        if kind is not None:
            instead = "call emit for each tuple" if isinstance(bolt, BasicBolt) else "call what it needs, and return"
            raise TopologyError(
                f"bolt {name!r}: {type(bolt).__name__}.{called} is {kind}, and calling it runs nothing of it; {instead}",
                component=name,
            )
        refuse_unfit_call(name, f"bolt {name!r}", method, given, "change its parameters")


def refuse_unfit_function(name: str, function: object, *, taken: Collection[str], instead: str) -> str | None:
    """Refuse a function of a kind that is not `taken`, where calling it runs nothing of it. Its kind: see `never_begins`.

    Raises:
        TopologyError: the function is of such a kind.
    """
    kind = never_begins(function)
    if kind is not None and kind not in taken:
        raise TopologyError(
            f"component {name!r}: its function is {kind}, and calling it runs nothing of it; {instead}", component=name
        )
    return kind
