"""Messages: what a source hands out, what is promised of each, how one fails, and how its text is made safe to store.

Who keeps the three guarantees: `trident.driver.steps` decides when a message is confirmed, `core.tracking.attempts` what
a verdict leads to, `trident.driver.recovery` what a crash leads to, and each sink's `decide` (`sinks.contract.protocol`)
what is committed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from stormproof.core.base.errors import TopologyError


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


MessageId = NewType("MessageId", int)
"""A message's number in its source: a signed 64-bit integer, unique there for ever."""

Token = NewType("Token", int)
"""A message's 64-bit start value in one attempt, as a signed integer."""

ERROR_TEXT_MAX = 4_000
INPUT_TEXT_MAX = 2_000


class FailureReason(StrEnum):
    """Why a message failed; the only list of reasons."""

    FAILED = "failed"
    """A bolt called fail."""
    ERROR = "error"
    """A bolt raised."""
    TIMEOUT = "timeout"
    UNACKED = "unacked"
    """A bolt ended without ack or fail."""
    WORKER_LOST = "worker_lost"
    LOST = "lost"
    """The ack val was not zero."""
    SINK_ERROR = "sink_error"
    """A sink cannot hold what the message became."""
    BAD_MESSAGE = "bad_message"
    """It does not decode."""
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class MessageFailure:
    """One message that failed in one attempt, and why.

    `counted` is False for a message that is only returned: it shares a tuple with a failed message (both anchor it), so
    both are opened again together, and no failure is counted for it. `origin` is the first part of the id that people
    see (`XID` of `XID-N` in a Postgres queue; 0 where there is none). `error` and `input` are escaped and cut: see
    `storable_text`. `mates`, if not 0, is how many messages of the batch failed or are returned with it and come again in
    one batch, itself included.
    """

    id: MessageId
    origin: int
    token: Token
    reason: FailureReason
    component: str
    error: str
    input: str = ""
    counted: bool = True
    mates: int = 0


def storable_text(value: object, limit: int = ERROR_TEXT_MAX) -> str:
    """Text that any database can hold: NUL, control characters and lone surrogates escaped, cut to `limit` characters.

    Postgres's text and jsonb hold neither NUL nor broken UTF-8, and an exception's text may have both; `str` of a
    user's exception may itself raise.
    """
    try:
        # A subclass of str may lie about itself: only the plain text counts.
        text = str.__str__(value if isinstance(value, str) else str(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's __str__ may raise anything (sys.exit, too), and the failure must still be recorded
        text = f"<{type(value).__name__} whose text cannot be made: {type(error).__name__}>"
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def as_guarantee(guarantee: Guarantee | str, where: str | None = None) -> Guarantee:
    """The guarantee of that name; `where` begins the error.

    Raises:
        TopologyError: there is none of that name.
    """
    try:
        return Guarantee(guarantee)
    except ValueError:
        known = ", ".join(g.value for g in Guarantee)
        before = "" if where is None else f"{where}: "
        raise TopologyError(f"{before}no guarantee {guarantee!r}; known: {known}") from None
