"""`Pulse`: what a task calls to report its progress.

The row count costs a loop nothing: a thread looks five times a second at how far the loop's own iterator is. The note of
the message in hand is made before each row is handed out, and in careful jobs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from types import TracebackType
from typing import Final, TypeVar

from stormproof.core.arrays import Rows
from stormproof.core.pulse.connection import Connection
from stormproof.core.pulse.wire import Place

T = TypeVar("T")

EVERY_S: Final = 0.2
"""How often a task's row count is reported."""


class Pulse:
    """One running task's signs of life. Made by `running`. Only the task's thread may call it.

    A task calls `beat` for each record batch that it read, combined or wrote. Loops over rows go through `each`. In careful
    mode the task calls `at` with the rows' message numbers before it hands rows to a row-wise function.
    """

    def __init__(self, place: Place, stage: int, task: int, *, careful: bool) -> None:
        self.careful = careful
        self._connection = Connection(place, stage, task)
        # (rows of finished loops and batches, the running loop's iterator, the number of its items); one tuple, so that the
        # publishing thread never sees half of a change.
        self._at: tuple[int, Iterator[object], int] = (0, iter(()), 0)
        self._ids: Rows | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="stormproof-pulse", daemon=True)
        self._thread.start()

    # What a task calls.

    def beat(self, rows: int = 1) -> None:
        """Add to the number of rows worked on; any number above 0 is a sign of life."""
        self._at = (self._rows() + rows, iter(()), 0)

    def reset(self) -> None:
        """Give a sign of life inside a long call: the timeout counts from here (Storm's reset timeout)."""
        done, left, total = self._at
        self._at = (done + 1, left, total)

    def at(self, ids: Rows | None) -> None:
        """Set the message number of each item of the next `each`; None where rows belong to no single message.

        Only needed where `careful` is on. It holds until the next call of `at`.
        """
        self._ids = ids

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Iterate over the items; each one taken is a sign of life.

        In careful mode each item's message is noted before the item is handed out. The note is removed after the last item.
        """
        left = iter(items)
        self._at = (self._rows(), left, len(items))
        ids = self._ids
        return left if ids is None or not self.careful else self._connection.noting(ids, left)

    def publish(self) -> None:
        """Report the row count now. The pulse's own thread does so by itself."""
        self._connection.publish(self._rows())

    # The end.

    def __enter__(self) -> Pulse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close(self._rows(), failed=kind is not None)

    # Its own.

    def _rows(self) -> int:
        done, left, total = self._at
        return done + total - length_hint(left)

    def _keep_publishing(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.publish()
            except MemoryError:  # the user's function has taken all memory, and gets the same error
                continue


@contextmanager
def running(place: Place | None, stage: int, task: int, *, careful: bool = False) -> Generator[Pulse | None]:
    """A task's pulse while the block runs; None where the job has none.

    Where an exception leaves the block, the task has failed, and the message that it had in hand stays a suspect.

    Raises:
        MachineUnavailable: the job is over, or this machine does not reach the driver.
    """
    if place is None:
        yield None
        return
    with Pulse(place, stage, task, careful=careful) as pulse:
        yield pulse
