"""`RunOptions`: how one run of a topology goes about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stormproof.core.guarantee import Guarantee
from stormproof.core.source.protocol import Limit


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a topology is run.

    `lease_s` is how long a slice stays ours without a sign of life. `pulse_root` is a folder that executors and driver
    reach, where jobs say how far they are: one that shows no progress for `message_timeout_s` (a topology's own wins),
    or that has no task running for `start_timeout_s`, is cancelled. Without the folder a job may take
    `message_timeout_s` in all. `outage_s` is how long a store may stay away before the run gives up. `until_idle` ends
    the run once nothing is left to read, no retry among it. At most `max_batches_in_flight` batches are in
    flight; each holds as many messages and bytes as `limit` says. Where a `latency_target_s` is given, both are upper
    bounds, and tuned while running (`stormproof.trident.latency_tuner`). Without `max_batches_in_flight` that is one
    batch, with a `latency_target_s` up to four.
    """

    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    limit: Limit = field(default_factory=Limit)
    lease_s: float = 30.0
    message_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    pulse_root: Path | None = None
    outage_s: float = 60.0
    backoff_base_s: float = 0.1
    backoff_max_s: float = 5.0
    poll_interval_s: float = 0.5
    maintain_interval_s: float = 5.0
    until_idle: bool = False
    max_batches: int | None = None
    max_batches_in_flight: int | None = None
    latency_target_s: float | None = None
