"""The three guarantees that a topology can be run under.

Who keeps them: `trident.driver.steps` decides when a message is confirmed, `core.tracking.attempts` what a verdict leads to,
`trident.driver.recovery` what a crash leads to, and each sink's `decide` (`sinks.contract.protocol`) what is
committed twice.
"""

from __future__ import annotations

from enum import StrEnum


class Guarantee(StrEnum):
    """What is promised about each message, for any schedule of crashes.

    `AT_MOST_ONCE`: confirmed before it is processed; no sink row of it ever appears twice.
    `AT_LEAST_ONCE`: confirmed only after every tuple anchored to it was acked and every sink wrote; nothing is lost.
    `EXACTLY_ONCE`: each sink's content equals the fold of the committed transactions.
    """

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"

    @property
    def tracked(self) -> bool:
        """Whether tuples carry shares, and the batch needs the acker's verdict."""
        return self is not Guarantee.AT_MOST_ONCE
