"""Simulations: a whole topology in one process, where one seed decides every interleaving, fault, crash and delay.

    from stormproof.testing import Faults, simulate

    run = simulate(topology("lake"), [b"a b", b"b"], seed=7, guarantee="at-least-once", faults=Faults(driver_deaths=0.1))
    assert {m.end for m in run.messages} == {End.ACKED}
    assert {row["word"] for row in run.rows("words")} == {"a", "b"}

The topology object is the one that runs in production. Its graph, functions and bolts, the stage code, the acker, the
attempts, the coordinator and its ledger are the real ones; the ledger's database is in memory. Its sources and sinks are
not touched: each spout reads the messages that are given, through its own decoder, and each sink is a table in memory.
Time is virtual, so a run takes milliseconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Final, TypeAlias, cast

import pyarrow as pa

from stormproof.core.base.clock import Clock, ManualClock
from stormproof.core.base.errors import BatchUnverified, TransientError, UsageError
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import FailureReason, Guarantee, as_guarantee
from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.contract.source import Backlog, Limit, Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.spouts import id_of
from stormproof.core.task.job import Job
from stormproof.testing.faults import Chance, Event, FaultKind, Faults
from stormproof.testing.simulated_engine import SimulatedEngine, with_faults
from stormproof.testing.simulated_stores import GroupRules, SimulatedSink, SimulatedSource
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.jobs import Jobs, Watch
from stormproof.trident.driver.opening import attached
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.ledger.database import memory_ledger_engine
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.terms.observers import BatchResult, RunStatistics


def run_driver(
    plan: Plan,
    source: Source,
    ledger: Ledger,
    engine: Engine,
    options: RunOptions,
    *,
    clock: Clock,
    rng: Random,
    jobs: Jobs | None = None,
    watch: Watch | None = None,
    on_batch: Callable[[BatchResult], None] | None = None,
) -> RunStatistics:
    """Run one driver, from taking its epoch to an orderly stop. What ends it otherwise is raised, as by a production run.

    Raises:
        StormproofError: whatever `Coordinator.run` raises.
    """
    with attached(plan, source, ledger) as (run, sessions):
        coordinator = Coordinator(
            plan,
            source,
            sessions,
            ledger,
            run,
            engine,
            options=options,
            clock=clock,
            rng=rng,
            jobs=jobs,
            watch=watch,
            on_batch=on_batch,
        )
        statistics = coordinator.run()
        ledger.stop(run)
    return statistics


Payload: TypeAlias = bytes | str | Mapping[str, object]
"""A message: its bytes, or text (sent as UTF-8), or an object (sent as JSON)."""

LIFE: Final = "simulation"
"""The incarnation of every simulated topology."""

LEASE_S: Final = 30.0
MESSAGE_TIMEOUT_S: Final = 600.0
"""Virtual seconds after which a job without a sign of life is cancelled: more than a delayed task takes."""

SUSPECTS_MAX: Final = 3

Row: TypeAlias = dict[str, object]


# ---- simulations


class End(StrEnum):
    """How a message ended."""

    ACKED = "acked"
    """It was confirmed. Under at-most-once that is before it is processed."""
    DEAD = "dead"
    """It failed too often, and is a dead letter."""
    REJECTED = "rejected"
    """It was confirmed, and a sink's table refused it there, whole; other sinks have it."""
    PENDING = "pending"
    """The simulation ended first."""


@dataclass(frozen=True, slots=True)
class MessageFailed:
    """One failure of a message; not `counted` where it was only returned with another one that failed."""

    reason: FailureReason
    component: str
    error: str
    counted: bool


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message by its spout and its number there, and how it ended."""

    spout: str
    number: int
    payload: bytes
    end: End
    times_opened: int
    failures: tuple[MessageFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class RejectedMessage:
    """A message, by its spout and its number there, that a sink does not hold: a row of its own, or of a group that it is
    in, is one that the sink's table refused, or that a column cannot hold.
    """

    spout: str
    number: int
    sink: str
    batch: int


@dataclass(frozen=True, slots=True)
class Written:
    """The rows that a sink took at once, from one attempt at a batch."""

    batch: int
    attempt: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SimulationStatistics:
    """Sums over all drivers of a simulation.

    `failed` counts failures, so a message that failed twice counts twice. `returned` counts messages that were returned
    with a failed one, `replayed` the openings of messages after their first, `jobs` the attempts, `struck` the faults by
    kind. `virtual_s` is the time that the simulation took by its own clock.
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
    rejected: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """The result of a simulation. Two with the same topology, messages, seed and faults are equal.

    `emitted` has, by component and stream, every tuple that was emitted, in order, those of failed attempts included.
    `written` has what each sink took, attempt by attempt; `content` what it holds in the end; `backlogs` what each spout's
    source has left. `rejected` names messages that a sink rejected, once for each sink. `idle` says that nothing was left to
    do; else the simulation ended at `max_steps`.
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
    rejected: tuple[RejectedMessage, ...] = ()

    def rows(self, sink: str) -> tuple[Row, ...]:
        """What a sink holds in the end, in any order; a fold holds one row a key.

        Raises:
            UsageError: the topology has no such sink.
        """
        if sink not in self.content:
            raise UsageError(f"no sink {sink!r}; known: {', '.join(self.content)}", component=sink)
        return self.content[sink]

    def ended(self, end: End) -> tuple[SimulatedMessage, ...]:
        """The messages that ended so."""
        return tuple(message for message in self.messages if message.end is end)

    @property
    def acked(self) -> tuple[SimulatedMessage, ...]:
        """The messages that ended confirmed."""
        return self.ended(End.ACKED)

    @property
    def failed(self) -> tuple[SimulatedMessage, ...]:
        """The messages that failed at least once, however they ended."""
        return tuple(m for m in self.messages if any(f.counted for f in m.failures))

    @property
    def replayed(self) -> tuple[SimulatedMessage, ...]:
        """The messages that were opened more than once."""
        return tuple(m for m in self.messages if m.times_opened > 1)

    def log(self) -> str:
        """The events as text, one a line."""
        return "\n".join(f"{e.at_s:10.3f} s  {e.what:14} {e.place}  {e.detail}".rstrip() for e in self.events)

    def __repr__(self) -> str:
        s = self.statistics
        return (
            f"Simulation(seed={self.seed}, guarantee={self.guarantee.value!r}, faults={self.faults!r}: {s.acked} acked, "
            f"{s.dead} dead, {s.pending} pending, {s.drivers} drivers, {s.batches} batches, {s.jobs} jobs)"
        )


class _DriverDied(BaseException):
    """A simulated SIGKILL of the driver: a BaseException, so that no handler of errors catches it."""


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
) -> Simulation:
    """Run a topology over messages until nothing is left to do, under faults, in virtual time.

    `messages` is by spout where there are several. `guarantee` overrides the topology's own; without both it is
    exactly-once. `max_steps` bounds how often drivers look for a batch, and the number of drivers. When it is reached, a
    last driver recovers without faults, and what is left is pending.

    Guarantee:
        The same arguments give an equal result. A driver that a fault ends is followed by another one; so is one that
        gives up because a batch could not be verified.

    Not guaranteed:
        The result says nothing of races inside one task, nor of faults of a real store or of Spark itself. Runs differ
        where a user's function depends on random numbers, time or state from elsewhere.

    Raises:
        TopologyError: the topology cannot be run under this guarantee.
        UsageError: messages for an unknown spout, or a topology that reads a state.
    """
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    if max_steps < 1:
        raise UsageError(f"max_steps is {max_steps}; at least 1 is needed")
    world = _World(
        topology,
        messages,
        seed=seed,
        guarantee=chosen,
        faults=faults or Faults(),
        parallelism=parallelism,
        batch_messages=batch_messages,
        max_attempts=max_attempts,
        max_steps=max_steps,
    )
    try:
        return world.result(idle=world.run())
    except Exception as error:
        error.add_note(f"in a simulation with seed={seed}, guarantee={chosen.value!r}, faults={world.chance.faults!r}")
        raise
    finally:
        for sink in world.sinks.values():
            sink.close()


class _World:
    """What outlives a simulation's drivers: sources, sinks, the clock, the faults and the record of emitted tuples."""

    def __init__(
        self,
        topology: TopologyGraph,
        messages: Sequence[Payload] | Mapping[str, Sequence[Payload]],
        *,
        seed: int,
        guarantee: Guarantee,
        faults: Faults,
        parallelism: int,
        batch_messages: int,
        max_attempts: int,
        max_steps: int,
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
        groups = GroupRules(self.chance)
        self.sinks = {
            spec.name: SimulatedSink(spec, plan.sinks[spec.name], self.chance, groups, tracked=guarantee.tracked)
            for spec in plan.sink_specs
        }
        specs = tuple(cast("SinkSpec", sink) for sink in self.sinks.values())
        shown_ids = None if plan.shown_ids is None else self.source().shown_ids()
        self.plan: Plan = with_faults(replace(plan, sink_specs=specs, shown_ids=shown_ids), self.chance)
        self.seen: dict[str, dict[str, list[pa.RecordBatch]]] = {}
        self.engine = SimulatedEngine(
            parallelism, chance=self.chance, rng=self._random("engine"), clock=self.clock, observe=self._observe
        )
        self._ledger_engine = memory_ledger_engine()
        self._ledger = Ledger(self._ledger_engine, self.clock, lambda: LIFE)
        self._options = RunOptions(
            guarantee=guarantee,
            limit=Limit(batch_messages),
            lease_s=LEASE_S,
            message_timeout_s=MESSAGE_TIMEOUT_S,
            until_idle=True,
            rejects_max_share=1.0,
        )
        self._watch = replace(Watch.of(self.plan, self._options), keeping=self.engine.keeping, in_hand=self._in_hand)
        self._max_steps = max_steps
        self.drivers = self.batches = self._steps = 0

    def _random(self, purpose: str) -> Random:
        """A random source for one purpose alone, so that a change in one place does not change the others' numbers."""
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
            if self._steps > self._max_steps:
                raise _Enough
        if self.chance.strikes(FaultKind.DRIVER_DEATH, name):
            raise _DriverDied

    def _in_hand(self, job: Job) -> tuple[int, ...]:
        """The messages that the tasks' notes name when a job died: none, or some of the batch, guilty or not."""
        ids = sorted(
            id_
            for reader in job.readers
            for rows in reader.read(job.seed, job.excluded, self._options.limit.messages)
            for id_ in rows.column("id").to_pylist()
        )
        rng = self.chance.rng
        return tuple(sorted(rng.sample(ids, rng.randint(0, min(SUSPECTS_MAX, len(ids))))))

    def run(self) -> bool:
        """Run drivers one after the other; returns whether nothing was left to do, else `max_steps` was reached.

        In the latter case a last driver recovers without faults: it rolls forward what was prepared and returns everything
        else, so that each message is in exactly one state.
        """
        with watched(self._at_step):
            ended: bool | None = None
            while ended is None and self.drivers < self._max_steps:
                ended = self._run_driver()
            if not ended:
                self.chance.over = True
                self._steps = self._max_steps
                self._run_driver()
        return bool(ended)

    def _run_driver(self) -> bool | None:
        """Run one driver: True where nothing is left to do, False where `max_steps` is reached, None where it ended."""
        self.drivers += 1
        driver = str(self.drivers)
        self.chance.tell("driver", driver)
        try:
            run_driver(
                self.plan,
                self.source(),
                self._ledger,
                self.engine,
                self._options,
                clock=self.clock,
                rng=self.rng,
                watch=self._watch,
                on_batch=self._note_batch,
            )
        except _DriverDied:
            return None
        except _Enough:
            return False
        except BatchUnverified as error:
            self.chance.tell("gave_up", driver, str(error))
            return None
        except TransientError as error:
            self.chance.tell("stores_away", driver, str(error))
            return None
        return True

    def _note_batch(self, batch: BatchResult) -> None:
        """Count and log a batch."""
        self.batches += 1
        self.chance.tell(
            "batch",
            str(batch.txid),
            f"{batch.state}: {batch.messages} messages, {batch.failed + batch.returned} failed, attempt {batch.attempts}",
        )

    def result(self, *, idle: bool) -> Simulation:
        """The simulation's result, once all drivers have ended."""
        letters = {spout: source.dead_letters() for spout, source in self.sources.items()}
        rejected = self._rejected()
        of_spout = {(one.spout, one.number) for one in rejected}
        messages = tuple(
            _message(
                spout, source, number, {letter.id for letter in letters[spout]}, rejected=(spout, number) in of_spout
            )
            for spout, source in self.sources.items()
            for number in range(len(source.given))
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
            rejected=ends.count(End.REJECTED),
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
            rejected=rejected,
        )

    def _rejected(self) -> tuple[RejectedMessage, ...]:
        """Each message that a sink rejected, by the ledger, in the order of sinks and batches."""
        spouts, order = list(self.sources), list(self.sinks)
        with AuditLedger(self._ledger_engine).snapshot() as ledger:
            rejects = [(one.sink, one.txid, one.number) for one in ledger.rejects(LIFE) if one.number is not None]
        found = dict[RejectedMessage, None]()
        for sink, txid, number in sorted(rejects, key=lambda one: (order.index(one[0]), *one[1:])):
            index, own = (0, number) if len(spouts) == 1 else id_of(number)
            found[RejectedMessage(spouts[index], own, sink, txid)] = None
        return tuple(found)


def _message(spout: str, source: SimulatedSource, number: int, dead: set[int], *, rejected: bool) -> SimulatedMessage:
    end = End.ACKED if number in source.acked else End.DEAD if number in dead else End.PENDING
    if rejected and end is End.ACKED:
        end = End.REJECTED
    failures = tuple(MessageFailed(f.reason, f.component, f.error, f.counted) for f in source.failures[number])
    return SimulatedMessage(spout, number, source.given[number], end, source.times_opened[number], failures)


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
