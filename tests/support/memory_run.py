"""A whole topology in memory: source, sink and ledger outlive the drivers that die over them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from stormproof import MemorySink, MemorySource, Topology, count
from stormproof.core.base.clock import Clock, ManualClock
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import compile_topology
from stormproof.testing.simulation import run_driver
from stormproof.trident.driver.jobs import Jobs, JobsInTurn, Watch
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import memory_ledger_engine
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.terms.observers import BatchResult, RunStatistics
from support.heartbeats import listening


class World:
    """What outlives a driver."""

    def __init__(
        self,
        payloads: list[bytes],
        folder: Path,
        *,
        split: Callable[[str], Any] = str.split,
        concurrency: int | None = None,
        fold: bool = True,
        sinks: int = 1,
        batch_messages: int = 4,
        seed: int = 0,
        max_attempts: int = 2,
        first_incarnation: int = 0,
        clock: Clock | None = None,
        in_flight: int = 1,
    ) -> None:
        self.clock: Clock = clock or ManualClock()
        self.rng = random.Random(seed)
        self.source = MemorySource("lines", payloads, max_attempts=max_attempts, clock=self.clock, rng=self.rng)
        self.sinks = [MemorySink(f"counts{i}", staging=folder / f"staging{i}") for i in range(sinks)]
        self.ledger_engine = memory_ledger_engine()
        self.batch_messages = batch_messages
        self.in_flight = in_flight
        incarnations = iter(f"life{i}" for i in itertools.count(first_incarnation))
        self.ledger = Ledger(self.ledger_engine, self.clock, lambda: next(incarnations))
        self.topology = Topology("words")
        words = self.topology.stream("lines", self.source).flat_map(
            split, "line", schema="word string", concurrency=concurrency
        )
        if fold:
            words.group_by("word").persistent_aggregate(n=count()).into(*self.sinks)
        else:
            words.into(*self.sinks)

    def run(
        self,
        guarantee: Guarantee = Guarantee.EXACTLY_ONCE,
        *,
        engine: Engine | None = None,
        max_batches: int | None = None,
        outage_s: float = 60.0,
        message_timeout_s: float = 30.0,
        heartbeat_root: Path | None = None,
        jobs: Jobs | None = None,
        watch: Callable[[Watch], Watch] | None = None,
        on_batch: Callable[[BatchResult], None] | None = None,
        **more: Any,
    ) -> RunStatistics:
        """One driver's life, until nothing is left or it dies. `more` are further `RunOptions`."""
        plan = compile_topology(self.topology, guarantee)
        options = RunOptions(
            guarantee=guarantee,
            limit=Limit(self.batch_messages),
            until_idle=True,
            max_batches=max_batches,
            outage_s=outage_s,
            message_timeout_s=message_timeout_s,
            heartbeat_root=heartbeat_root,
            max_batches_in_flight=self.in_flight,
            **more,
        )
        with ExitStack() as stack:
            heartbeats = None if heartbeat_root is None else stack.enter_context(listening(heartbeat_root, self.clock))
            watched = Watch.of(plan, options, heartbeats)
            return run_driver(
                plan,
                self.source,
                self.ledger,
                engine or InlineEngine(2, rng=self.rng, clock=self.clock),
                options,
                clock=self.clock,
                rng=self.rng,
                jobs=jobs or JobsInTurn(self.rng if self.in_flight > 1 else None),
                watch=watched if watch is None else watch(watched),
                on_batch=on_batch,
            )

    def epoch(self) -> int:
        """The epoch of the newest driver."""
        with self.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
            return int(connection.execute(sa.select(t.topology.c.epoch)).scalar_one())

    def counts(self, sink: int = 0) -> Counter[str]:
        """What a sink holds."""
        found: Counter[str] = Counter()
        content = self.sinks[sink].store.content
        if content is None:
            return found
        rows = content.to_pylist()
        for row in rows:
            found[row["word"]] += row.get("n", 1)
        return found
