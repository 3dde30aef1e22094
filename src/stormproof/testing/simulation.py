"""Simulations: a whole topology in one process, where one seed decides every interleaving, fault, crash and delay.

    from stormproof.testing import Faults, simulate

    run = simulate(topology("lake"), [b"a b", b"b"], seed=7, guarantee="at-least-once", faults=Faults(driver_deaths=0.1))
    assert {m.end for m in run.messages} == {End.ACKED}
    assert {row["word"] for row in run.rows("words")} == {"a", "b"}

The topology object is the one that runs in production: its graph, functions and bolts, the stage code, the acker, the
attempts, and the coordinator are the real ones. Its sources and sinks are not touched: each spout reads the messages that
are given, through its own decoder, and each sink is a table in memory. Time is virtual, so a run takes milliseconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Final, TypeAlias, cast

import pyarrow as pa

from stormproof.core.clock import ManualClock
from stormproof.core.errors import BatchUnverified, JobFailed, TransientError, UsageError
from stormproof.core.failpoint import watched
from stormproof.core.graph.checks import as_guarantee
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.job import Job
from stormproof.core.loop import Loop, LoopOptions, LoopStatistics
from stormproof.core.message import FailureReason, storable_text
from stormproof.core.sink import SinkSpec
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.protocol import Backlog, Lease, Limit, Source
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.report import JobReport
from stormproof.testing.faults import Chance, Event, FaultKind, Faults
from stormproof.testing.simulated_engine import SimulatedEngine, SimulatedHang, with_faults
from stormproof.testing.simulated_stores import SimulatedSink, SimulatedSource

Payload: TypeAlias = bytes | str | Mapping[str, object]
"""A message: its bytes; text, which becomes UTF-8; or an object, which becomes JSON."""

OWNER: Final = "simulation"
LEASE_S: Final = 30.0
SUSPECTS_MAX: Final = 3

Row: TypeAlias = dict[str, object]


class End(StrEnum):
    """What became of a message."""

    ACKED = "acked"
    """It was confirmed. Under at-most-once that is before it is processed."""
    DEAD = "dead"
    """It failed too often: a dead letter."""
    PENDING = "pending"
    """The simulation ended first."""


@dataclass(frozen=True, slots=True)
class MessageFailed:
    """One failure of a message, or its return with one that failed (not counted)."""

    reason: FailureReason
    component: str
    error: str
    counted: bool


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message, by its spout and its place there, and what became of it."""

    spout: str
    number: int
    payload: bytes
    end: End
    times_opened: int
    failures: tuple[MessageFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What a sink took at once: the rows of an attempt at a batch."""

    batch: int
    attempt: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SimulationStatistics:
    """Sums over all drivers. `failed` counts failures, so a message that failed twice counts twice; `returned` counts
    messages that went back with a failed one; `replayed` counts openings of messages after their first; `jobs` counts
    attempts, `struck` the faults by kind; `virtual_s` is the time that the simulation took by its own clock.
    """

    drivers: int
    batches: int
    jobs: int
    acked: int
    dead: int
    pending: int
    failed: int
    returned: int
    replayed: int
    failed_by_reason: Mapping[str, int]
    struck: Mapping[str, int]
    virtual_s: float


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """What came of a simulation. Two with the same topology, messages, seed and faults are equal.

    `emitted` has, by component and stream, every tuple that was emitted, in order: also in attempts that came to nothing.
    `written` has what each sink took, attempt by attempt; `backlogs` what each spout's source says is left. `idle` says
    that nothing was left to do; else the simulation ended at `max_steps`.
    """

    seed: int
    guarantee: Guarantee
    faults: Faults
    messages: tuple[SimulatedMessage, ...]
    dead_letters: tuple[DeadLetter, ...]
    written: Mapping[str, tuple[Written, ...]]
    content: Mapping[str, tuple[Row, ...]]
    emitted: Mapping[str, Mapping[str, tuple[Row, ...]]]
    backlogs: Mapping[str, Backlog]
    statistics: SimulationStatistics
    events: tuple[Event, ...]
    idle: bool

    def rows(self, sink: str) -> tuple[Row, ...]:
        """What a sink holds in the end, in no order that means anything; a fold holds one row a key.

        Raises:
            UsageError: there is no such sink.
        """
        if sink not in self.content:
            raise UsageError(f"no sink {sink!r}; known: {', '.join(self.content)}", component=sink)
        return self.content[sink]

    def ended(self, end: End) -> tuple[SimulatedMessage, ...]:
        """The messages that ended so."""
        return tuple(message for message in self.messages if message.end is end)

    @property
    def acked(self) -> tuple[SimulatedMessage, ...]:
        """The messages that were confirmed."""
        return self.ended(End.ACKED)

    @property
    def failed(self) -> tuple[SimulatedMessage, ...]:
        """The messages that failed at least once, whatever became of them later."""
        return tuple(m for m in self.messages if any(f.counted for f in m.failures))

    @property
    def replayed(self) -> tuple[SimulatedMessage, ...]:
        """The messages that were opened more than once."""
        return tuple(m for m in self.messages if m.times_opened > 1)

    def log(self) -> str:
        """The events, one a line."""
        return "\n".join(f"{e.at_s:10.3f} s  {e.what:14} {e.place}  {e.detail}".rstrip() for e in self.events)

    def __repr__(self) -> str:
        s = self.statistics
        return (
            f"Simulation(seed={self.seed}, guarantee={self.guarantee.value!r}, faults={self.faults!r}: {s.acked} acked, "
            f"{s.dead} dead, {s.pending} pending, {s.drivers} drivers, {s.batches} batches, {s.jobs} jobs)"
        )


class _DriverDied(BaseException):
    """A simulated SIGKILL of the driver: no handler for errors may see it."""


class _Enough(BaseException):
    """`max_steps` is reached."""


def simulate(
    topology: TopologyGraph,
    messages: Sequence[Payload] | Mapping[str, Sequence[Payload]],
    *,
    seed: int = 0,
    guarantee: Guarantee | str | None = None,
    faults: Faults | None = None,
    parallelism: int = 2,
    batch_messages: int = 10,
    max_attempts: int = 5,
    max_steps: int = 1_000,
    ledger: bool | None = None,
) -> Simulation:
    """Run a topology over messages until nothing is left to do, under faults, in virtual time.

    `messages` is by spout where there are several. `guarantee` beats the topology's own, which beats exactly-once.
    `max_steps` bounds how often a driver looks for a batch, over all drivers, and the number of drivers: after it comes one
    that meets no fault and only recovers, and what is left is pending. `ledger` says
    whether the drivers have a ledger (in memory), as in production; by default only for exactly-once, which needs one.

    Guarantee:
        The same arguments give an equal result. Each driver that a fault ends is followed by another one, as is one that
        gives up because a batch does not add up.

    Not guaranteed:
        The result says nothing of races inside one task, nor of what a real store or Spark itself does wrong. A user's
        function that takes chance, time or state from elsewhere makes runs differ. Under a ledger a task that hangs is
        seen as one whose worker was lost, and leases do not run out.

    Raises:
        TopologyError: the topology cannot be run under this guarantee.
        UsageError: messages for an unknown spout, exactly-once without a ledger, or a topology that reads a state.
    """
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    with_ledger = chosen is Guarantee.EXACTLY_ONCE if ledger is None else ledger
    if chosen is Guarantee.EXACTLY_ONCE and not with_ledger:
        raise UsageError("exactly-once needs a ledger: leave `ledger` out")
    if max_steps < 1:
        raise UsageError(f"max_steps is {max_steps}; at least 1 is needed")
    world = _World(topology, messages, seed, chosen, faults or Faults(), parallelism, max_attempts)
    world.limit = Limit(batch_messages)
    world.max_steps = max_steps
    try:
        idle = world.run(_Ledgered(world) if with_ledger else _Unledgered(world))
        return world.result(idle=idle)
    except Exception as error:
        error.add_note(f"in a simulation with seed={seed}, guarantee={chosen.value!r}, faults={world.chance.faults!r}")
        raise


class _World:
    """What outlives a simulation's drivers: sources, sinks, clock, chance and what was seen."""

    def __init__(
        self,
        topology: TopologyGraph,
        messages: Sequence[Payload] | Mapping[str, Sequence[Payload]],
        seed: int,
        guarantee: Guarantee,
        faults: Faults,
        parallelism: int,
        max_attempts: int,
    ) -> None:
        self.seed, self.guarantee = seed, guarantee
        self.clock = ManualClock()
        self.rng = self._random("driver")
        self.chance = Chance(faults, self._random("faults"), self.clock)
        plan = compile_topology(topology, guarantee)
        if plan.serial:
            raise UsageError(
                f"topology {topology.name!r} reads a state while a batch runs (state_query, new_values_stream), and a "
                "simulation opens no state: run it with engine='inline'"
            )
        by_spout = _by_spout(topology, messages)
        self.sources = {
            spout: SimulatedSource(
                spout, payloads, max_attempts=max_attempts, clock=self.clock, rng=self._random(f"backoff of {spout}")
            )
            for spout, payloads in by_spout.items()
        }
        self.sinks = {spec.name: SimulatedSink(spec, plan.sinks[spec.name], self.chance) for spec in plan.sink_specs}
        specs = tuple(cast("SinkSpec", sink) for sink in self.sinks.values())
        self.plan: Plan = with_faults(replace(plan, sink_specs=specs), self.chance)
        self.seen: dict[str, dict[str, list[pa.RecordBatch]]] = {}
        self.engine = SimulatedEngine(
            parallelism, chance=self.chance, rng=self._random("engine"), clock=self.clock, observe=self._observe
        )
        self.limit = Limit()
        self.max_steps = 1
        self.drivers = self.batches = self._steps = 0

    def _random(self, purpose: str) -> Random:
        """A random source of its own for each purpose, so that one more fault does not change what has no part in it."""
        return Random(f"{self.seed}/{purpose}")  # noqa: S311 - repeatable on purpose

    def source(self) -> Source:
        """The source as a new driver sees it."""
        sources = list(self.sources.values())
        return sources[0] if len(sources) == 1 else SourceGroup(dict(self.sources))

    def _observe(self, component: str, stream: str, rows: pa.RecordBatch) -> None:
        self.seen.setdefault(component, {}).setdefault(stream, []).append(rows)

    def _at_step(self, name: str) -> None:
        if name == "open.before":
            self._steps += 1
            if self._steps > self.max_steps:
                raise _Enough
        if self.chance.strikes(FaultKind.DRIVER_DEATH, name):
            raise _DriverDied

    def run(self, drivers: _Drivers) -> bool:
        """One driver after another, until nothing is left (True), or enough was done.

        Then one that meets no fault and only recovers comes last: what was prepared is rolled forward, and everything
        else is given back, so that each message stands at one place.
        """
        with watched(self._at_step):
            for epoch in range(1, self.max_steps + 1):
                ended = self._life(drivers, epoch)
                if ended is not None:
                    break
            else:
                ended = False
            if not ended:
                self.chance.over = True
                self._steps = self.max_steps
                self._life(drivers, self.drivers + 1)
        return ended

    def _life(self, drivers: _Drivers, epoch: int) -> bool | None:
        """One driver's: True where nothing is left to do, False where enough was done, None where it died."""
        self.drivers = epoch
        self.chance.tell("driver", str(epoch))
        try:
            drivers.drive(epoch)
        except _DriverDied:
            return None
        except _Enough:
            return False
        except BatchUnverified as error:
            self.chance.tell("gave_up", str(epoch), str(error))
            return None
        except TransientError as error:
            self.chance.tell("stores_away", str(epoch), str(error))
            return None
        return True

    def note_batch(self, number: int, end: str, messages: int, failed: int, attempts: int) -> None:
        """Write the log."""
        self.batches += 1
        self.chance.tell("batch", str(number), f"{end}: {messages} messages, {failed} failed, attempt {attempts}")

    def result(self, *, idle: bool) -> Simulation:
        """What came of it."""
        letters = {spout: source.dead_letters() for spout, source in self.sources.items()}
        messages = tuple(
            _message(spout, source, number, {letter.id for letter in letters[spout]})
            for spout, source in self.sources.items()
            for number in range(len(source.payloads))
        )
        failures = [f for m in messages for f in m.failures]
        reasons: dict[str, int] = {}
        for failure in failures:
            if failure.counted:
                reasons[failure.reason.value] = reasons.get(failure.reason.value, 0) + 1
        ends = [m.end for m in messages]
        statistics = SimulationStatistics(
            drivers=self.drivers,
            batches=self.batches,
            jobs=self.engine.jobs,
            acked=ends.count(End.ACKED),
            dead=ends.count(End.DEAD),
            pending=ends.count(End.PENDING),
            failed=sum(reasons.values()),
            returned=len(failures) - sum(reasons.values()),
            replayed=sum(max(0, m.times_opened - 1) for m in messages),
            failed_by_reason=reasons,
            struck=dict(self.chance.struck),
            virtual_s=self.clock.monotonic_s(),
        )
        return Simulation(
            seed=self.seed,
            guarantee=self.guarantee,
            faults=self.chance.faults,
            messages=messages,
            dead_letters=tuple(itertools.chain.from_iterable(letters.values())),
            written={
                name: tuple(Written(a.batch, a.attempt, tuple(a.rows.to_pylist())) for a in sink.applied)
                for name, sink in self.sinks.items()
            },
            content={name: _content(sink) for name, sink in self.sinks.items()},
            emitted={
                component: {stream: _rows(batches) for stream, batches in streams.items()}
                for component, streams in self.seen.items()
            },
            backlogs={spout: source.backlog() for spout, source in self.sources.items()},
            statistics=statistics,
            events=tuple(self.chance.events),
            idle=idle,
        )


def _message(spout: str, source: SimulatedSource, number: int, dead: set[int]) -> SimulatedMessage:
    end = End.ACKED if number in source.acked else End.DEAD if number in dead else End.PENDING
    failures = tuple(MessageFailed(f.reason, f.component, f.error, f.counted) for f in source.failures[number])
    return SimulatedMessage(spout, number, source.payloads[number], end, source.times_opened[number], failures)


def _content(sink: SimulatedSink) -> tuple[Row, ...]:
    rows: list[Row] = sink.content().to_pylist()
    if sink.input.is_by_key:  # Arrow's groups come in any order
        rows.sort(key=lambda row: repr([row[key] for key in sink.input.keys]))
    return tuple(rows)


def _rows(batches: Iterable[pa.RecordBatch]) -> tuple[Row, ...]:
    return tuple(row for batch in batches for row in batch.to_pylist())


def _by_spout(
    topology: TopologyGraph, messages: Sequence[Payload] | Mapping[str, Sequence[Payload]]
) -> dict[str, list[bytes]]:
    spouts = [spout.name for spout in topology.spouts]
    if not isinstance(messages, Mapping):
        if len(spouts) > 1:
            raise UsageError(
                f"topology {topology.name!r} has several spouts: give messages by spout, like "
                f"{{{spouts[0]!r}: [b'a'], {spouts[1]!r}: [b'b']}}"
            )
        messages = {spouts[0]: messages}
    unknown = sorted(set(messages) - set(spouts))
    if unknown:
        raise UsageError(f"topology {topology.name!r} has no spout {unknown[0]!r}; known: {', '.join(spouts)}")
    return {spout: [_payload(given) for given in messages.get(spout, ())] for spout in spouts}


def _payload(given: Payload) -> bytes:
    if isinstance(given, bytes):
        return given
    return given.encode() if isinstance(given, str) else json.dumps(given).encode()


class _Drivers:
    """Starts a driver, which runs until nothing is left to do or a fault ends it."""

    def drive(self, epoch: int) -> None:
        """Run one driver's life."""
        raise NotImplementedError


@dataclass(slots=True)
class _Unledgered(_Drivers):
    world: _World
    totals: list[LoopStatistics] = field(default_factory=list[LoopStatistics])

    def drive(self, epoch: int) -> None:
        world = self.world
        source = world.source()
        source.subscribe(OWNER, epoch)
        loop = Loop(
            world.plan,
            source,
            world.sinks,
            world.engine,
            owner=OWNER,
            epoch=epoch,
            options=LoopOptions(world.guarantee, world.limit, lease_s=LEASE_S, until_idle=True),
            clock=world.clock,
            rng=world.rng,
            run_job=self._run_job,
            on_batch=lambda b: world.note_batch(b.number, b.end.value, b.messages, len(b.failed), b.attempts),
        )
        loop.run()

    def _run_job(self, job: Job, lease: Lease) -> JobReport | JobDied:
        del lease
        world = self.world
        try:
            return world.engine.run(job)
        except JobFailed as error:
            timed_out = isinstance(error, SimulatedHang)
            if timed_out:
                world.clock.advance(LEASE_S / 3)
            return JobDied(storable_text(error), timed_out, self._suspects(job))

    def _suspects(self, job: Job) -> tuple[int, ...]:
        """Whom the tasks' notes name: nobody, or some messages of the batch, guilty or not."""
        rng = self.world.chance.rng
        ids = sorted(
            id_
            for reader in job.readers
            for rows in reader.read(job.seed, job.excluded, self.world.limit.messages)
            for id_ in rows.column("id").to_pylist()
        )
        return tuple(sorted(rng.sample(ids, rng.randint(0, min(SUSPECTS_MAX, len(ids))))))


class _Ledgered(_Drivers):
    def __init__(self, world: _World) -> None:
        from stormproof.trident.ledger.database import memory_ledger_engine
        from stormproof.trident.ledger.ledger import Ledger

        self._world = world
        self._ledger = Ledger(memory_ledger_engine(), world.clock, lambda: OWNER)

    def drive(self, epoch: int) -> None:
        from stormproof.trident.coordinator import Coordinator
        from stormproof.trident.options import RunOptions
        from stormproof.trident.run import attached

        del epoch  # the ledger knows
        world = self._world
        options = RunOptions(
            guarantee=world.guarantee,
            limit=world.limit,
            lease_s=1e6,
            message_timeout_s=1e6,
            start_timeout_s=1e6,
            until_idle=True,
        )
        source = world.source()
        with attached(world.plan, source, self._ledger) as (run, sessions):
            coordinator = Coordinator(
                world.plan,
                source,
                sessions,
                self._ledger,
                run,
                world.engine,
                options=options,
                clock=world.clock,
                rng=world.rng,
                on_batch=lambda b: world.note_batch(b.txid, b.state, b.messages, b.failed, b.attempts),
            )
            coordinator.run()
            self._ledger.stop(run)
