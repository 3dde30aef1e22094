"""What an engine does: run one batch of a compiled topology, and report what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.message import MessageFailure
from stormproof.core.plan import Plan
from stormproof.core.preflight import Probe
from stormproof.core.sink import PreparedFile, SinkWriter
from stormproof.core.source.protocol import SliceReader

JobKey: TypeAlias = tuple[str, int, int]
"""Incarnation, txid and attempt."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one batch; everything in it is picklable.

    `readers` has one entry a source task. `writers` has one entry a sink, by the sink's name. `tracked` is off under
    at-most-once: no tokens, no shares; the counts of rows between stages are kept all the same. `excluded` are messages
    that are left out: they failed in an earlier attempt. `per_message` has every message get a verdict of its own, from
    ackers that their shares are routed to. `pulse` is the folder in which tasks say how far they are (see
    `stormproof.core.pulse`); None: they do not. `careful` has row-wise functions also note the message in hand there, for
    a batch whose job died before.
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
    per_message: bool = False
    pulse: Path | None = None
    careful: bool = False

    @property
    def key(self) -> JobKey:
        """Which attempt at which batch of which life of a topology this is."""
        return self.incarnation, self.txid, self.attempt


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the successful tasks of one attempt reported.

    `read_messages` and `read_xor` are what the readers returned (messages, XOR of their tokens); `ack_xor` is the XOR
    of every acked share; `failures` are the messages that failed early; their tuples and acks are in nothing else here.
    `violations` are rows lost, doubled or tripled between stages, one text each.

    `late` are failures of messages whose tuples had gone on already (over an exchange, or into a bolt that may keep
    them): one entry a message and task, so a message may stand there more than once; `late_xor` is the XOR of the shares
    that ended in them, so that `ack_xor ^ late_xor` still accounts for every share. `together` has an (n, 2) array of the
    ids of messages that anchor one tuple together. `lost` is for per-message mode: messages whose own verdict was not
    "complete". `unanchored` is the number of tuples that failed and that no message anchored: nothing is replayed for them.
    """

    read_messages: int
    read_xor: int
    ack_xor: int
    failures: tuple[MessageFailure, ...] = ()
    files: tuple[PreparedFile, ...] = ()
    violations: tuple[str, ...] = ()
    tuples: int = 0
    steps_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    late: tuple[MessageFailure, ...] = ()
    late_xor: int = 0
    together: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    lost: tuple[MessageFailure, ...] = ()
    unanchored: int = 0


class Engine(Protocol):
    """Runs jobs. Nothing that calls it may depend on which engine it is."""

    name: str

    @property
    def parallelism(self) -> int:
        """How many source tasks a job should have."""
        ...

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end. Several threads may run jobs at once.

        Raises:
            JobFailed: the job ended without a report; nothing of it counts, its files belong to a dead attempt. Where an
                error outside user code ended it, the detail `outside` names that one.
            MachineUnavailable, MachineUnfit: a task met what is a machine's fault; no message may be blamed for it.
        """
        ...

    def ask(self, probes: Sequence[Probe]) -> None:
        """Have the machines that run tasks try what every task needs, before any message is opened.

        Each slot of the engine is asked once, where it is free; no more than that is promised of machines that are busy or
        come later.

        Raises:
            MachineUnfit: one cannot run tasks; names it, and what to do.
            MachineUnavailable, StoreUnavailable: one lacks what may come back.
        """
        ...

    def cancel(self, key: JobKey) -> None:
        """End the job with this key, from another thread; its `run` raises JobFailed. Without effect where none runs."""
        ...

    def close(self) -> None:
        """Let the engine's resources go."""
        ...
