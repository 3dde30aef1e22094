"""What a run did, in numbers: frozen snapshots that callers may keep."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one batch. `steps_ms` are wall-clock milliseconds a step."""

    txid: int
    state: str
    messages: int
    failed: int
    retry: bool
    attempts: int
    tuples: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found and did, by txid; every list in txid order."""

    epoch: int
    took_over_from: str | None = None
    rolled_forward: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    confirms_repeated: tuple[int, ...] = ()
    suppressed: tuple[tuple[int, str], ...] = ()
    files_swept: int = 0

    @property
    def did_something(self) -> bool:
        """Whether there was anything to recover."""
        return bool(
            self.rolled_forward
            or self.aborted
            or self.abandoned
            or self.confirms_repeated
            or self.suppressed
            or self.files_swept
        )


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """What one `run` did from its start to its end.

    `messages` counts those of batches that committed, failed ones left out; `failed` counts failures, so a message that
    failed twice counts twice; `dead_letters` counts messages given up.
    """

    topology: str
    guarantee: str
    epoch: int
    batches: int = 0
    messages: int = 0
    tuples: int = 0
    failed: int = 0
    dead_letters: int = 0
    aborted_batches: int = 0
    abandoned_batches: int = 0
    suppressed: int = 0
    recoveries: tuple[RecoveryReport, ...] = ()
    elapsed_s: float = 0.0
    stopped: str = "idle"
    """Why the run ended: `idle`, `limit` or `signal`."""
