"""The plan that a topology is compiled to: stages, and in each the nodes that one task runs.

Components that need no exchange between them run in one task; rows that need one cross into a later stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.base.errors import Json, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import AnyBolt, Bolt
from stormproof.core.contract.schema import to_ddl
from stormproof.core.contract.sink import Lineage, SinkInput, SinkSpec
from stormproof.core.contract.source import Decoder, ShownIds
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.components import (
    Aggregate,
    BoltComponent,
    Component,
    Grouping,
    GroupingKind,
    Join,
    Operation,
    OperationKind,
    SinkComponent,
    Spout,
    Subscription,
    UserFunction,
)
from stormproof.core.graph.join import JoinOn
from stormproof.core.graph.topology import TopologyGraph, by_key
from stormproof.core.source.spouts import id_of
from stormproof.core.tracking.partners import Meetings


@dataclass(frozen=True, slots=True)
class OperationNode:
    """A function; `children` are the keys of the nodes of this stage that take its results. `concurrency` and `is_async`
    are those of `Operation`.
    """

    component: str
    kind: OperationKind
    function: UserFunction
    fields: tuple[str, ...]
    schema: pa.Schema
    children: tuple[str, ...]
    concurrency: int | None = None
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class BoltNode:
    """A bolt that is an object; a task has one copy of it for all its inputs. `children` are by output stream.

    `consumers` are the components behind it with the number of tasks that each was given (None: the engine's); `direct`
    are, by stream, those with a direct grouping.
    """

    component: str
    bolt: AnyBolt
    streams: Mapping[str, pa.Schema]
    children: Mapping[str, tuple[str, ...]]
    consumers: Mapping[str, int | None]
    direct: Mapping[str, tuple[str, ...]]
    reads_state: bool = False


@dataclass(frozen=True, slots=True)
class CombineNode:
    """Rows leave the stage for the exchange, combined by key where the aggregations allow it. `sinks` are those that the
    keys reach unchanged; `tasks` is the number of tasks that the exchange leads to, None: the engine's.
    """

    edge: int
    group: GroupBy
    sinks: tuple[str, ...]
    tasks: int | None = None


@dataclass(frozen=True, slots=True)
class GatherNode:
    """Each task groups its own rows, and gives the results at its end."""

    component: str
    group: GroupBy
    children: tuple[str, ...]
    sinks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinSideNode:
    """Rows that wait for the end of their task, to be joined: those of the left side (0) or the right one (1)."""

    component: str
    side: int


@dataclass(frozen=True, slots=True)
class JoinNode:
    """The rows that wait on both sides are joined at the end of the task."""

    component: str
    on: JoinOn
    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendNode:
    """Rows leave the stage for a later one, unchanged, each for the tasks that the grouping gives. `sinks` are those that
    they reach unchanged: a row that one cannot hold fails its message here.
    """

    edge: int
    grouping: Grouping
    component: str
    tasks: int | None = None
    sinks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Rows end in a sink, with the columns of `lineage` behind their own."""

    sink: str
    lineage: Lineage | None = None


Node: TypeAlias = OperationNode | BoltNode | CombineNode | GatherNode | JoinSideNode | JoinNode | SendNode | WriteNode


def taker_of(node: Node) -> str:
    """The component or sink that takes the tuples which are handed to a node."""
    match node:
        case WriteNode():
            return node.sink
        case CombineNode() | GatherNode():
            return node.group.component
        case _:
            return node.component


@dataclass(frozen=True, slots=True)
class Edge:
    """What crosses an exchange: from one component's stream to another component, `hops` stages further.

    `given` is the schema of the rows as they were emitted; `group` says how an aggregate merges them. `to` is the key of
    the node that takes them, `tasks` the number of tasks that they are divided among (None: the engine's). `meets`: the
    component joins its inputs by the key that the grouping names.
    """

    number: int
    origin: str
    stream: str
    component: str
    hops: int
    given: pa.Schema
    group: GroupBy | None
    to: str
    tasks: int | None = None
    grouping: Grouping | None = None
    meets: bool = False

    def schema(self, *, per_message: bool) -> pa.Schema:
        """The schema of the rows that cross: partial rows where they are combined before."""
        if self.group is None or per_message or not self.group.combines:
            return self.given
        return self.group.partial


@dataclass(frozen=True, slots=True)
class StageEntry:
    """Where rows enter a stage: from a spout (no edge), or from an exchange. `children` are keys of nodes."""

    component: str
    stream: str
    edge: Edge | None
    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one task runs. Each of `nodes` comes after all nodes that it takes rows from.

    `relayed` are edges that only pass through on their way to a later stage.
    """

    entries: tuple[StageEntry, ...]
    nodes: Mapping[str, Node]
    relayed: tuple[Edge, ...] = ()

    @property
    def steps(self) -> Mapping[str, int]:
        """The number of each component and sink, from 1 on, in the order in which rows meet them; their ends come last."""
        ends = (CombineNode, SendNode, WriteNode, JoinSideNode)
        nodes = sorted(self.nodes.values(), key=lambda node: isinstance(node, ends))
        return {taker_of(node): number for number, node in enumerate(nodes, 1)}

    @property
    def reads_state(self) -> bool:
        """Whether a bolt in it reads a state that the topology's batches change."""
        return any(isinstance(n, BoltNode) and n.reads_state for n in self.nodes.values())

    def tasks(self, parallelism: int) -> int:
        """How many tasks a stage behind an exchange has: enough for all that comes in and passes through."""
        edges = [entry.edge for entry in self.entries if entry.edge is not None]
        return max((edge.tasks or parallelism for edge in (*edges, *self.relayed)), default=parallelism)


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled topology without its sources; picklable where its functions are (by cloudpickle, by value).

    `decoders` has one for each spout. `ackers` is the number of acker tasks where each message gets a verdict of its own
    (None: one a core). `fingerprint` is equal for plans of the same shape, names, schemas and sinks, whatever their
    functions. `serial`: its jobs read a state that earlier batches change, so a batch runs only after the one before it is
    committed. `shown_ids` makes messages' ids inside tasks; None: the sources have none for whole columns. `meetings`
    None: no messages meet.
    """

    topology: str
    guarantee: Guarantee
    decoders: Mapping[str, Decoder]
    stages: tuple[StagePlan, ...]
    sinks: Mapping[str, SinkInput] = field(default_factory=dict[str, SinkInput])
    sink_specs: tuple[SinkSpec, ...] = ()
    fingerprint: str = ""
    ackers: int | None = None
    message_timeout_s: float | None = None
    serial: bool = False
    shown_ids: ShownIds | None = None
    meetings: Meetings | None = None

    @property
    def hides_tasks(self) -> bool:
        """Whether no function can tell how many tasks there are: no bolt is an object, and rows cross by keys of aggregates
        alone.
        """
        nodes = [node for stage in self.stages for node in stage.nodes.values()]
        return all(isinstance(node, OperationNode | CombineNode | WriteNode) for node in nodes)


# ---- a topology is cut into stages

FUSED_MAX: Final = 200
"""The largest number of components that may follow each other without an exchange."""


def compile_topology(topology: TopologyGraph, guarantee: Guarantee) -> Plan:
    """Check the whole topology under a guarantee, and cut it into stages at its exchanges.

    Raises:
        TopologyError: a component leads nowhere, or a source or a sink cannot serve the guarantee.
    """
    topology.validate()
    topology.require_tracking(guarantee)
    meetings = _meetings(topology)
    inputs: dict[str, SinkInput] = {}
    for component in topology.components:
        if isinstance(component, SinkComponent):
            spouts = _spouts_behind(topology, component)
            component.spec.check_sources({spout.name: spout.source.kind for spout in spouts}, guarantee)
    for component in topology.components:
        if isinstance(component, SinkComponent):
            component.spec.check(component.input, guarantee)
            inputs[component.name] = component.input
        elif isinstance(component, Spout):
            meets = guarantee.tracked and meetings is not None and component.name in meetings.before
            _require_served(component, guarantee, meets=meets)
    return Plan(
        topology=topology.name,
        guarantee=guarantee,
        decoders={spout.name: spout.source.decoder for spout in topology.spouts},
        stages=_Compiler(topology).stages(),
        sinks=inputs,
        sink_specs=topology.sinks,
        fingerprint=_fingerprint(topology),
        ackers=topology.ackers,
        message_timeout_s=topology.message_timeout_s,
        serial=any(isinstance(c, BoltComponent) and c.reads_state for c in topology.components),
        shown_ids=_shown_ids(topology),
        meetings=meetings,
    )


def _meets(component: Component) -> bool:
    if isinstance(component, BoltComponent):
        by_key = all(input_.grouping.kind is GroupingKind.FIELDS for input_ in component.inputs)
        return isinstance(component.bolt, Bolt) and by_key and len(component.inputs) > 1
    return isinstance(component, Join)


def _meetings(topology: TopologyGraph) -> Meetings | None:
    before, chained = set[str](), False
    for component in reversed(topology.components):  # each stands after its inputs
        chained |= _meets(component) and component.name in before
        if _meets(component) or component.name in before:
            before.update(input_.component for input_ in component.inputs)
    spouts = frozenset(index for index, spout in enumerate(topology.spouts) if spout.name in before)
    if not before:
        return None
    several = len(topology.spouts) > 1
    return Meetings(frozenset(before), spouts if several else None, id_of if several else None, chained)


def _shown_ids(topology: TopologyGraph) -> ShownIds | None:
    """What makes messages' ids inside tasks; None where a source has none, and no sink stores them.

    Raises:
        TopologyError: a sink stores them, and a source has none, or one whose ids are others than its `shown_id`.
    """
    storing = [
        component.name
        for component in topology.components
        if isinstance(component, SinkComponent) and (component.input.lineage or Lineage(None, None)).message is not None
    ]
    for spout in topology.spouts if storing else ():
        ids = spout.source.shown_ids()
        if ids is None:
            raise TopologyError(
                f"sink {storing[0]!r} stores messages' ids, and the source of spout {spout.name!r} has none for whole "
                "columns: give the source a method shown_ids(); or store the txid alone, with lineage=Lineage(message=None)",
                sink=storing[0],
                component=spout.name,
            )
        numbers, origins = pa.array([0, 7, 123_456]), pa.array([0, 0, 89])
        made = ids.shown(numbers, origins).to_pylist()
        asked = [spout.source.shown_id(*pair) for pair in zip(numbers.to_pylist(), origins.to_pylist(), strict=True)]
        if made != asked:
            raise TopologyError(
                f"sink {storing[0]!r} stores messages' ids, and the source of spout {spout.name!r} shows message 123456 of "
                f"origin 89 as {asked[-1]!r} by shown_id() and as {made[-1]!r} by shown_ids(): override both, alike",
                sink=storing[0],
                component=spout.name,
            )
    return topology.source.shown_ids()


def _spouts_behind(topology: TopologyGraph, sink: SinkComponent) -> list[Spout]:
    """The spouts whose messages can reach a sink."""
    wanted = {sink.name}
    found: list[Spout] = []
    for component in reversed(topology.components):  # each stands after its inputs
        if component.name in wanted:
            wanted.update(input_.component for input_ in component.inputs)
            if isinstance(component, Spout):
                found.append(component)
    return found[::-1]


def _require_served(spout: Spout, guarantee: Guarantee, *, meets: bool) -> None:
    reason = spout.source.serves(guarantee)
    if reason is None and meets and not spout.source.keeps_mates:
        reason = (
            f"messages meet at a join behind it, and {type(spout.source).__name__} does not open messages again together: a "
            "retry would be without partners. Derive it from NumberedSource, RedeliveringSource or PendingSource; or heed "
            "Limit.whole and Limit.mates in open(), set keeps_mates to True, and test it with SourceConformance"
        )
    if reason is not None:
        raise TopologyError(
            f"spout {spout.name!r}: its source cannot serve {guarantee.value}: {reason}",
            component=spout.name,
            guarantee=guarantee.value,
        )


class _Compiler:
    """Puts each component into the earliest stage that all of its inputs can reach.

    An input that needs an exchange comes from an earlier stage, and passes through the stages between. An input that needs
    none comes from the same stage, unless another input of the bolt puts the bolt into a later one: then it crosses, too,
    and each task's rows go to the task of the same number.
    """

    def __init__(self, topology: TopologyGraph) -> None:
        self._topology = topology
        self._stage: dict[str, int] = {}
        self._edges: list[tuple[int, Edge]] = []
        for component in topology.components:
            self._stage[component.name] = max((self._after(component, i) for i in component.inputs), default=0)
        self._require_shallow()

    def _require_shallow(self) -> None:
        """Components without an exchange between them call each other, so Python's stack bounds their number."""
        depth: dict[str, int] = {}
        for component in self._topology.components:
            stage = self._stage[component.name]
            before = [depth[i.component] for i in component.inputs if self._stage[i.component] == stage]
            depth[component.name] = 1 + max(before, default=0)
            if depth[component.name] > FUSED_MAX:
                raise TopologyError(
                    f"component {component.name!r}: more than {FUSED_MAX} components follow each other without an exchange; "
                    "do the work of several in one function, or let one of them subscribe with shuffle()",
                    component=component.name,
                )

    def _after(self, component: Component, input_: Subscription) -> int:
        exchanged = isinstance(component, Aggregate) and not component.local
        return self._stage[input_.component] + (exchanged or not input_.grouping.fused)

    def stages(self) -> tuple[StagePlan, ...]:
        number = 1 + max(self._stage.values())
        nodes: list[dict[str, Node]] = [{} for _ in range(number)]
        entries: list[list[StageEntry]] = [[] for _ in range(number)]
        for component in self._topology.components:
            stage = self._stage[component.name]
            match component:
                case Spout():
                    entries[0].append(
                        StageEntry(component.name, "default", None, self._children(component, "default", nodes))
                    )
                case Operation():
                    nodes[stage][component.name] = OperationNode(
                        component.name,
                        component.kind,
                        component.function,
                        component.fields,
                        component.schema,
                        self._children(component, "default", nodes),
                        component.concurrency,
                        component.is_async,
                    )
                case BoltComponent():
                    nodes[stage][component.name] = self._bolt(component, nodes)
                case Join():
                    for side in (0, 1):
                        nodes[stage][_side(component.name, side)] = JoinSideNode(component.name, side)
                    nodes[stage][component.name] = JoinNode(
                        component.name, component.on, self._children(component, "default", nodes)
                    )
                case Aggregate() if component.local:
                    nodes[stage][component.name] = GatherNode(
                        component.name, _group_of(component), self._children(component, "default", nodes)
                    )
                case Aggregate():
                    # Its results enter its stage merged; its node, which combines, is in the stage before.
                    (edge,) = (e for _, e in self._edges if e.component == component.name)
                    entries[stage].append(
                        StageEntry(component.name, "default", edge, self._children(component, "default", nodes))
                    )
                case SinkComponent():
                    pass  # its node was made with the stream that it ends
        for from_stage, edge in self._edges:
            if edge.group is None:
                entries[from_stage + edge.hops].append(StageEntry(edge.origin, edge.stream, edge, (edge.to,)))
        return tuple(StagePlan(tuple(entries[stage]), nodes[stage], self._relayed(stage)) for stage in range(number))

    def _relayed(self, stage: int) -> tuple[Edge, ...]:
        return tuple(edge for start, edge in self._edges if start < stage < start + edge.hops)

    def _bolt(self, component: BoltComponent, nodes: list[dict[str, Node]]) -> BoltNode:
        children: dict[str, tuple[str, ...]] = {}
        direct: dict[str, tuple[str, ...]] = {}
        consumers: dict[str, int | None] = {}
        for stream in component.streams:
            for consumer, subscription in self._topology.subscribers(component.name, stream):
                consumers[consumer.name] = _tasks_of(consumer)
                if subscription.grouping.kind is GroupingKind.DIRECT:
                    direct[stream] = (*direct.get(stream, ()), consumer.name)
            children[stream] = self._children(component, stream, nodes)
        return BoltNode(
            component.name, component.bolt, component.streams, children, consumers, direct, component.reads_state
        )

    def _children(self, parent: Component, stream: str, nodes: list[dict[str, Node]]) -> tuple[str, ...]:
        """The keys of the nodes that take a stream; nodes at the end of a stage are made here."""
        stage = self._stage[parent.name]
        found: list[str] = []
        for number, (component, subscription) in enumerate(self._topology.subscribers(parent.name, stream)):
            key = f"{parent.name}/{stream}>{component.name}#{number}"
            match component:
                case SinkComponent():
                    nodes[stage][key] = WriteNode(component.name, component.input.lineage)
                case Aggregate() if not component.local:
                    group = _group_of(component)
                    edge = self._edge(stage, parent, stream, component, group, subscription)
                    reached = [
                        c.name for c, _ in self._topology.subscribers(component.name) if isinstance(c, SinkComponent)
                    ]
                    nodes[stage][key] = CombineNode(edge.number, group, tuple(reached), edge.tasks)
                case _ if self._stage[component.name] == stage:
                    key = component.name
                case _:
                    edge = self._edge(stage, parent, stream, component, None, subscription)
                    nodes[stage][key] = SendNode(
                        edge.number, subscription.grouping, component.name, edge.tasks, self._reached(component)
                    )
            found.append(key)
        return tuple(found)

    def _reached(self, component: Component) -> tuple[str, ...]:
        """The keyed sinks behind the exchange that was put before them."""
        if not isinstance(component, Operation) or component.function is not by_key:
            return ()
        return tuple(c.name for c, _ in self._topology.subscribers(component.name) if isinstance(c, SinkComponent))

    def _edge(
        self,
        stage: int,
        parent: Component,
        stream: str,
        component: Component,
        group: GroupBy | None,
        subscription: Subscription,
    ) -> Edge:
        to = component.name
        if isinstance(component, Join):  # by identity: both sides may be one stream with one key
            to = _side(component.name, 0 if subscription is component.left else 1)
        edge = Edge(
            number=len(self._edges),
            origin=parent.name,
            stream=stream,
            component=component.name,
            hops=self._stage[component.name] - stage,
            given=parent.streams[stream],
            group=group,
            to=to,
            tasks=_tasks_of(component),
            grouping=None if group is not None else subscription.grouping,
            meets=_meets(component),
        )
        self._edges.append((stage, edge))
        return edge


def _side(component: str, side: int) -> str:
    return f"{component}<{side}"


def _group_of(component: Aggregate) -> GroupBy:
    return GroupBy(component.name, component.keys, component.aggregations, component.schema, component.given)


def _tasks_of(component: Component) -> int | None:
    """The number of tasks that the component was given; all its inputs have the same."""
    grouped = isinstance(component, Aggregate) and not component.local
    return next((i.tasks for i in component.inputs if grouped or not i.grouping.fused), None)


def _fingerprint(topology: TopologyGraph) -> str:
    shape: list[Json] = [topology.name, *(_described(c) for c in topology.components)]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()


def _described(component: Component) -> list[Json]:
    inputs: list[Json] = [[i.component, i.stream, i.grouping.kind.value, *i.grouping.fields] for i in component.inputs]
    streams: dict[str, Json] = {name: to_ddl(schema) for name, schema in component.streams.items()}
    base: list[Json] = [type(component).__name__, component.name, inputs, streams]
    match component:
        case Spout():
            return [*base, component.source.name]
        case Operation():
            return [*base, component.kind.value, *component.fields]
        case BoltComponent():
            return base
        case Aggregate():
            results: list[Json] = [f"{a.output}={a.name}" for a in component.aggregations]
            where: list[Json] = ["local"] if component.local else []
            return [*base, list[Json](component.keys), results, component.persistent, *where]
        case Join():
            pairs: list[Json] = [f"{one}={other}" for one, other in component.on.keys]
            return [*base, component.on.kind.value, pairs]
        case SinkComponent():
            return [*base, component.spec.target, *_rule_of(component.input)]


def _rule_of(input_: SinkInput) -> list[Json]:
    rule, lineage = input_.upsert_rule, input_.described_lineage
    described: list[Json] = [rule, [*input_.keys]] if rule else []
    return [*described, lineage] if lineage else described
