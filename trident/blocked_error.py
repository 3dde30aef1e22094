"""The error for a blocked batch: which sink refused it, why, and each way on as the exact command.

And how many messages sinks may reject: a share of the newest messages, so that a full table or a wrong migration stops the
topology instead of turning its stream into rejects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from stormproof.core.errors import Json, SinkRefused
from stormproof.sinks.protocol import SupportsSkipRows
from stormproof.sinks.rejects import REFUSED_MAX


def blocked(
    topology: str,
    txid: int,
    reason: str | None,
    sink: str | None,
    session: object,
    details: Mapping[str, Json] | None = None,
) -> SinkRefused:
    """The error for a batch that `sink` refused, whose session is `session`. Without a known sink nothing can be skipped."""
    text = (
        f"txid {txid} of topology {topology!r} is blocked: {reason}. Repair the cause, then: stormproof retry "
        f"{topology} {txid}"
    )
    if sink is not None:
        text += f"; or give up its rows at that sink, on record: stormproof ledger skip {topology} {txid} {sink}"
    if isinstance(session, SupportsSkipRows):
        text += " (with --rows: only those that its table refuses)"
    return SinkRefused(text, **{**(details or {}), "txid": txid, "sink": sink})


ALWAYS: Final = 10
"""Messages that may be rejected among the newest, however few these are."""

WINDOW: Final = 1_000
"""Messages that count as the newest, at least."""


class RejectLimit:
    """The share of rejected messages among the newest ones of a run. With a share of 0 no message is rejected."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._batches: deque[tuple[int, int]] = deque()
        self._messages = 0
        self._rejected = 0

    def of_batch(self, messages: int) -> int | None:
        """How many messages of the next batch each sink may reject; None: it is to reject none, whatever it refuses."""
        if not self._max_share:
            return None
        most = max(ALWAYS, int(self._max_share * (self._messages + messages)))
        return max(0, min(most - self._rejected, REFUSED_MAX))

    def note(self, messages: int, rejected: int) -> None:
        """Count a committed batch."""
        self._batches.append((messages, rejected))
        self._messages += messages
        self._rejected += rejected
        while self._messages - self._batches[0][0] >= WINDOW:
            gone, were_rejected = self._batches.popleft()
            self._messages -= gone
            self._rejected -= were_rejected
