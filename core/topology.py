"""The topology graph: named components, checked as they are added."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.aggregation import Aggregation
from stormproof.core.errors import TopologyError
from stormproof.core.guarantee import Guarantee
from stormproof.core.keyhash import can_be_key
from stormproof.core.sink import Fold, SinkInput, SinkSpec
from stormproof.core.source.protocol import Source

NAME_MAX_CHARACTERS: Final = 64
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
    ARROW = "arrow"
    """A record batch to a record batch, and for each row of that the row that it was made of."""


@dataclass(frozen=True, slots=True)
class Spout:
    """Where messages come from; the graph's root."""

    name: str
    source: Source
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Operation:
    """A function over tuples. `fields` are its arguments; `schema` is what it gives."""

    name: str
    parent: str
    kind: OperationKind
    function: UserFunction
    fields: tuple[str, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Groups within a batch. `persistent`: the results are folded into what its sinks hold."""

    name: str
    parent: str
    keys: tuple[str, ...]
    aggregations: tuple[Aggregation, ...]
    persistent: bool
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class SinkComponent:
    """Where results go."""

    name: str
    parent: str
    spec: SinkSpec
    input: SinkInput

    @property
    def schema(self) -> pa.Schema:
        """The rows that arrive."""
        return self.input.schema


Component: TypeAlias = Spout | Operation | Aggregate | SinkComponent


class TopologyGraph:
    """A tree of named components: one spout, operations and aggregates, and a sink at every end.

    Each component names a parent that is there already, so that there cannot be a cycle. `guarantee` is the default of
    `run`; None is exactly-once.
    """

    def __init__(self, name: str, guarantee: Guarantee | str | None = None) -> None:
        self.name = checked_name(name, "topology")
        self.guarantee = None if guarantee is None else as_guarantee(guarantee)
        self._components: dict[str, Component] = {}

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, each after its parent."""
        return tuple(self._components.values())

    @property
    def spout(self) -> Spout:
        """The one spout.

        Raises:
            TopologyError: there is none.
        """
        for component in self._components.values():
            if isinstance(component, Spout):
                return component
        raise TopologyError(f"topology {self.name!r} is empty; begin with t.stream(name, source)")

    @property
    def source(self) -> Source:
        """The spout's source."""
        return self.spout.source

    @property
    def sinks(self) -> tuple[SinkSpec, ...]:
        """The sinks, in the order in which they were added."""
        return tuple(c.spec for c in self._components.values() if isinstance(c, SinkComponent))

    def children(self, name: str) -> tuple[Component, ...]:
        """The components that subscribe to this one, in the order in which they were added."""
        return tuple(c for c in self._components.values() if not isinstance(c, Spout) and c.parent == name)

    def schema_of(self, name: str) -> pa.Schema:
        """The tuples that a component gives."""
        return self._component(name).schema

    def add_spout(self, name: str, source: Source) -> str:
        """Add the spout."""
        for component in self._components.values():
            if isinstance(component, Spout):
                raise TopologyError(
                    f"topology {self.name!r} has the spout {component.name!r}; a second one ({name!r}) is not supported "
                    "yet",
                    component=name,
                )
        return self._add(Spout(checked_name(name, "spout"), source, source.decoder.schema))

    def add_operation(
        self,
        name: str | None,
        parent: str,
        kind: OperationKind,
        function: UserFunction,
        *,
        fields: Sequence[str],
        schema: pa.Schema | None,
    ) -> str:
        """Add a function. No fields: all of them, in order. No schema: that of its input."""
        given = self._stream_schema(parent)
        if not callable(function):
            raise TopologyError(f"{kind} needs a function, got {function!r}", parent=parent)
        name = self._own_name(name, kind, function)
        self._require_fields(name, fields, given)
        taken = tuple(fields) or tuple(given.names)
        return self._add(Operation(name, parent, kind, function, taken, given if schema is None else schema))

    def add_aggregate(
        self,
        name: str | None,
        parent: str,
        keys: Sequence[str],
        aggregations: Sequence[Aggregation],
        *,
        persistent: bool,
    ) -> str:
        """Add groups."""
        given = self._stream_schema(parent)
        name = self._own_name(name, "aggregate", None)
        if not keys:
            raise TopologyError(
                f"component {name!r}: group_by needs at least one field; known: {', '.join(given.names)}"
            )
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
        results = [a.result(given, name) for a in aggregations]
        _refuse_twice(name, [*keys, *(a.output for a in aggregations)])
        schema = pa.schema([given.field(key) for key in keys] + results)
        return self._add(Aggregate(name, parent, tuple(keys), tuple(aggregations), persistent, schema))

    def add_sink(self, parent: str, spec: SinkSpec) -> str:
        """Add a sink; its own name is the component's.

        Raises:
            TopologyError: the name is taken, or the sink cannot take such rows.
        """
        component = self._component(parent)
        if isinstance(component, SinkComponent):
            raise TopologyError(f"nothing can follow the sink {parent!r}", component=parent)
        input_ = SinkInput(component.schema)
        if isinstance(component, Aggregate) and component.persistent:
            input_ = SinkInput(component.schema, component.keys, {a.output: Fold.SUM for a in component.aggregations})
        name = checked_name(spec.name, "sink")
        # What a sink can take is known now; whether it serves the guarantee, again when one is chosen.
        spec.check(input_, self.guarantee or Guarantee.AT_LEAST_ONCE)
        return self._add(SinkComponent(name, parent, spec, input_))

    def validate(self) -> None:
        """Check what can only be seen at the end.

        Raises:
            TopologyError: there is no spout, or a component leads to no sink.
        """
        spout = self.spout
        if not self.sinks:
            raise TopologyError(
                f"topology {self.name!r} has no sink; end {spout.name!r} with .into(...)", component=spout.name
            )
        for component in self._components.values():
            if not isinstance(component, SinkComponent) and not self.children(component.name):
                raise TopologyError(
                    f"topology {self.name!r}: component {component.name!r} leads nowhere; end it with .into(...), or "
                    "leave it out",
                    component=component.name,
                )

    def _component(self, name: str) -> Component:
        component = self._components.get(name)
        if component is None:
            raise TopologyError(
                f"no component {name!r}; known: {', '.join(self._components) or 'none'}", component=name
            )
        return component

    def _stream_schema(self, parent: str) -> pa.Schema:
        component = self._component(parent)
        if isinstance(component, SinkComponent):
            raise TopologyError(f"nothing can follow the sink {parent!r}", component=parent)
        if isinstance(component, Aggregate) and component.persistent:
            raise TopologyError(
                f"component {parent!r} is a persistent aggregate: what it gives is folded into sinks, so only "
                ".into(...) can follow; use .agg(...) for groups of a batch",
                component=parent,
            )
        return component.schema

    def _require_fields(self, name: str, fields: Sequence[str], schema: pa.Schema) -> None:
        for field in fields:
            if field not in schema.names:
                raise TopologyError(
                    f"component {name!r}: unknown field {field!r}; known: {', '.join(schema.names)}",
                    component=name,
                    field=field,
                )
        _refuse_twice(name, fields)

    def _own_name(self, name: str | None, kind: str, function: UserFunction | None) -> str:
        if name is not None:
            return checked_name(name, "component")
        called = getattr(function, "__name__", "")
        base = called if isinstance(called, str) and _NAME.fullmatch(called) and called != "<lambda>" else kind
        base = base[: NAME_MAX_CHARACTERS - 4]
        names = [base, *(f"{base}-{i}" for i in range(2, len(self._components) + 3))]
        return next(n for n in names if n not in self._components)

    def _add(self, component: Component) -> str:
        for there in self._components.values():
            if there.name.lower() == component.name.lower():
                raise TopologyError(
                    f"topology {self.name!r} has two components called {component.name!r}; give one of them another "
                    "name",
                    component=component.name,
                )
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


def as_guarantee(guarantee: Guarantee | str) -> Guarantee:
    """The guarantee by its name.

    Raises:
        TopologyError: there is none of that name.
    """
    try:
        return Guarantee(guarantee)
    except ValueError:
        raise TopologyError(f"no guarantee {guarantee!r}; known: {', '.join(g.value for g in Guarantee)}") from None


def _refuse_twice(component: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise TopologyError(
                f"component {component!r}: field {name!r} stands twice", component=component, field=name
            )
        seen.add(name.lower())
