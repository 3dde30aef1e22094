"""A topology compiled to stages: what is fused runs in one task, what is grouped crosses an exchange."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from stormproof.core.aggregation import GroupBy
from stormproof.core.errors import Json
from stormproof.core.guarantee import Guarantee
from stormproof.core.schema import to_ddl
from stormproof.core.sink import SinkInput, SinkSpec
from stormproof.core.source.protocol import Decoder
from stormproof.core.topology import (
    Aggregate,
    Component,
    Operation,
    OperationKind,
    SinkComponent,
    Spout,
    TopologyGraph,
    UserFunction,
)


@dataclass(frozen=True, slots=True)
class OperationNode:
    """A function, and what follows it within the stage."""

    component: str
    kind: OperationKind
    function: UserFunction
    fields: tuple[str, ...]
    schema: pa.Schema
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class CombineNode:
    """Rows leave the stage for the exchange, combined by key. `sinks` are those that the keys reach unchanged."""

    edge: int
    grouping: GroupBy
    sinks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Rows end in a sink."""

    sink: str


Node: TypeAlias = OperationNode | CombineNode | WriteNode


@dataclass(frozen=True, slots=True)
class Entry:
    """Where rows enter a stage: from the spout (`edge` -1, no grouping), or from an exchange, to be merged."""

    edge: int
    component: str
    grouping: GroupBy | None
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one task runs."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled topology; picklable where its functions are (by cloudpickle, by value). The source is not in it.

    `fingerprint` tells whether two plans have the same shape, names, schemas and sinks; it says nothing of functions.
    """

    topology: str
    guarantee: Guarantee
    decoder: Decoder
    stages: tuple[StagePlan, ...]
    sinks: Mapping[str, SinkInput] = field(default_factory=dict[str, SinkInput])
    sink_specs: tuple[SinkSpec, ...] = ()
    fingerprint: str = ""


def compile_topology(topology: TopologyGraph, guarantee: Guarantee) -> Plan:
    """Check the whole topology under a guarantee, and cut it into stages at its exchanges.

    Raises:
        TopologyError: a component leads nowhere, or a sink cannot serve the guarantee.
    """
    topology.validate()
    inputs: dict[str, SinkInput] = {}
    for component in topology.components:
        if isinstance(component, SinkComponent):
            component.spec.check(component.input, guarantee)
            inputs[component.name] = component.input
    return Plan(
        topology=topology.name,
        guarantee=guarantee,
        decoder=topology.source.decoder,
        stages=_Compiler(topology).stages(),
        sinks=inputs,
        sink_specs=topology.sinks,
        fingerprint=_fingerprint(topology),
    )


class _Compiler:
    """Walks the graph stage by stage. Every edge between stages is an aggregate, so it spans exactly one exchange."""

    def __init__(self, topology: TopologyGraph) -> None:
        self._topology = topology
        self._edges = 0
        self._next: list[tuple[int, GroupBy, str]] = []

    def stages(self) -> tuple[StagePlan, ...]:
        spout = self._topology.spout.name
        made = [StagePlan((Entry(-1, spout, None, self._children(spout)),))]
        while self._next:
            incoming, self._next = self._next, []
            made.append(
                StagePlan(tuple(Entry(edge, name, grouping, self._children(name)) for edge, grouping, name in incoming))
            )
        return tuple(made)

    def _children(self, name: str) -> tuple[Node, ...]:
        return tuple(self._node(child) for child in self._topology.children(name))

    def _node(self, component: Component) -> Node:
        match component:
            case SinkComponent():
                return WriteNode(component.name)
            case Aggregate():
                grouping = GroupBy(component.name, component.keys, component.aggregations, component.schema)
                edge, self._edges = self._edges, self._edges + 1
                self._next.append((edge, grouping, component.name))
                reached = [c.name for c in self._topology.children(component.name) if isinstance(c, SinkComponent)]
                return CombineNode(edge, grouping, tuple(reached))
            case Operation():
                return OperationNode(
                    component.name,
                    component.kind,
                    component.function,
                    component.fields,
                    component.schema,
                    self._children(component.name),
                )
            case Spout():
                raise AssertionError("a spout has no parent")


def _fingerprint(topology: TopologyGraph) -> str:
    shape: list[Json] = [topology.name, *(_described(c) for c in topology.components)]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()


def _described(component: Component) -> list[Json]:
    base: list[Json] = [type(component).__name__, component.name, to_ddl(component.schema)]
    match component:
        case Spout():
            return [*base, component.source.name]
        case Operation():
            return [*base, component.parent, component.kind.value, *component.fields]
        case Aggregate():
            results: list[Json] = [f"{a.output}={a.kind}({a.field or ''})" for a in component.aggregations]
            return [*base, component.parent, list[Json](component.keys), results, component.persistent]
        case SinkComponent():
            return [*base, component.parent, component.spec.target]
