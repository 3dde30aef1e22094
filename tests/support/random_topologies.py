"""Random topologies whose results a plain evaluator knows from the messages alone, and what must hold of a simulation.

A tuple is a list of elements. An element begins as ``SPOUT:MESSAGE.LINE``, and each component adds its name to it, so that
every element that reaches a sink says which message it is of and by which way it came. Components treat each element by
itself, also where a join has put elements of several messages into one tuple.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pyarrow as pa

from stormproof import MemorySink, MemorySource, Topology, count
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import ArrowBolt, ArrowRows, BasicBolt, Bolt, BoltContext, Collector, Emit, Tuple
from stormproof.core.contract.schema import SchemaLike
from stormproof.core.graph.components import OutputStream, Subscription
from stormproof.testing import End, Faults, SimulatedMessage, Simulation, simulate

SCHEMA = pa.schema([("items", pa.string())])
BUCKETS = pa.schema([("bucket", pa.string())])
ELEMENTS_MAX = 250
NOISE = "noise"


def code(*parts: object) -> int:
    return zlib.crc32(" ".join(map(str, parts)).encode())


class Poisoned(Exception):
    pass


@dataclass(frozen=True)
class Step:
    """What a component makes of one element: `fan` children, each kept or not, and sent to one of its streams."""

    name: str
    fan: int = 1
    keep: int = 8
    streams: tuple[str, ...] = ("default",)
    poison: bool = False

    def children(self, element: str) -> Iterator[tuple[str, str]]:
        """Stream and element of each child."""
        for j in range(self.fan):
            chance = code(self.name, element, j)
            if chance % 8 < self.keep:
                yield self.streams[chance // 8 % len(self.streams)], f"{element}/{self.name}.{j}"

    def is_poison(self, element: str) -> bool:
        return (
            self.poison
            and not element.startswith(NOISE)
            and code("poison", self.name, element.partition("/")[0]) % 7 == 0
        )

    def tuples(self, items: str) -> Iterator[tuple[str, str]]:
        """Stream and items of each tuple that it makes of a tuple."""
        elements = items.split()
        if any(self.is_poison(e) for e in elements):
            raise Poisoned(items)
        for j in range(self.fan):
            made: dict[str, list[str]] = {}
            for element in elements:
                for stream, child in self.children(element):
                    if child.endswith(f".{j}"):
                        made.setdefault(stream, []).append(child)
            for stream, children in made.items():
                yield stream, " ".join(children)


@dataclass(frozen=True)
class Function:
    step: Step

    def __call__(self, items: str) -> list[str]:
        return [made for _, made in self.step.tuples(items)]


class Basic(BasicBolt):
    def __init__(self, step: Step) -> None:
        self.step = step

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for stream, made in self.step.tuples(tuple["items"]):
            emit(made, stream)


class Arrow(ArrowBolt):
    def __init__(self, step: Step) -> None:
        self.step = step

    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows:
        made = [(n, m) for n, items in enumerate(rows.column(0).to_pylist()) for _, m in self.step.tuples(items)]
        batch = pa.RecordBatch.from_arrays([pa.array([m for _, m in made], pa.string())], names=["items"])
        return batch, np.array([n for n, _ in made], np.int64)


class Explicit(Bolt):
    """Emits and acks by hand: at once, or at the end; a tuple of its own each, or several joined into one."""

    def __init__(self, step: Step, *, hold: bool, join: bool, twice: bool, noise: bool, direct: bool) -> None:
        self.step, self.hold, self.join, self.twice, self.noise, self.direct = step, hold, join, twice, noise, direct
        self.held: list[Tuple] = []

    def prepare(self, context: BoltContext, collector: Collector, /) -> None:
        super().prepare(context, collector)
        self.rng = Random(context.seed ^ context.task)
        self.tasks = min(context.consumers.values(), default=1)

    def execute(self, tuple: Tuple, /) -> None:
        if self.hold:
            self.held.append(tuple)
            return
        self.give([tuple])
        self.collector.ack(tuple)

    def finish(self) -> None:
        self.rng.shuffle(self.held)
        size = 3 if self.join else 1
        groups = [self.held[i : i + size] for i in range(0, len(self.held), size)]
        for group in groups:
            self.give(group)
        self.rng.shuffle(self.held)
        for tuple in self.held:
            self.collector.ack(tuple)

    def give(self, group: list[Tuple]) -> None:
        anchors = group * 2 if self.twice else group
        for stream, made in self.step.tuples(" ".join(t["items"] for t in group)):
            task = code(made) % self.tasks if self.direct else None
            self.collector.emit(made, stream=stream, anchors=anchors, task=task)
        if self.noise:
            self.collector.emit(NOISE, stream=self.step.streams[0], task=0 if self.direct else None)


@dataclass
class Graph:
    """The same graph, as the evaluator sees it."""

    parallelism: int
    steps: dict[str, tuple[Step, list[tuple[str, str, bool]]]] = field(default_factory=dict)
    """By component: its inputs as (component, stream, whether every task gets a copy)."""
    sinks: dict[str, tuple[str, str]] = field(default_factory=dict)
    buckets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Sinks of counts by bucket: the stream whose elements are counted."""

    def evaluate(self, spout: str, elements: Sequence[str]) -> tuple[dict[str, Counter[str]], bool]:
        """What a message leaves in each sink; and whether it meets poison on its way."""
        flows: dict[tuple[str, str], Counter[str]] = {(spout, "default"): Counter(elements)}
        poisoned = False
        for name, (step, inputs) in self.steps.items():
            made: dict[str, Counter[str]] = {stream: Counter() for stream in step.streams}
            for component, stream, copied in inputs:
                for element, number in flows.get((component, stream), Counter()).items():
                    poisoned |= step.is_poison(element)
                    for to, child in step.children(element):
                        made[to][child] += number * (self.parallelism if copied else 1)
            flows.update({(name, stream): counts for stream, counts in made.items()})
        found = {sink: flows.get(at, Counter()) for sink, at in self.sinks.items()}
        for sink, at in self.buckets.items():
            found[sink] = Counter()
            for element, number in flows.get(at, Counter()).items():
                found[sink][bucket_of(element)] += number
        return found, poisoned


def bucket_of(element: str) -> str:
    return f"b{code('bucket', element) % 3}"


def into_bucket(items: str) -> list[str]:
    return [] if items.startswith(NOISE) else [bucket_of(items)]


def custom(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [code("custom", items) % tasks for items in rows.column("items").to_pylist()]


@dataclass
class Case:
    """A random topology with messages and faults, all of one seed."""

    seed: int
    topology: Topology
    graph: Graph
    messages: dict[str, list[bytes]]
    faults: Faults
    guarantee: Guarantee
    batch_messages: int
    max_attempts: int

    def run(self) -> Simulation:
        return simulate(
            self.topology,
            self.messages,
            seed=self.seed,
            guarantee=self.guarantee,
            faults=self.faults,
            parallelism=self.graph.parallelism,
            batch_messages=self.batch_messages,
            max_attempts=self.max_attempts,
            max_steps=20,
        )

    def expected(self, message: SimulatedMessage) -> tuple[dict[str, Counter[str]], bool]:
        """What a message leaves in each sink, and whether it can never be complete."""
        try:
            elements = message.payload.decode().split("\n")
        except UnicodeDecodeError:
            return {}, True
        return self.graph.evaluate(message.spout, elements)


def random_case(seed: int, *, guarantee: Guarantee | None = None, faults: Faults | None = None) -> Case:
    """A case made from its seed alone."""
    rng = Random(f"{seed}/case")
    made = _Maker(rng, Random(f"{seed}/contracts"))
    chosen = rng.choice([Guarantee.AT_LEAST_ONCE] * 9 + [Guarantee.AT_MOST_ONCE] * 5 + [Guarantee.EXACTLY_ONCE] * 2)
    if guarantee is not None:
        chosen = guarantee
    drawn = random_faults(rng, len(made.graph.steps)) if rng.random() > 0.1 else Faults()
    # From a source of its own, so that the other draws of a seed stay what they were.
    drawn = replace(drawn, refuses=Random(f"{seed}/refuses").choice([0.0, 0.0, 0.02, 0.1]))
    return Case(
        seed,
        made.topology,
        made.graph,
        made.messages,
        drawn if faults is None else faults,
        chosen,
        rng.choice([2, 4, 10]),
        rng.choice([2, 3]),
    )


def random_faults(rng: Random, components: int) -> Faults:
    """Rates such that a job of so many components often meets no fault, sometimes one, and seldom several."""

    def rate(*rates: float) -> float:
        return rng.choice(rates) / components if rng.random() < 0.3 else 0.0

    return Faults(
        raises=rate(0.01, 0.05, 0.2),
        fails=rate(0.01, 0.05, 0.2),
        rejects=rate(0.01, 0.1),
        misreads=rate(0.1, 0.5),
        drops=rate(0.02, 0.1, 0.3),
        duplicates=rate(0.02, 0.1, 0.3),
        delays=rate(0.1, 0.5),
        timeouts=rate(0.05, 0.3),
        worker_deaths=rate(0.1, 0.4),
        driver_deaths=rate(0.02, 0.06, 0.2),
        delay_s=rng.choice([10.0, 60.0]),
    )


class _Maker:
    """Draws a graph, and builds it for the engine and for the evaluator."""

    def __init__(self, rng: Random, contracts: Random) -> None:
        self.rng, self.contracts = rng, contracts
        self.topology = Topology("random")
        self.graph = Graph(parallelism=rng.choice([1, 2, 2, 3]))
        self.open: dict[tuple[str, str], OutputStream] = {}
        self.used: set[tuple[str, str]] = set()
        self.mixed: set[str] = set()
        """Components whose tuples may have several elements."""
        self.copied = False
        self.poison = rng.random() < 0.15
        spouts = [f"s{i}" for i in range(rng.choice([1, 1, 2, 3]))]
        for spout in spouts:
            source = MemorySource(spout, schema=SCHEMA, unit="lines")
            self.open[spout, "default"] = self.topology.spout(spout, source)
        for number in range(rng.randint(1, 5)):
            self._component(number)
        self._ends()
        self.messages = self._messages(spouts)

    def _component(self, number: int) -> None:
        rng = self.rng
        kind = rng.choice(["function", "function", "basic", "arrow", "now", "hold", "join", "direct"])
        name = f"{kind[0]}{number}"
        unused = [at for at in self.open if at not in self.used]
        inputs = {rng.choice(unused or list(self.open))}
        if rng.random() < 0.35:
            inputs.add(rng.choice(list(self.open)))
        taken, ways = list[Subscription](), list[tuple[str, str, bool]]()
        for at in sorted(inputs):
            subscription, copied = self._subscribed(self.open[at])
            taken.append(subscription)
            ways.append((*at, copied))
            self.used.add(at)
        streams: tuple[str, ...] = (
            ("left", "right") if kind in {"basic", "now", "hold"} and rng.random() < 0.5 else ("default",)
        )
        fan = rng.choice([1, 1, 2])
        step = Step(name, fan, rng.choice([8, 8, 6]), streams, poison=self.poison and rng.random() < 0.4)
        schemas: dict[str, SchemaLike] = dict.fromkeys(streams, SCHEMA)
        output: OutputStream
        if kind == "function":
            output = self.topology.bolt(name, Function(step), *taken, schema=SCHEMA)
        elif kind == "basic":
            output = self.topology.bolt(name, Basic(step), *taken, streams=schemas)
        elif kind == "arrow":
            output = self.topology.bolt(name, Arrow(step), *taken, streams=schemas)
        else:
            bolt = Explicit(
                step,
                hold=kind in {"hold", "join"},
                join=kind == "join",
                twice=rng.random() < 0.2,
                noise=rng.random() < 0.2,
                direct=kind == "direct",
            )
            output = self.topology.bolt(name, bolt, *taken, streams=schemas)
        self.graph.steps[name] = (step, ways)
        if kind == "join" or any(component in self.mixed for component, _ in inputs):
            self.mixed.add(name)
        if kind == "direct":  # its tuples name their task, so whoever takes them must take them so
            behind = f"{name}x"
            next_ = Step(behind)
            self.open[behind, "default"] = self.topology.bolt(behind, Function(next_), output.direct(), schema=SCHEMA)
            self.graph.steps[behind] = (next_, [(name, "default", False)])
            if name in self.mixed:
                self.mixed.add(behind)
            return
        for stream in streams:
            self.open[name, stream] = OutputStream(self.topology, name, stream)

    def _subscribed(self, output: OutputStream) -> tuple[Subscription, bool]:
        way = self.rng.choice(["shuffle", "fields", "partial_key", "global", "none", "local", "custom", "all"])
        if way == "all" and self.copied:
            way = "shuffle"
        match way:
            case "all":
                self.copied = True
                return output.all(), True
            case "fields":
                return output.fields("items"), False
            case "partial_key":
                return output.partial_key("items"), False
            case "global":
                return output.global_(), False
            case "none":
                return output.none(), False
            case "local":
                return output.local_or_shuffle(), False
            case "custom":
                return output.custom(custom), False
            case _:
                return output.shuffle(), False

    def _ends(self) -> None:
        for at, output in list(self.open.items()):
            if at in self.used and self.rng.random() > 0.2:
                continue
            sink = f"sink-{'-'.join(at)}"
            self.topology.sink(MemorySink(sink, staging=".", schema_contract=self._contract()), output)
            self.graph.sinks[sink] = at
        if self.rng.random() > 0.4:
            return
        single = [at for at in self.open if at[0] not in self.mixed]
        if not single:
            return
        at = self.rng.choice(single)
        buckets = self.topology.bolt("bucket", into_bucket, self.open[at], schema=BUCKETS)
        groups = self.topology.following(buckets).group_by("bucket")
        counts = MemorySink("counts", staging=".", schema_contract=self._contract())
        if self.rng.random() < 0.5:
            groups.persistent_aggregate(n=count()).into(counts)
        else:
            groups.agg(n=count()).into(counts)
        self.graph.buckets["counts"] = at

    def _contract(self) -> str:
        return self.contracts.choice(["freeze", "freeze", "discard_row"])

    def _messages(self, spouts: Sequence[str]) -> dict[str, list[bytes]]:
        rng = self.rng
        number = rng.randint(3, 10)
        while True:
            made: dict[str, list[bytes]] = {}
            total = 0
            for spout in spouts:
                made[spout] = []
                for message in range(rng.randint(1, number)):
                    lines = [f"{spout}:{message}.{line}" for line in range(rng.choice([1, 1, 1, 2, 3]))]
                    found, _ = self.graph.evaluate(spout, lines)
                    total += sum(counts.total() for counts in found.values())
                    bad = rng.random() < 0.02
                    made[spout].append(b"\xff" if bad else "\n".join(lines).encode())
            if total <= ELEMENTS_MAX or number == 1:
                return made
            number = max(1, number // 2)


def held(case: Case, run: Simulation) -> dict[str, Counter[str]]:
    """The elements in each sink, or its counts by bucket."""
    found: dict[str, Counter[str]] = {}
    for sink in case.graph.sinks:
        elements: Counter[str] = Counter()
        for row in run.rows(sink):
            elements.update(e for e in str(row["items"]).split() if not e.startswith(NOISE))
        found[sink] = elements
    for sink in case.graph.buckets:
        found[sink] = Counter()
        for row in run.rows(sink):
            n = row["n"]
            assert isinstance(n, int)
            found[sink][str(row["bucket"])] += n
    return found


@dataclass
class Verdict:
    """What a run broke, one text each, and how much came doubled or was lost; how many messages sinks rejected."""

    broken: list[str]
    doubled: int = 0
    lost: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Of groups, and of other rows."""


def judge(case: Case, run: Simulation) -> Verdict:
    """Hold a run against its guarantee, by what the messages alone say."""
    verdict = Verdict(_accounts(case, run))
    say = verdict.broken.append
    tracked = run.guarantee.tracked
    actual = held(case, run)
    every: Mapping[str, Counter[str]] = {sink: Counter() for sink in actual}
    acked: Mapping[str, Counter[str]] = {sink: Counter() for sink in actual}
    rejected = {(one.spout, one.number, one.sink) for one in run.rejected}
    verdict.rejected.update("groups" if sink in case.graph.buckets else "rows" for *_, sink in rejected)
    for message in run.messages:
        expected, impossible = case.expected(message)
        confirmed = message.end in (End.ACKED, End.REJECTED)
        for sink, counts in expected.items():
            every[sink].update(counts)
            if confirmed and (message.spout, message.number, sink) not in rejected:
                acked[sink].update(counts)
        if tracked and impossible and confirmed:
            say(f"message {message.spout}:{message.number} is acked and can never be complete")
    for sink, counts in actual.items():
        missing, beyond = acked[sink] - counts, counts - every[sink]
        verdict.lost += missing.total()
        verdict.doubled += (counts - acked[sink]).total()
        strange = [key for key in counts if key not in every[sink]]
        if strange:
            say(f"sink {sink}: {strange[:3]} cannot be")
        match run.guarantee:
            case Guarantee.AT_LEAST_ONCE if missing:
                say(f"sink {sink}: {missing.total()} lost, like {sorted(missing)[:3]}")
            case Guarantee.AT_MOST_ONCE if beyond:
                say(f"sink {sink}: {beyond.total()} doubled, like {sorted(beyond)[:3]}")
            case Guarantee.EXACTLY_ONCE if counts != acked[sink]:
                say(f"sink {sink}: {missing.total()} lost, like {sorted(missing)[:3]}")
                say(f"sink {sink}: too much, like {sorted(counts - acked[sink])[:3]}")
            case _:
                pass
    return verdict


def _accounts(case: Case, run: Simulation) -> list[str]:
    """Whether ends, counters, dead letters and backlogs agree with one another."""
    broken: list[str] = []

    def require(what: str, found: object, wanted: object) -> None:
        if found != wanted:
            broken.append(f"{what}: {found}, not {wanted}")

    s = run.statistics
    ends = Counter(m.end for m in run.messages)
    require(
        "acked, dead, pending", (s.acked, s.dead, s.pending), tuple(ends[e] for e in (End.ACKED, End.DEAD, End.PENDING))
    )
    require("messages", ends.total(), sum(len(given) for given in case.messages.values()))
    require("dead letters", len(run.dead_letters), s.dead)
    for spout, backlog in run.backlogs.items():
        mine = Counter(m.end for m in run.messages if m.spout == spout)
        require(f"dead of {spout}", backlog.dead, mine[End.DEAD])
        require(f"left of {spout}", backlog.ready + backlog.pending + backlog.waiting, mine[End.PENDING])
    require("failures", sum(s.failed_by_reason.values()), s.failed)
    require("failures of messages", sum(f.counted for m in run.messages for f in m.failures), s.failed)
    require("returns of messages", sum(not f.counted for m in run.messages for f in m.failures), s.returned)
    for message in run.messages:
        failed = sum(f.counted for f in message.failures)
        who = f"{message.spout}:{message.number}"
        if message.end is End.DEAD:
            require(f"failures of dead {who}", failed, case.max_attempts)
        elif failed >= case.max_attempts:
            broken.append(f"{who} failed {failed} times and is no dead letter")
        if message.end is not End.PENDING and not message.times_opened:
            broken.append(f"{who} is {message.end} and was never opened")
    if run.idle and s.pending:
        broken.append(f"nothing was left to do, and {s.pending} messages are pending")
    if harmless(run):
        possible = [m for m in run.messages if not case.expected(m)[1]]
        if len(possible) == len(run.messages):
            require("messages that are not acked where nothing went wrong", len(run.messages) - s.acked, 0)
            require("drivers where nothing went wrong", s.drivers, 1)
            require("jobs where nothing went wrong", s.jobs, s.batches)
    return broken


def harmless(run: Simulation) -> bool:
    """Whether nothing went wrong but that a task was repeated after its worker's death."""
    repeated = sum(event.what == "repeated" for event in run.events)
    return run.statistics.struck == ({"worker_deaths": repeated} if repeated else {})


def check_seed(seed: int) -> tuple[Case, Verdict]:
    """Run a seed's case, and raise an AssertionError that names it where its guarantee is broken."""
    case = random_case(seed)
    run = case.run()
    verdict = judge(case, run)
    if verdict.broken:
        text = "\n".join(verdict.broken)
        raise AssertionError(f"seed={seed}: {run!r}\n{text}\nagain: check_seed({seed})\n{run.log()[-3000:]}")
    return case, verdict
