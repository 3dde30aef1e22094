"""The components of one topology by name, each after its inputs, and look-ups among them."""

from __future__ import annotations

import pyarrow as pa

from stormproof.core.base.errors import TopologyError
from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.contract.source import Source
from stormproof.core.graph.checks import NAME, NAME_MAX_CHARACTERS, checked_name
from stormproof.core.graph.components import (
    Aggregate,
    Component,
    OwnsStreams,
    SinkComponent,
    Spout,
    Subscription,
    UserFunction,
)
from stormproof.core.source.group import SourceGroup


class ComponentRegistry:
    """Named components. Each is added after its inputs, so the graph has no cycle."""

    def __init__(self, name: str) -> None:
        self.name = name
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
            return checked_name(name, "component")
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
