"""One batch in flight: its attempt, its outcome, and how long each step took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from stormproof.core.clock import Clock
from stormproof.core.job import JobKey
from stormproof.core.source.protocol import Limit
from stormproof.core.tracking.attempts import Attempts
from stormproof.core.tracking.outcome import FailedIn, Outcome
from stormproof.trident.ledger.rows import SinkWork
from stormproof.trident.statistics import BatchResult
from stormproof.trident.steps import Opened
from stormproof.trident.transaction_states import TxnState
from stormproof.trident.tuning import Sample, Setting

FULL: Final = 0.9
"""A batch that reached this part of its limit counts as full: the source may have more."""


@dataclass(slots=True)
class Flight:
    """A batch that was opened and has not ended."""

    opened: Opened
    started_s: float
    limit: Limit
    setting: Setting
    attempts: Attempts | None = None
    attempt: int = 1
    job: JobKey | None = None
    """Its running job."""
    outcome: Outcome | None = None
    """The outcome of its attempts; None while one of them runs."""
    ready_s: float = 0.0
    """When its last job ended."""
    committing: dict[str, SinkWork] | None = None
    """The work that its sinks are adopting; None before the commit begins."""

    steps_ms: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def timed(self, clock: Clock, step: str) -> Generator[None]:
        """Add the time within this context to a step's time."""
        started_s = clock.monotonic_s()
        try:
            yield
        finally:
            self.steps_ms[step] = self.steps_ms.get(step, 0.0) + (clock.monotonic_s() - started_s) * 1000

    def result(self, state: TxnState, failed: Sequence[FailedIn] = (), tuples: int = 0) -> BatchResult:
        """The batch's result, once it has ended."""
        reasons = Counter(f.failure.reason.value for f in failed if f.failure.counted)
        return BatchResult(
            txid=self.opened.txid,
            state=state.value,
            messages=self.opened.slice.expected.messages,
            failed=reasons.total(),
            retry=self.opened.slice.retry,
            attempts=self.attempt,
            tuples=tuples,
            steps_ms=self.steps_ms,
            returned=len(failed) - reasons.total(),
            reasons=dict(reasons),
        )

    def sample(self, ended_s: float) -> Sample:
        """The batch as the tuner sees it."""
        slice_ = self.opened.slice
        return Sample(
            messages=slice_.expected.messages,
            latency_s=ended_s - self.started_s,
            ended_s=ended_s,
            # A source may cut a slice a little short of the limit.
            full=not slice_.retry
            and (slice_.expected.messages >= FULL * self.limit.messages or slice_.bytes >= FULL * self.limit.bytes),
            setting=self.setting,
        )
