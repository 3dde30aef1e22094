"""A topology's recent throughput, latency and back-pressure, from the times that the coordinator notes in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Final

from stormproof.trident.ledger.rows import Txn

LAST_BATCHES: Final = 20
_STEPS: Final = ("open", "job", "wait", "prepare", "commit", "held_up")


@dataclass(frozen=True, slots=True)
class Pace:
    """The last committed batches of the present epoch, at most `LAST_BATCHES`.

    `messages` is the mean of a batch. `messages_per_s` covers the time from the first batch's open to the last one's
    commit. Latency is from open to committed. `steps_ms` has means: `wait` is the time from ready to the batch's turn to
    commit; `held_up` is the time in which no further batch could be opened, because this one was being committed and
    the limit of batches in flight was reached (with one in flight, that is all of its commit). `back_pressure` is the
    share of the whole time that was held up.
    """

    batches: int
    messages: float
    messages_per_s: float
    latency_p50_ms: float
    latency_p90_ms: float
    steps_ms: dict[str, float]
    back_pressure: float


def pace_of(txns: Sequence[Txn]) -> Pace | None:
    """The pace of committed batches; None where there are none."""
    ended = sorted((txn for txn in txns if txn.ended_at is not None), key=lambda txn: txn.txid)[-LAST_BATCHES:]
    spans = [(txn.ended_at - txn.opened_at).total_seconds() for txn in ended if txn.ended_at is not None]
    if not spans:
        return None
    opened, last = min(txn.opened_at for txn in ended), max(txn.ended_at for txn in ended if txn.ended_at is not None)
    seconds = (last - opened).total_seconds()
    messages = sum(txn.messages for txn in ended)
    deciles = quantiles(spans, n=10, method="inclusive") if len(spans) > 1 else spans * 9
    steps = {step: fmean(txn.steps_ms.get(step, 0.0) for txn in ended) for step in _STEPS}
    return Pace(
        batches=len(ended),
        messages=messages / len(ended),
        messages_per_s=messages / seconds if seconds > 0 else 0.0,
        latency_p50_ms=deciles[4] * 1000,
        latency_p90_ms=deciles[8] * 1000,
        steps_ms=steps,
        back_pressure=min(1.0, steps["held_up"] * len(ended) / (seconds * 1000)) if seconds > 0 else 0.0,
    )
