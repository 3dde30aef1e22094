"""`Heartbeat`: what a task calls to report its progress.

The row count costs a loop nothing: a thread looks five times a second at how far the loop's own iterator is. The note of
the message in hand is made before each row is handed out, and in careful jobs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from types import TracebackType
from typing import Final, TypeVar

from stormproof.core.base.arrays import Rows
from stormproof.core.heartbeat.connection import Connection
from stormproof.core.heartbeat.record import Report
from stormproof.core.heartbeat.wire import Place

T = TypeVar("T")

EVERY_S: Final = 0.2
"""How often a task's row count is reported."""


class Heartbeat:
    """One running task's signs of life. Made by `running`. Only the task's thread may call it.

    A task calls `begin` for each record batch that it takes through its steps, and `enter` at each step; one without a loop
    calls `beat`. Loops over rows go through `each`. In careful mode the task calls `at` with the rows' message numbers
    before it hands rows to a row-wise function. `steps` has the number of each component of the stage.
    """

    def __init__(
        self, place: Place, stage: int, task: int, *, careful: bool, steps: Mapping[str, int] | None = None
    ) -> None:
        self.careful, self._steps = careful, steps or {}
        self._connection = Connection(place, stage, task)
        # (rows of finished loops and batches, the running loop's iterator, the number of its items); one tuple, so that the
        # publishing thread never sees half of a change.
        self._at: tuple[int, Iterator[object], int] = (0, iter(()), 0)
        # (the step's number, rows worked on before it, its rows, those of earlier passages, those of this one); likewise.
        self._where: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        self._total = 0
        self._ids: Rows | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="stormproof-heartbeat", daemon=True)
        self._thread.start()

    # What a task calls.

    def expect(self, rows: int) -> None:
        """Say how many rows the task was sent."""
        self._total = rows

    def begin(self, rows: int) -> None:
        """Begin a passage: these rows were read, and go through the steps from here on. The passage before is over."""
        self.beat(rows)
        _, _, _, before, passage = self._where
        self._where = (0, 0, 0, before + passage, rows)

    def enter(self, component: str, rows: int) -> None:
        """Begin a step, with so many rows that are made of the passage's."""
        self._where = (self._steps.get(component, 0), self._rows(), rows, *self._where[3:])

    def beat(self, rows: int = 1) -> None:
        """Add to the number of rows worked on; any number above 0 is a sign of life."""
        self._at = (self._rows() + rows, iter(()), 0)

    def reset(self) -> None:
        """Give a sign of life inside a long call: the timeout counts from here (Storm's reset timeout)."""
        done, left, total = self._at
        self._at = (done + 1, left, total)
        step, worked, of_step, before, passage = self._where
        self._where = (step, worked + 1, of_step, before, passage)  # it is no row of the step

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
        """Report now. The heartbeat's own thread does so by itself."""
        self._connection.publish(self._report())

    # The end.

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close(self._report(), failed=kind is not None)

    # Its own.

    def _rows(self) -> int:
        done, left, total = self._at
        return done + total - length_hint(left)

    def _report(self) -> Report:
        rows, (step, worked, of_step, before, passage) = self._rows(), self._where
        in_hand = int(self._at[2] > 0)  # the row that a loop took last
        share = (rows - worked - in_hand) / of_step if of_step else 0.0
        return rows, step, self._total, before, passage, int(passage * min(max(share, 0.0), 1.0))

    def _keep_publishing(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.publish()
            except MemoryError:  # the user's function has taken all memory, and gets the same error
                continue


@contextmanager
def running(
    place: Place | None, stage: int, task: int, *, careful: bool = False, steps: Mapping[str, int] | None = None
) -> Generator[Heartbeat | None]:
    """A task's heartbeat while the block runs; None where the job has none.

    Where an exception leaves the block, the task has failed, and the message that it had in hand stays a suspect.

    Raises:
        MachineUnavailable: the job is over, or this machine does not reach the driver.
    """
    if place is None:
        yield None
        return
    with Heartbeat(place, stage, task, careful=careful, steps=steps) as heartbeat:
        yield heartbeat
