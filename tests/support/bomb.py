"""A message that takes the driver down with it, as one does that exhausts the machine's memory."""

from __future__ import annotations

import os
import signal

from support.topologies import Split

BOMB = b"bomb"


def arm() -> None:
    """Have `Split` kill its process at the bomb; for a child process (`Cell.sabotage`)."""
    harmless = Split.__call__

    def call(self: Split, line: str) -> list[str]:
        if line == BOMB.decode():
            os.kill(os.getpid(), signal.SIGKILL)
        return harmless(self, line)

    Split.__call__ = call  # type: ignore[method-assign]
