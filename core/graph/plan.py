"""The plan that a topology is compiled to: stages, and in each the nodes that one task runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import AnyBolt
from stormproof.core.contract.sink import Lineage, SinkInput, SinkSpec
from stormproof.core.contract.source import Decoder, ShownIds
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.components import JoinOn, OperationKind, UserFunction
from stormproof.core.graph.grouping import Grouping
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
class Entry:
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

    entries: tuple[Entry, ...]
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
