"""What was shown to a person before a confirmation: acted on as it was shown, and at most once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stormproof.core.clock import Clock
from stormproof.trident.web.decide.canary_runs import RunningCanary

if TYPE_CHECKING:
    from stormproof.trident.declarations.decisions import Decision, Look
    from stormproof.trident.web.decide.choosing import Choice

KEPT_S: Final = 3_600.0
"""A confirmation may come so long after it was asked for."""
KEPT_MAX: Final = 500
PINNED_MAX: Final = 1_000_000
"""Messages that all proposals together may hold; the oldest proposals go first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a confirmed decision. `ok` is off where it was refused, or something of it."""

    lines: tuple[str, ...]
    ok: bool
    by: str
    canary: RunningCanary | None = None


@dataclass(slots=True)
class Proposal:
    """One decision that was shown, for the one person or session `holder`."""

    nonce: str
    holder: str
    action: Decision
    choice: Choice
    look: Look
    at_s: float
    outcome: Outcome | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, do: Callable[[], Outcome]) -> Outcome:
        """Run it, unless it was run; a second call waits for the first one's outcome, and gets that."""
        with self._lock:
            if self.outcome is None:
                try:
                    self.outcome = do()
                except BaseException:
                    self.outcome = Outcome(
                        (
                            "It failed unexpectedly, and may be done in part: see what is on record, and the page's log.",
                        ),
                        False,
                        "",
                    )
                    raise
            return self.outcome


class Proposals:
    """The proposals of one page, in this process's memory; that one was acted on is recorded in the ledger, with its effect.

    Guarantee: a proposal is acted on at most once, however often its form is sent, to whichever process of a page, and only
    for its holder.
    """

    def __init__(self, clock: Clock, make: Callable[[], str]) -> None:
        self._clock = clock
        self._make = make
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Proposal] = OrderedDict()

    def add(self, holder: str, action: Decision, choice: Choice, look: Look) -> Proposal:
        """Keep what is being shown."""
        now_s = self._clock.monotonic_s()
        made = Proposal(self._make(), holder, action, choice, look, now_s)
        with self._lock:
            self._kept[made.nonce] = made
            held = sum(_size(one) for one in self._kept.values())
            for nonce, one in list(self._kept.items()):
                too_old = now_s - one.at_s >= KEPT_S
                if one is made or (not too_old and len(self._kept) <= KEPT_MAX and held <= PINNED_MAX):
                    continue
                if one.outcome is not None and one.outcome.canary is not None and one.outcome.canary.is_running:
                    continue
                held -= _size(one)
                del self._kept[nonce]
        return made

    def find(self, nonce: str, holder: str) -> Proposal | None:
        """A proposal of this holder's; None if there is none (any more)."""
        with self._lock:
            found = self._kept.get(nonce)
        return found if found is not None and found.holder == holder else None

    def running(self) -> list[Proposal]:
        """Those whose canaries go on."""
        with self._lock:
            kept = list(self._kept.values())
        return [one for one in kept if one.outcome and one.outcome.canary and one.outcome.canary.is_running]

    def close(self) -> None:
        """Have canaries hand out no further wave."""
        for one in self.running():
            assert one.outcome is not None
            assert one.outcome.canary is not None
            one.outcome.canary.stop()


def _size(one: Proposal) -> int:
    return max(one.look.count or 1, 1) if one.look.fixed and one.outcome is None else 1
