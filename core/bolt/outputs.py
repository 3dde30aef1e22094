"""One output stream of a component in one call: what was emitted to it, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Final, SupportsIndex, cast

import pyarrow as pa

from stormproof.core.base.errors import UsageError
from stormproof.core.bolt.tuples import Tuple
from stormproof.core.user_code.python_to_arrow import batch_of

DEFAULT_STREAM: Final = "default"


class Output:
    """What was emitted to one stream in one call; `tasks` is the number of tasks of its direct() subscriber, if it has one.

    `handles` and `ordinals` have one entry for each link. Most tuples have one link: `odd` names those that have not, as
    (row, number of links, tuple in hand).
    """

    __slots__ = ("_component", "chosen", "handles", "name", "odd", "ordinals", "schema", "tasks", "values")

    def __init__(self, component: str, name: str, schema: pa.Schema, tasks: int | None) -> None:
        self._component = component
        self.name = name
        self.schema = schema
        self.tasks = tasks
        self.clear()

    def clear(self) -> None:
        """Make it ready for the next call."""
        self.values: list[object] = []
        self.handles: list[int] = []
        self.ordinals: list[int] = []
        self.odd: list[tuple[int, int, Tuple | None]] = []
        self.chosen: list[int] = []

    def batch(self) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
        """The values as rows, and (row, error) of those that the schema cannot hold."""
        batch, errors = batch_of(self.values, self.schema, (), "got")
        return batch, [(row, self._explained(row, text)) for row, text in errors]

    def _explained(self, row: int, text: str) -> str:
        value = self.values[row]
        said = f"component {self._component!r} emitted to its stream {self.name!r} what that cannot hold: {text}"
        if len(self.schema) == 1 and isinstance(value, (tuple, list, dict)) and len(cast("list[object]", value)) == 1:
            said += "; a stream of one field is given the value itself"
        return said

    def checked_task(self, task: object) -> int | None:
        """The number of the task that a tuple names; None where the stream has no direct() subscriber.

        Raises:
            UsageError: it is missing, out of range, or the stream has no direct() subscriber.
        """
        if self.tasks is None:
            if task is None:
                return None
            raise self._refused(
                f"emit(task={task!r}), but nobody subscribes to it with direct(); leave the task out, or subscribe with "
                ".direct()"
            )
        if task is None:
            raise self._refused(
                f"it has a direct() subscriber, so each tuple names its task: emit(..., task=0 to {self.tasks - 1})"
            )
        try:
            number = operator.index(cast("SupportsIndex", task))
        except TypeError:
            number = -1
        if isinstance(task, bool) or not 0 <= number < self.tasks:
            raise self._refused(f"emit(task={task!r}), but the direct() subscriber has the tasks 0 to {self.tasks - 1}")
        return number

    def _refused(self, text: str) -> UsageError:
        place = f"component {self._component!r}, stream {self.name!r}"
        return UsageError(f"{place}: {text}", component=self._component, stream=self.name)


def unknown_stream(component: str, stream: object, known: Mapping[str, Output], closed: bool) -> UsageError:
    """The error for a stream that cannot be emitted to."""
    if closed:
        return UsageError(
            f"component {component!r} emitted to {stream!r} outside its call; emit within execute or finish only",
            component=component,
            stream=str(stream),
        )
    return UsageError(
        f"component {component!r} has no stream {stream!r}; known: {', '.join(known) or 'none, declare it in streams'}",
        component=component,
        stream=str(stream),
    )
