"""An engine by script: what a job reports is stated, so that verdicts and attempts are tested apart from any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import cast

import numpy as np

from stormproof import MemorySource
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.message import FailureReason, Guarantee, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Expectation, Lease, Limit, Slice
from stormproof.core.pending.rows import expectation_of
from stormproof.core.tracking.attempts import Attempt, BatchRunner, JobDied
from stormproof.core.tracking.partners import Meetings
from stormproof.core.tracking.verdict import AttemptEnd, JobReport, Outcome


def failure(
    id_: int, seed: int, *, reason: FailureReason = FailureReason.ERROR, error: str = "boom", component: str = "split"
) -> MessageFailure:
    """A message of a memory source that failed."""
    return MessageFailure(MessageId(id_), 0, token(id_, seed), reason, component, error)


def token(id_: int, seed: int) -> Token:
    """A message's start value."""
    return Token(expectation_of([id_], seed).xor)


@dataclass(frozen=True, slots=True)
class Says:
    """What one job does. Everything not named goes well.

    `late` may name a message several times. `unseen` are messages whose acks got lost without anyone naming them;
    `lost` are named by their ackers. `twice` are read in place of the last message.
    """

    early: Sequence[int] = ()
    late: Sequence[int] = ()
    lost: Sequence[int] = ()
    unseen: Sequence[int] = ()
    together: Sequence[tuple[int, int]] = ()
    violations: tuple[str, ...] = ()
    skip_last: bool = False

    def report(self, ids: Sequence[int], attempt: Attempt) -> JobReport:
        """The report over these messages, less the excluded ones."""
        seed = attempt.seed
        read = [id_ for id_ in ids if id_ not in attempt.excluded]
        read = read[:-1] if self.skip_last else read
        early, late = set(self.early) & {*read}, [id_ for id_ in self.late if id_ in read]
        gone = {*early, *self.unseen, *self.lost}
        late_xor = _xor(token(id_, seed) for id_ in {*late} - gone)
        return JobReport(
            read_messages=len(read),
            read_xor=expectation_of(read, seed).xor,
            ack_xor=_xor(token(id_, seed) for id_ in read if id_ not in gone and id_ not in late),
            failures=tuple(failure(id_, seed) for id_ in sorted(early)),
            violations=self.violations,
            late=tuple(failure(id_, seed, error=f"late {n}") for n, id_ in enumerate(late)),
            late_xor=late_xor,
            together=np.array([p for p in self.together if {*p} <= {*read}], np.int64).reshape(-1, 2),
            lost=tuple(failure(id_, seed, reason=FailureReason.LOST) for id_ in self.lost if id_ in read),
        )


def _xor(values: Iterable[int]) -> int:
    return reduce(xor, values, 0)


@dataclass
class Script:
    """A slice of `messages` messages, run under a guarantee; job n does what line n says, and the last line repeats."""

    lines: Sequence[Says | JobDied | Callable[[Attempt], JobReport | JobDied]]
    messages: int = 4
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    retry: bool = False
    meetings: Meetings | None = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    ends: list[AttemptEnd] = field(default_factory=list[AttemptEnd])

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.source = MemorySource("lines", [b"m%d" % i for i in range(self.messages)], clock=self.clock)
        self.source.subscribe("s", 1)
        if self.retry:
            slice_ = self.source.open(Lease("before", 1), Limit(), 1)
            assert slice_ is not None
            self.source.confirm(Lease("before", 1), [failure(i, 1) for i in range(self.messages)])
            self.clock.advance(1000)
        seeds = iter(range(100, 200))
        self.runner = BatchRunner(
            self.source, self.guarantee, component="words", new_seed=lambda: next(seeds), meetings=self.meetings
        )

    def run(self) -> Outcome:
        """Open a slice, and take it to its outcome."""
        slice_ = self.source.open(Lease(f"o{len(self.attempts)}", 1), Limit(), 7)
        assert slice_ is not None
        attempts = self.runner.attempts("txid 1", slice_, 7, _Noted(self.source, slice_, self))
        job, attempt = self._job(slice_), next(attempts)
        while True:
            try:
                attempt = attempts.send(job(attempt))
            except StopIteration as end:
                return cast("Outcome", end.value)

    def _job(self, slice_: Slice) -> Callable[[Attempt], JobReport | JobDied]:
        ids = [
            m for r in self.source.readers(slice_, 1) for b in r.read(7, frozenset(), 99) for m in b["id"].to_pylist()
        ]

        def job(attempt: Attempt) -> JobReport | JobDied:
            line = self.lines[min(len(self.attempts), len(self.lines) - 1)]
            self.attempts.append(attempt)
            if isinstance(line, Says):
                return line.report(ids, attempt)
            return line if isinstance(line, JobDied) else line(attempt)

        return job


@dataclass(frozen=True, slots=True)
class _Noted:
    source: MemorySource
    slice: Slice
    script: Script

    def next_attempt(self, ended: int, end: AttemptEnd, error: str, seed: int, excluded: frozenset[int]) -> Expectation:
        assert ended == len(self.script.attempts), "the journal is told before the next job runs"
        assert error
        self.script.ends.append(end)
        return self.source.expect(self.slice, seed, excluded)
