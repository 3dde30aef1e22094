"""What a topology compiles to, for people and programs: stages, tasks, exchanges, fused components, sinks, guarantees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from stormproof.core.base.errors import Json, TopologyError
from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.bolt import AnyBolt
from stormproof.core.contract.schema import to_ddl
from stormproof.core.graph.components import Aggregate, BoltComponent, Component, Join, Operation, SinkComponent, Spout
from stormproof.core.graph.plan import BoltNode, Edge, GatherNode, JoinNode, OperationNode, Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.user_code.functions import name_of
from stormproof.trident.state.query import NewValues, ReadsState, StateQuery

ENGINES: Final = "the engine's number"
READERS: Final = "one for each part of the source"


@dataclass(frozen=True, slots=True)
class ExplainedComponent:
    """A component: what it does, the components before it, and the fields of its output."""

    name: str
    what: str
    inputs: tuple[str, ...]
    schema: str


@dataclass(frozen=True, slots=True)
class ExplainedStage:
    """Components that are fused into one task. `tasks` None: the engine's number, or in the first stage one for each part of
    the source.
    """

    number: int
    tasks: int | None
    components: tuple[ExplainedComponent, ...]
    passes: tuple[str, ...]
    """The tuples that only pass through, on their way to a later stage."""

    @property
    def tasks_text(self) -> str:
        """The number of tasks, for people."""
        return (READERS if self.number == 0 else ENGINES) if self.tasks is None else str(self.tasks)


@dataclass(frozen=True, slots=True)
class ExplainedExchange:
    """How tuples get from one stage to another. `combined`: each task combines its own into one row a key before."""

    origin: str
    stream: str
    component: str
    from_stage: int
    to_stage: int
    grouping: str
    keys: tuple[str, ...]
    tasks: int | None
    combined: bool


@dataclass(frozen=True, slots=True)
class ExplainedSink:
    """A sink, and how it takes its rows: by appending them, or by keys."""

    name: str
    target: str
    stage: int
    component: str
    mode: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainedRead:
    """A state that a component reads, and the fields that it looks up there."""

    state: str
    component: str
    stage: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a topology compiles to under a guarantee. `str` of it is for people.

    `serves` has every guarantee: None where it can be had, else why not. `serial`: batches run one at a time.
    """

    topology: str
    guarantee: str
    serves: Mapping[str, str | None]
    serial: bool
    stages: tuple[ExplainedStage, ...]
    exchanges: tuple[ExplainedExchange, ...]
    sinks: tuple[ExplainedSink, ...]
    reads: tuple[ExplainedRead, ...] = ()

    def __str__(self) -> str:
        lines = [f"topology {self.topology}, {self.guarantee}"]
        for name, reason in self.serves.items():
            lines.append(f"  {name}: {'yes' if reason is None else f'no: {reason}'}")
        order = (
            "one at a time: a job reads what the batch before it wrote into a state"
            if self.serial
            else "several may be in flight; they commit in order"
        )
        lines.append(f"  batches: {order}")
        lines.append('  message timeout: on Spark; engine="inline" runs your functions itself, and cannot end a call')
        for stage in self.stages:
            lines += ["", f"stage {stage.number}, tasks: {stage.tasks_text}"]
            for exchange in self.exchanges:
                if exchange.to_stage == stage.number:
                    lines.append(f"  <= {_exchange_text(exchange)}")
            lines += [f"  <- {_read_text(read)}" for read in self.reads if read.stage == stage.number]
            for component in stage.components:
                source = f" <- {', '.join(component.inputs)}" if component.inputs else ""
                lines.append(f"  {component.name}: {component.what}{source} ({component.schema})")
            lines += [f"  => {s.name}: {s.target}, {_mode_text(s)} <- {s.component}" for s in self._sinks_of(stage)]
            lines += [f"  (passes through: {name})" for name in stage.passes]
        return "\n".join(lines)

    def _sinks_of(self, stage: ExplainedStage) -> list[ExplainedSink]:
        return [s for s in self.sinks if s.stage == stage.number]

    def to_json(self) -> dict[str, Json]:
        """The same for programs."""
        found = json.loads(json.dumps(asdict(self)))  # lists in the place of tuples
        for stage in found["stages"]:
            stage["stage"] = stage.pop("number")
        return dict[str, Json](found)

    def to_dot(self) -> str:
        """The graph in Graphviz's language: a cluster for each stage, dashed arrows for exchanges, dotted ones from a state
        to its readers.
        """
        lines = [f"digraph {_quoted(self.topology)} {{", "  rankdir=LR;", "  node [shape=box];"]
        for stage in self.stages:
            lines.append(f"  subgraph cluster_{stage.number} {{")
            lines.append(f"    label={_quoted(f'stage {stage.number}: {stage.tasks_text}')};")
            lines += [f"    {_quoted(c.name)} [label={_quoted(f'{c.name}: {c.what}')}];" for c in stage.components]
            for sink in self._sinks_of(stage):
                shown = f"{sink.name}: {sink.target}, {_mode_text(sink)}"
                lines.append(f"    {_quoted(sink.name)} [shape=cylinder, label={_quoted(shown)}];")
            lines.append("  }")
        for origin, to, label in self._arrows():
            style = f" [style=dashed, label={_quoted(label)}]" if label else ""
            lines.append(f"  {_quoted(origin)} -> {_quoted(to)}{style};")
        for read in self.reads:  # these may point back and do not order the stages
            style = f"style=dotted, constraint=false, label={_quoted(_read_label(read))}"
            lines.append(f"  {_quoted(read.state)} -> {_quoted(read.component)} [{style}];")
        return "\n".join([*lines, "}", ""])

    def _arrows(self) -> list[tuple[str, str, str]]:
        """From, to, and the label of an exchange (empty where there is none)."""
        over = [(e.origin, e.component, f"{e.grouping} {', '.join(e.keys)}".strip()) for e in self.exchanges]
        crossed = {(origin, to) for origin, to, _ in over}
        fused = [
            (origin, component.name, "")
            for stage in self.stages
            for component in stage.components
            for origin in dict.fromkeys(component.inputs)
            if (origin, component.name) not in crossed
        ]
        return [*fused, *over, *((s.component, s.name, "") for s in self.sinks)]


def explain(
    topology: TopologyGraph, guarantee: Guarantee | str | None = None, *, parallelism: int | None = None
) -> Explanation:
    """What a topology compiles to. `parallelism` is the engine's number of tasks, if known.

    Raises:
        TopologyError: it cannot run under this guarantee (default: its own, else exactly-once).
    """
    chosen = topology.guarantee or Guarantee.EXACTLY_ONCE if guarantee is None else as_guarantee(guarantee)
    plan = compile_topology(topology, chosen)
    serves: dict[str, str | None] = {}
    for one in Guarantee:
        try:
            compile_topology(topology, one)
            serves[one.value] = None
        except TopologyError as error:
            serves[one.value] = error.message
    by_name = {component.name: component for component in topology.components}
    places = _places(plan)
    stages: list[ExplainedStage] = []
    exchanges: list[ExplainedExchange] = []
    for number, stage in enumerate(plan.stages):
        edges = [entry.edge for entry in stage.entries if entry.edge is not None]
        asked = [e.tasks or parallelism for e in (*edges, *stage.relayed)]
        known = [tasks for tasks in asked if tasks is not None]
        here = [by_name[name] for name, place in places.items() if place == number]
        stages.append(
            ExplainedStage(
                number,
                max(known) if number and len(known) == len(asked) else None,
                tuple(_explained(component) for component in topology.components if component in here),
                tuple(f"{e.origin} to {e.component}" for e in stage.relayed),
            )
        )
        exchanges += [_exchange(edge, number, by_name, parallelism) for edge in edges]
    sinks = [
        ExplainedSink(
            component.name,
            component.spec.target,
            places[component.subscription.component],
            component.subscription.component,
            component.input.mode.value,
            component.input.keys,
        )
        for component in topology.components
        if isinstance(component, SinkComponent)
    ]
    reads = [
        ExplainedRead(component.bolt.state, component.name, places[component.name], component.bolt.fields)
        for component in topology.components
        if isinstance(component, BoltComponent) and isinstance(component.bolt, ReadsState)
    ]
    return Explanation(
        topology.name,
        chosen.value,
        serves,
        plan.serial,
        tuple(stages),
        tuple(exchanges),
        tuple(sinks),
        tuple(reads),
    )


def _places(plan: Plan) -> dict[str, int]:
    """The stage of each component that is not a sink."""
    found: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for entry in stage.entries:
            if entry.edge is None or entry.edge.group is not None:
                found[entry.component] = number
        for node in stage.nodes.values():
            if isinstance(node, OperationNode | BoltNode | GatherNode | JoinNode):
                found[node.component] = number
    return found


def _exchange(
    edge: Edge, to_stage: int, by_name: Mapping[str, Component], parallelism: int | None
) -> ExplainedExchange:
    group, grouping = edge.group, edge.grouping
    if group is not None:
        kind, keys = ("fields", group.keys) if group.keys else ("global", ())
        combined = group.combines
    else:
        assert grouping is not None
        kind, keys, combined = str(grouping.kind), grouping.fields, False
    origin = edge.origin
    assert origin in by_name
    return ExplainedExchange(
        origin,
        edge.stream,
        edge.component,
        to_stage - edge.hops,
        to_stage,
        kind,
        keys,
        1 if kind == "global" else edge.tasks or parallelism,
        combined,
    )


def _explained(component: Component) -> ExplainedComponent:
    inputs = tuple(i.component if i.stream == "default" else f"{i.component}[{i.stream}]" for i in component.inputs)
    schema = "; ".join(
        to_ddl(s) if name == "default" else f"{name}: {to_ddl(s)}" for name, s in component.streams.items()
    )
    return ExplainedComponent(component.name, _what(component), inputs, schema or "no output")


def _what(component: Component) -> str:
    match component:
        case Spout():
            return f"spout of {component.source.name}"
        case Operation():
            called = getattr(component.function, "__name__", "") or type(component.function).__name__
            own = called in {"project", "merge", "repartition"} and component.kind == "project"
            return called if own else f"{component.kind} {called}({', '.join(component.fields)})"
        case BoltComponent():
            return _what_bolt(component.bolt)
        case Aggregate():
            results = ", ".join(a.name for a in component.aggregations)
            by = f" by {', '.join(component.keys)}" if component.keys else ""
            where = (
                "within each task" if component.local else ("across batches" if component.persistent else "of a batch")
            )
            return f"aggregate {results}{by}, {where}"
        case Join():
            pairs = ", ".join(one if one == other else f"{one} = {other}" for one, other in component.on.keys)
            return f"{component.on.kind} join on {pairs}"
        case SinkComponent():
            return f"sink {component.spec.target}"


def _what_bolt(bolt: AnyBolt) -> str:
    match bolt:
        case StateQuery():
            own = "" if bolt.own_query is None else f", with {name_of(bolt.own_query)}"
            return f"state_query of {bolt.state} by {', '.join(bolt.fields)}{own}"
        case NewValues():
            return f"new_values_stream of {bolt.state}"
        case _:
            return f"bolt {type(bolt).__name__}"


def _read_text(read: ExplainedRead) -> str:
    return f"state {read.state} to {read.component}: {_read_label(read)}; what the batches before committed"


def _read_label(read: ExplainedRead) -> str:
    return f"read by {', '.join(read.keys)}"


def _exchange_text(exchange: ExplainedExchange) -> str:
    keys = f" by {', '.join(exchange.keys)}" if exchange.keys else ""
    stream = "" if exchange.stream == "default" else f"[{exchange.stream}]"
    combined = ", combined before" if exchange.combined else ""
    tasks = ENGINES if exchange.tasks is None else str(exchange.tasks)
    return f"{exchange.origin}{stream} to {exchange.component}: {exchange.grouping}{keys}{combined}; tasks: {tasks}"


def _mode_text(sink: ExplainedSink) -> str:
    return f"{sink.mode} by {', '.join(sink.keys)}" if sink.keys else sink.mode


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
