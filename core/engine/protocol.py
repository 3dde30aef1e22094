"""What an engine does: run one batch of a compiled topology, and report what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stormproof.core.message import MessageFailure
from stormproof.core.plan import Plan
from stormproof.core.sink import PreparedFile, SinkWriter
from stormproof.core.source.protocol import SliceReader


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one batch; everything in it is picklable.

    `readers` has one entry a source task. `writers` has one entry a sink, by the sink's name. `tracked` is off under
    at-most-once: no tokens, no shares; the counts of rows between stages are kept all the same.
    """

    plan: Plan
    readers: tuple[SliceReader, ...]
    writers: Mapping[str, SinkWriter]
    incarnation: str
    txid: int
    attempt: int
    seed: int
    tracked: bool
    excluded: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the successful tasks of one attempt reported.

    `read_messages` and `read_xor` are what the readers returned (messages, XOR of their tokens); `ack_xor` is the XOR
    of every acked share; `failures` are the messages that failed early; their tuples and acks are in nothing else here.
    `violations` are rows lost, doubled or tripled between stages, one text each.
    """

    read_messages: int
    read_xor: int
    ack_xor: int
    failures: tuple[MessageFailure, ...] = ()
    files: tuple[PreparedFile, ...] = ()
    violations: tuple[str, ...] = ()
    tuples: int = 0
    steps_ms: Mapping[str, float] = field(default_factory=dict[str, float])


class Engine(Protocol):
    """Runs jobs. Nothing that calls it may depend on which engine it is."""

    name: str

    @property
    def parallelism(self) -> int:
        """How many source tasks a job should have."""
        ...

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end.

        Raises:
            JobFailed: the job ended without a report; nothing of it counts, its files belong to a dead attempt.
        """
        ...

    def cancel(self) -> None:
        """End the running job, from another thread; its `run` raises JobFailed."""
        ...

    def close(self) -> None:
        """Let the engine's resources go."""
        ...
