"""`context`: what a user's function may ask about the call that it is in."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from stormproof.core.base.errors import UsageError

_message_id: ContextVar[Callable[[], str] | None] = ContextVar("stormproof_message_id", default=None)
"""Answers for the call in hand. A function is called far more often than it asks."""


class CallContext:
    """The call that a function is in: that of `map`, `flat_map`, `each`, `filter` or `peek`. Made once, as `context`."""

    @property
    def message_id(self) -> str:
        """The id of the message that the function's tuple was made of, as dead letters and lineage columns show it.

        It is the same at each attempt at the message, and no other message of the topology has it: an idempotency key,
        where the function makes one request for a message. Where `flat_map` made several tuples of a message before, they
        share its id.

        Raises:
            UsageError: this is no such call, or a thread that the function started itself; or the tuple was made of several
                messages, or of none (behind a group or a join).
        """
        answer = _message_id.get()
        if answer is None:
            raise UsageError(
                "context.message_id is known inside a call of a function of map, flat_map, each, filter or peek, in the "
                "thread that runs the call; ask there, and hand it on"
            )
        return answer()


context = CallContext()
"""The call that the present thread, or the present asyncio task, is in."""


def answer_with(message_id: Callable[[], str]) -> None:
    """Have `context` ask this for calls of the present thread or task, up to the end of `calls_end_here`."""
    _message_id.set(message_id)


@contextmanager
def calls_end_here() -> Generator[None]:
    """Undoes `answer_with` at the block's end."""
    before = _message_id.set(None)
    try:
        yield
    finally:
        _message_id.reset(before)
