"""Groupings: which task of a subscriber each tuple of a stream goes to, and what each of them promises."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.calls import refuse_unfit_call
from stormproof.core.errors import Json, RoutingError, TopologyError
from stormproof.core.graph.keyhash import can_be_key, hash_keys, task_numbers
from stormproof.core.message import storable_text
from stormproof.core.tracking.share import mix64

TaskFunction: TypeAlias = Callable[[pa.RecordBatch, int], object]
"""A custom grouping: rows and the number of tasks to an array of integers, the task number of each row."""

Tasks: TypeAlias = npt.NDArray[np.int32]
"""Task numbers."""

LEVELLED_PAIRS_MAX: Final = 512
"""Pairs of candidate tasks that partial_key levels one by one in a batch: all there are with up to 32 tasks."""

_FIRST: Final = np.uint64(0x2545F4914F6CDD1D)
_SECOND: Final = np.uint64(0xD1342543DE82EF95)
_BY_KEY: Final = frozenset({"fields", "partial_key"})


class GroupingKind(StrEnum):
    """How tuples reach the tasks of a subscriber.

    Each promise is kept by every emitting task for the tuples that this task sends; none depends on what others send.
    A message that is replayed, and a task that Spark runs again, may route a tuple elsewhere, but for `FIELDS`,
    `GLOBAL` and `ALL`.
    """

    SHUFFLE = "shuffle"
    """Round robin: the numbers of tuples that one emitting task sent to any two tasks differ by at most 1."""
    FIELDS = "fields"
    """Equal values of the fields go to the same task: of one batch and of all, whoever emits them, for as long as the
    number of tasks is the same. NULL is a value like any other: all NULLs of a field are equal. Nothing is promised
    of balance: a heavy key makes a heavy task."""
    ALL = "all"
    """Every task gets a copy of every tuple, and each copy is tracked: all of them must be acked."""
    GLOBAL = "global"
    """Task 0 gets every tuple."""
    NONE = "none"
    """It does not matter. The tuples stay in the task that emitted them: nothing is promised of balance."""
    LOCAL_OR_SHUFFLE = "local_or_shuffle"
    """The tuples stay in the task that emitted them, which here always runs the subscriber, too."""
    PARTIAL_KEY = "partial_key"
    """Each value of the fields has two candidate tasks and goes to no other; of the two, the one that got less.

    The power of two choices: M. A. U. Nasir et al., "The power of both choices: practical load balancing for
    distributed stream processing engines", ICDE 2015. A key's results come from two tasks: what follows merges them.
    By Zipf's law (any exponent; ten keys a task and more, once a task has some hundred tuples) no task gets more than
    1.1 times the mean where the heaviest key has at most 1 / tasks of all tuples, and 1.5 times where it has at most
    2 / tasks. A heavier key fits into no two tasks: its candidates then get half of it each. Values are equal as they
    are for `FIELDS`."""
    DIRECT = "direct"
    """The emitter names the task of each tuple."""
    CUSTOM = "custom"
    """A function names the task of each tuple, a record batch at a time."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """What a subscriber says of how a stream's tuples reach its tasks; see `GroupingKind` for what each promises.

    `fields` are the key of fields and partial_key. `function` is a custom grouping's: it takes the rows and the number
    of tasks, and gives an integer from 0 to the number of tasks - 1 for each row. It is called for a record batch at a
    time, never for an empty one, and should depend on nothing but the rows: Spark may run it again, and where it raises
    or answers nonsense, it is called again with halves of the batch, until the rows to blame stand alone.
    """

    kind: GroupingKind
    fields: tuple[str, ...] = ()
    function: TaskFunction | None = None

    @property
    def fused(self) -> bool:
        """Whether the subscriber runs in the emitting task, without an exchange."""
        return self.kind in (GroupingKind.NONE, GroupingKind.LOCAL_OR_SHUFFLE)

    def check(self, schema: pa.Schema, component: str) -> None:
        """Check the grouping by which a component subscribes to a stream of this schema.

        Raises:
            TopologyError: a field is unknown, stands twice or cannot be a key; fields or the function are missing, or
                there where the kind has no use for them.
        """
        where = f"component {component!r}, {self.kind} grouping"
        known = ", ".join(schema.names)
        if self.kind in _BY_KEY and not self.fields:
            raise TopologyError(f"{where}: name at least one field; known: {known}", component=component)
        if self.fields and self.kind not in _BY_KEY:
            raise TopologyError(
                f"{where}: it takes no fields, got {', '.join(map(repr, self.fields))}; use a fields grouping for "
                "equal values to the same task",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM and not callable(self.function):
            raise TopologyError(
                f"{where}: it needs a function of the rows and the number of tasks, got {self.function!r}",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM:
            instead = "write one like f(rows, tasks), which gives the number of a task for each row"
            refuse_unfit_call(component, where, self.function, ("rows", "tasks"), instead)
        if self.kind is not GroupingKind.CUSTOM and self.function is not None:
            raise TopologyError(f"{where}: it takes no function; only a custom grouping does", component=component)
        for number, name in enumerate(self.fields):
            if name not in schema.names:
                raise TopologyError(
                    f"{where}: unknown field {name!r}; known: {known}", component=component, field=str(name)
                )
            if name in self.fields[:number]:
                raise TopologyError(f"{where}: field {name!r} stands twice", component=component, field=name)
            type_ = schema.field(name).type
            if not can_be_key(type_):
                raise TopologyError(
                    f"{where}: field {name!r} is {type_}, which can't be a key: its values do not compare alike "
                    "everywhere; use a string, an integer, a decimal, a date or a boolean",
                    component=component,
                    field=name,
                )


class Router:
    """Finds the tasks of what one emitting task sends to one subscriber; it remembers what it sent.

    `tasks` is the number of the subscriber's tasks, `task` the emitting task's number, `component` the subscriber, for
    errors. The same rows in the same order give the same tasks.
    """

    __slots__ = ("_component", "_grouping", "_next", "_sent", "_task", "_tasks")

    def __init__(self, grouping: Grouping, tasks: int, task: int, *, component: str = "?") -> None:
        if tasks < 1 or task < 0:
            raise ValueError(f"task {task} cannot send to {tasks} tasks")
        self._grouping, self._tasks, self._task, self._component = grouping, tasks, task, component
        # Emitting tasks begin one after the other: their surplus tuples then spread, too, and not all go to task 0.
        self._next = task % tasks
        self._sent = [0] * (tasks if grouping.kind is GroupingKind.PARTIAL_KEY else 0)

    @property
    def copies(self) -> bool:
        """Whether each row goes to every task: `route` then gives `tasks` numbers a row."""
        return self._grouping.kind is GroupingKind.ALL

    def route(self, rows: pa.RecordBatch, direct: Rows | None = None) -> Tasks:
        """The task of each delivery: one a row, in the rows' order.

        For the all grouping there are as many a row as there are tasks: those of the first row, then of the second.
        `direct` has the emitter's task of each row, for a direct grouping; others ignore it.

        Raises:
            RoutingError: a custom function raised, or gave no task number for a row; or the emitter of a direct
                grouping gave none. Its `rows` are the culprits, its `texts` what is wrong with each; the others can be
                routed without them. The router is as it was before.
        """
        number = int(rows.num_rows)
        match self._grouping.kind:
            case GroupingKind.SHUFFLE:
                return self._in_turn(number)
            case GroupingKind.FIELDS:
                return task_numbers(rows, self._grouping.fields, self._tasks)
            case GroupingKind.ALL:
                return np.tile(np.arange(self._tasks, dtype=np.int32), number)
            case GroupingKind.GLOBAL:
                return np.zeros(number, np.int32)
            case GroupingKind.NONE | GroupingKind.LOCAL_OR_SHUFFLE:  # if these are sent at all: to one's own number
                return np.full(number, self._task, np.int32) if self._task < self._tasks else self._in_turn(number)
            case GroupingKind.PARTIAL_KEY:
                return self._less_loaded(rows)
            case GroupingKind.DIRECT:
                if direct is None:
                    raise self._error("the emitter named no task; emit with one")
                return self._checked(direct, number, "the emitter named")
            case GroupingKind.CUSTOM:
                return self._custom(rows)

    def _in_turn(self, number: int) -> Tasks:
        tasks = (np.arange(self._next, self._next + number) % self._tasks).astype(np.int32)
        self._next = (self._next + number) % self._tasks
        return tasks

    def _less_loaded(self, rows: pa.RecordBatch) -> Tasks:
        """Two candidates a key; rows with the same two are divided so as to level what was sent to both.

        What counts for the loads is not a key but its pair of candidates, of which there are at most
        tasks * (tasks - 1) / 2, whatever the number of keys or rows.
        """
        number = int(rows.num_rows)
        if self._tasks == 1 or number == 0:
            return np.zeros(number, np.int32)
        low, high = candidates(rows, self._grouping.fields, self._tasks)
        # Small integers are sorted by radix.
        pair = (low * np.int64(self._tasks) + high).astype(np.uint16 if self._tasks <= 256 else np.int64)
        order = np.argsort(pair, kind="stable")
        ordered = pair[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(starts, append=number)
        firsts = order[starts]
        to_low = self._divide(low[firsts], high[firsts], counts)
        place = np.arange(number) - np.repeat(starts, counts)
        tasks = np.empty(number, np.int32)
        tasks[order] = np.where(place < np.repeat(to_low, counts), low[order], high[order])
        return tasks

    def _divide(self, low: Rows, high: Rows, counts: Rows) -> Rows:
        """How many of each pair's rows go to its first task.

        The pairs with the most rows come last and even out what the others did: they can. Of very many pairs the
        lighter ones are divided a block at a time by the loads before it, each taking its part of two tasks' gap.
        """
        lightest_first = np.argsort(counts, kind="stable")
        light = max(len(counts) - LEVELLED_PAIRS_MAX, 0)
        to_low = np.empty(len(counts), np.int64)
        sent = np.array(self._sent, np.int64)
        for start in range(0, light, LEVELLED_PAIRS_MAX):
            block = lightest_first[start : min(start + LEVELLED_PAIRS_MAX, light)]
            one, other, count = low[block], high[block], counts[block]
            part = max(2 * len(block) // self._tasks, 1)  # the pairs of the block that a task has on average
            odd = np.arange(len(block)) % 2  # of an odd number of rows the last goes to either side in turn
            mine = np.clip((count + (sent[other] - sent[one]) // part + odd) // 2, 0, count)
            to_low[block] = mine
            np.add.at(sent, one, mine)
            np.add.at(sent, other, count - mine)
        loads: list[int] = sent.tolist()
        heavy = lightest_first[light:][::-1]
        pairs = zip(low[heavy].tolist(), high[heavy].tolist(), counts[heavy].tolist(), strict=True)
        made: list[int] = []
        for first, second, rows in pairs:
            to_first = min(max((rows + loads[second] - loads[first]) // 2, 0), rows)
            loads[first] += to_first
            loads[second] += rows - to_first
            made.append(to_first)
        to_low[heavy] = made
        self._sent = loads
        return to_low

    def _custom(self, rows: pa.RecordBatch) -> Tasks:
        """Over all rows at once; where the answer is of no use, over halves, until the culprits stand alone."""
        number = int(rows.num_rows)
        tasks, wrong = np.zeros(number, np.int32), dict[int, str]()
        todo = [(0, number)] if number else []
        while todo:
            start, stop = todo.pop()
            try:
                tasks[start:stop] = self._answer(rows.slice(start, stop - start))
            except RoutingError as error:
                if error.rows is not None:
                    wrong |= {start + row: text for row, text in error.texts.items()}
                elif stop - start == 1:
                    wrong[start] = error.message
                else:
                    middle = (start + stop) // 2
                    todo += [(middle, stop), (start, middle)]
        if wrong:
            raise self._error_of(wrong)
        return tasks

    def _answer(self, rows: pa.RecordBatch) -> Tasks:
        """What the function says of these rows, held to what it should give."""
        function, number = self._grouping.function, int(rows.num_rows)
        if function is None:
            raise self._error("it has no function")
        name = f"function {storable_text(getattr(function, '__qualname__', repr(function)), 200)}"
        try:
            answer: Any = function(rows, self._tasks)
            if isinstance(answer, (pa.Array, pa.ChunkedArray)) and answer.null_count:
                nulls = answer.is_null().to_numpy(zero_copy_only=False) if len(answer) == number else ()
                raise self._error(f"{name} gave NULL", np.flatnonzero(nulls))
            numbers: npt.NDArray[Any] = np.asarray(answer)
        except (RoutingError, KeyboardInterrupt):
            raise
        except BaseException as error:  # users' code may raise anything, sys.exit too: its messages answer for it
            raise self._error(f"{name} raised {_raised(error)}") from error
        return self._checked(numbers, number, f"{name} gave")

    def _checked(self, numbers: npt.NDArray[Any], number: int, who: str) -> Tasks:
        if numbers.shape != (number,):
            raise self._error(f"{who} numbers of shape {numbers.shape} for {number} rows; give one task number a row")
        if numbers.dtype.kind not in "iu":
            raise self._error(f"{who} {numbers.dtype} instead of integers; give task numbers")
        wrong = np.flatnonzero((numbers < 0) | (numbers >= self._tasks))
        if len(wrong):
            there = f"there are tasks 0 to {self._tasks - 1}"
            raise self._error_of({int(row): self._text(f"{who} task {numbers[row]}; {there}") for row in wrong})
        return numbers.astype(np.int32)

    def _text(self, text: str) -> str:
        return f"component {self._component!r}, {self._grouping.kind} grouping: {text}"

    def _error(self, text: str, rows: npt.NDArray[np.int64] | None = None) -> RoutingError:
        said = self._text(text)
        if rows is not None and len(rows):
            return self._error_of(dict.fromkeys(rows.tolist(), said))
        return RoutingError(said, component=self._component, grouping=self._grouping.kind.value)

    def _error_of(self, texts: dict[int, str]) -> RoutingError:
        first, others = min(texts), len(texts) - 1
        pairs: list[Json] = [[row, texts[row]] for row in sorted(texts)]
        return RoutingError(
            f"{texts[first]} (row {first}{f' and {others} more' if others else ''} of the record batch)",
            component=self._component,
            grouping=self._grouping.kind.value,
            rows=pairs,
        )


def candidates(rows: pa.RecordBatch, fields: tuple[str, ...], tasks: int) -> tuple[Rows, Rows]:
    """The two candidate tasks of each row's key under partial_key, the lower number first; `tasks` is at least 2.

    Two hashes of the key, made apart from the one of fields groupings: where keys come out of such a grouping, an
    emitting task holds just those keys whose hash there is its own number.
    """
    keys = hash_keys(rows, fields)
    one = (mix64(keys ^ _FIRST) % np.uint64(tasks)).astype(np.int64)
    step = (mix64(keys ^ _SECOND) % np.uint64(tasks - 1)).astype(np.int64)
    other = (one + 1 + step) % tasks  # never the same one
    return np.minimum(one, other), np.maximum(one, other)


def _raised(error: BaseException) -> str:
    """An exception's type and text, and where it was raised unless that was here."""
    text = f"{type(error).__name__}: {storable_text(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == __file__:
        return text
    last = frames[-1]
    return f"{text} ({storable_text(os.path.basename(last.filename))}:{last.lineno} in {last.name})"
