"""The one thread from which a bolt may emit, ack and fail: that of its task.

A bolt's own thread would get between the steps of another call, or come when the batch is over. Such a call is refused by
name, and so is one from a fork, whose rows nobody would see. The run ends with that name, too: an error that is raised in a
thread may be seen by nobody.
"""

from __future__ import annotations

import logging
import os
from threading import get_ident

from stormproof.core.errors import TasksBroken, UsageError

log = logging.getLogger("stormproof.bolt")


class OwnThread:
    """Whose calls a bolt's task takes. `ident` is compared with `get_ident()` at each call; 0 once the task is over."""

    __slots__ = ("_component", "_made_by", "_refused", "ident")

    def __init__(self, component: str) -> None:
        self._component = component
        self._refused = ""
        self.ident = self._made_by = get_ident()
        _open.add(self)

    def refuse(self, call: str) -> None:
        """Raise UsageError for a call from elsewhere, and note it for the task. One that merely comes late is left alone."""
        if get_ident() == self._made_by:
            return
        if not self._refused:  # the first one: the error itself may be seen by nobody
            self._refused = (
                f"bolt {self._component!r} called {call} from a thread or a fork of its own, where only the thread that "
                "runs its task may: have your threads return their results, and emit, ack and fail in execute or finish"
            )
            log.error("%s; the call had no effect", self._refused)
        raise UsageError(self._refused, component=self._component)

    def require_none_refused(self) -> None:
        """Raise TasksBroken where a call from elsewhere was refused: what it was to emit is nowhere."""
        if self._refused:
            raise TasksBroken(self._refused, component=self._component)

    def abandon(self) -> None:
        """This is a fork: nothing that it calls has an effect."""
        self.ident = self._made_by = 0

    def close(self) -> None:
        """The task is over."""
        self.ident = 0
        _open.discard(self)

    def __reduce__(self) -> str:
        raise UsageError(
            f"bolt {self._component!r}: what emits and acks belongs to its task, and cannot be pickled or copied: give "
            "other processes values, and emit what they return",
            component=self._component,
        )


_open: set[OwnThread] = set()


def _in_child() -> None:
    for owner in _open:
        owner.abandon()


os.register_at_fork(after_in_child=_in_child)
