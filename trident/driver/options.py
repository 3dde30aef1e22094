"""How a run goes about its batches: its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a topology is run.

    A slice's lease lapses `lease_s` after its last extension. In `heartbeat_root` the
    driver notes what careful jobs have in hand, for the one that takes over when it dies. A job without progress for
    `message_timeout_s` (a topology's own wins), or without a running task for `start_timeout_s`, is cancelled; where jobs
    do not report, one may take `message_timeout_s` in all. A run gives up when a store has been away for `outage_s`.
    `until_idle` ends the run once nothing is left to read and no retry is due. At most `max_batches_in_flight` batches
    are in flight: by default one, with a `latency_target_s` up to four. `limit` bounds the messages and bytes of each.
    Under a `latency_target_s` both bounds are upper limits of what a `Tuner` chooses while
    running. At most `rejects_max_share` of the newest messages, and always 10 of them, may be rejected by a sink; beyond
    that the batch is blocked. With 0 every refused row blocks its batch.
    """

    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    limit: Limit = field(default_factory=Limit)
    lease_s: float = 30.0
    message_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    heartbeat_root: Path | None = None
    outage_s: float = 60.0
    backoff_base_s: float = 0.1
    backoff_max_s: float = 5.0
    poll_interval_s: float = 0.5
    maintain_interval_s: float = 5.0
    until_idle: bool = False
    max_batches: int | None = None
    max_batches_in_flight: int | None = None
    latency_target_s: float | None = None
    rejects_max_share: float = 0.1
