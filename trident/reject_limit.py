"""How many messages sinks may reject: a share of the newest messages, so that a full table or a wrong migration stops the
topology instead of turning its stream into rejects.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from stormproof.sinks.rejects import REFUSED_MAX

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
