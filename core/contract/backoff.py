"""How long a failed message waits before it is handed out again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, bounded on both sides.

    After its n-th failure a message waits between half of `base_s * 2**(n-1)` and all of it, never more than `max_s`.
    The jitter keeps messages that failed together from coming back, and failing, together for ever.
    """

    base_s: float
    max_s: float

    def delay_s(self, times_failed: int, rng: Random) -> float:
        """Seconds to wait after the `times_failed`-th failure (counted from 1)."""
        exponent = min(max(times_failed, 1) - 1, 62)  # beyond that every base has long reached its maximum
        return min(self.max_s, self.base_s * float(2**exponent)) * (0.5 + 0.5 * rng.random())
