"""The inline engine with faults in users' code, between stages and in tasks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import JobFailed, UsageError
from stormproof.core.bolt import AnyBolt, FailTuple
from stormproof.core.contract.source import SliceReader
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.components import UserFunction
from stormproof.core.graph.plan import BoltNode, Node, OperationNode, Plan
from stormproof.core.source.group import SpoutReader
from stormproof.core.task.account import Observer
from stormproof.core.task.job import Job, JobKey, StageJob, WireRow
from stormproof.core.tracking.verdict import JobReport
from stormproof.testing.faults import Chance, FaultKind
from stormproof.trident.driver.leases import LeaseKeeper

BoltT = TypeVar("BoltT", bound=AnyBolt)

LOOK_EVERY_S: Final = 10.0
"""Virtual seconds between two looks of the lease keeper at a task that hangs: often enough to extend the lease."""


class SimulatedError(Exception):
    """What a component raises where a fault says so."""


class SimulatedEngine(InlineEngine):
    """Runs a job's tasks in this process; its random source decides their order and their faults.

    A task that hangs or is delayed advances the virtual clock, and has the job's lease keeper look at it.
    """

    name = "simulated"

    def __init__(
        self, parallelism: int, *, chance: Chance, rng: Random, clock: ManualClock, observe: Observer | None = None
    ) -> None:
        super().__init__(parallelism, rng=rng, clock=clock, tamper=self._tampered, observe=observe)
        self._chance = chance
        self._virtual = clock
        self._keeper: LeaseKeeper | None = None
        self._job: JobKey | None = None
        self.jobs = 0
        self._runs = Counter[JobKey]()

    @contextmanager
    def keeping(self, keeper: LeaseKeeper) -> Generator[None]:
        """Have this keeper look whenever time passes, until its job has ended."""
        self._keeper = keeper
        try:
            yield
        finally:
            self._keeper = None

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end, or until a fault ends it.

        Raises:
            JobFailed: a task ended with an error, or its worker was lost; or the lease keeper cancelled the job.
        """
        self.jobs += 1
        self._job = job.key
        kind = " per message" if job.per_message else ""
        self._chance.tell("job", str(job.txid), f"attempt {job.attempt}{kind}, {len(job.excluded)} left out")
        # A job that runs again by one key is that of refused groups. Two of these that fail would block the batch, and no
        # fault of a simulation needs an operator.
        self._runs[job.key] += 1
        self._chance.spares_jobs = self._runs[job.key] > 2
        try:
            return super().run(replace(job, readers=tuple(_misreading(r, job, self._chance) for r in job.readers)))
        finally:
            self._chance.spares_jobs = False

    def _run_task(self, part: StageJob, task: int, incoming: list[WireRow]) -> list[WireRow]:
        chance, place, where = self._chance, f"stage {part.stage}", f"task {task} of stage {part.stage}"
        if chance.strikes(FaultKind.DELAY, place, lambda: where):
            self._virtual.advance(chance.rng.uniform(0, chance.faults.delay_s))
            if chance.rng.random() < 0.5:  # else the prepare step is the first to look
                self._look()
        if chance.strikes(FaultKind.TIMEOUT, place, lambda: where):
            while True:
                self._virtual.advance(LOOK_EVERY_S)
                self._look()
        if chance.strikes(FaultKind.WORKER_DEATH, place, lambda: where):
            late, repeated = chance.rng.random() < 0.5, chance.rng.random() < 0.5
            first = super()._run_task(part, task, list(incoming)) if late else []
            if not repeated:
                raise JobFailed(f"{where}: its worker was killed", stage=part.stage, task=task)
            chance.tell("repeated, with two runs read" if late else "repeated", place, where)
            again = super()._run_task(part, task, incoming)
            return _mixed(first, again, chance.rng) if late else again
        return super()._run_task(part, task, incoming)

    def _look(self) -> None:
        """Have the keeper look; ends the task where it cancels the job."""
        if self._keeper is not None and self._job is not None and not self._keeper.look():
            self.cancel(self._job)
        self._go_on()

    def _tampered(self, stage: int, rows: list[WireRow]) -> list[WireRow]:
        chance, place = self._chance, f"stage {stage}"
        if not (chance.possible(FaultKind.DROP, place) or chance.possible(FaultKind.DUPLICATE, place)):
            return rows
        made: list[WireRow] = []
        for row in rows:
            shown = _Shown(row)
            if chance.strikes(FaultKind.DROP, place, shown):
                continue
            copies = 1
            if chance.strikes(FaultKind.DUPLICATE, place, shown):
                copies = chance.rng.choice((2, 3))
            made += [row] * copies
        return made


def _mixed(first: list[WireRow], again: list[WireRow], rng: Random) -> list[WireRow]:
    """A task's output, of which some readers read the first run, before its worker was lost, and the others the second."""
    dests = sorted({row.dest for row in (*first, *again)})
    early = {dest for dest in dests if rng.random() < 0.5}
    return [*(row for row in first if row.dest in early), *(row for row in again if row.dest not in early)]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A wire row as text, made only where the log wants it."""

    row: WireRow

    def __call__(self) -> str:
        row = self.row
        return f"edge {row.edge} number {row.seq} from task {row.source} to task {row.dest}"


def with_faults(plan: Plan, chance: Chance) -> Plan:
    """The plan with faults in its functions and bolts, and with one call at a time: threads would decide the order."""
    plan = _with_nodes(plan, _alone)
    if not any(chance.possible(kind, node.component) for kind in _IN_CODE for node in _code(plan)):
        return plan
    return _with_nodes(plan, lambda node: _faulty_node(node, chance))


def _with_nodes(plan: Plan, made: Callable[[Node], Node]) -> Plan:
    stages = (replace(one, nodes={key: made(node) for key, node in one.nodes.items()}) for one in plan.stages)
    return replace(plan, stages=tuple(stages))


_IN_CODE = (FaultKind.RAISE, FaultKind.FAIL)


def _code(plan: Plan) -> Iterator[OperationNode | BoltNode]:
    for stage in plan.stages:
        for node in stage.nodes.values():
            if isinstance(node, (OperationNode, BoltNode)):
                yield node


def _alone(node: Node) -> Node:
    if not isinstance(node, OperationNode) or node.concurrency is None:
        return node
    return replace(node, concurrency=1 if node.is_async else None)


def _faulty_node(node: Node, chance: Chance) -> Node:
    if isinstance(node, OperationNode):
        return replace(node, function=_faulty_function(node.function, node.component, chance))
    if isinstance(node, BoltNode):
        return replace(node, bolt=_faulty_bolt(node.bolt, node.component, chance))
    return node


def _strike(component: str, chance: Chance) -> None:
    if chance.strikes(FaultKind.RAISE, component):
        raise SimulatedError("a simulated fault")
    if chance.strikes(FaultKind.FAIL, component):
        raise FailTuple("a simulated failure")


def _faulty_function(function: UserFunction, component: str, chance: Chance) -> UserFunction:
    def call(*arguments: object) -> object:
        _strike(component, chance)
        return function(*arguments)

    return call


def _faulty_bolt(bolt: BoltT, component: str, chance: Chance) -> BoltT:
    """The bolt as an object of a class derived from its own, whose `execute` may be struck first.

    For an `ArrowBolt` the rate is for a call, not for a tuple: a failed call is repeated with halves.
    """
    kind, faulty = type(bolt), copy.copy(bolt)
    members = {"__slots__": (), "execute": _faulty_function(kind.execute, component, chance)}
    try:
        derived = type(kind.__name__, (kind,), members)
    except TypeError as error:
        raise UsageError(
            f"bolt {component!r}: a simulation strikes it in a class derived from {kind.__name__}, whose __init_subclass__ "
            f"refuses that: {error}; let it take a class without arguments",
            component=component,
        ) from error
    # A frozen dataclass refuses a plain assignment.
    object.__setattr__(faulty, "__class__", derived)
    return faulty


@dataclass(frozen=True, slots=True)
class _MisreadingReader:
    """A reader that may leave one message of a record batch out and give another one twice."""

    reader: SliceReader
    strikes: Callable[[], bool]
    rng: Random

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for rows in self.reader.read(seed, excluded, batch_rows):
            if not rows.num_rows or not self.strikes():
                yield rows
                continue
            order = np.arange(rows.num_rows)
            skipped = self.rng.randrange(rows.num_rows)
            if rows.num_rows > 1:
                order[skipped] = self.rng.choice([n for n in range(rows.num_rows) if n != skipped])
            else:
                order = order[:0]
            yield rows.take(pa.array(np.sort(order)))


def _misreading(reader: SliceReader, job: Job, chance: Chance) -> SliceReader:
    place = reader.spout if isinstance(reader, SpoutReader) else next(iter(job.plan.decoders))
    if not chance.possible(FaultKind.MISREAD, place):
        return reader

    def strikes() -> bool:
        return chance.strikes(FaultKind.MISREAD, place)

    if isinstance(reader, SpoutReader):
        return replace(reader, reader=_MisreadingReader(reader.reader, strikes, chance.rng))
    return _MisreadingReader(reader, strikes, chance.rng)
