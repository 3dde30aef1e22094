"""The router: finds the task of each tuple by a grouping, a record batch at a time.

A key's task follows from a hash of the key columns that is the same in every process and for every form of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.base.errors import Json, RoutingError
from stormproof.core.contract.schema import can_be_key
from stormproof.core.graph.components import Grouping, GroupingKind
from stormproof.core.tracking.share import GAMMA, mix64
from stormproof.core.user_code.functions import CAUGHT, blame, name_of

_BASE: Final = np.uint64(0x9E3779B97F4A7C55)
"""Odd, so that no power of it loses bits."""
_SAMPLE: Final = 2_048
_NULL: Final = np.uint64(0xA3F5C1E29B7D6084)


def task_numbers(rows: pa.RecordBatch, keys: Sequence[str], tasks: int) -> npt.NDArray[np.int32]:
    """The task, 0 to `tasks` - 1, of each row's key.

    Equal keys have equal tasks in any record batch, and in any form of Arrow's (a slice, a dictionary, large strings). NULL
    is a value like any other, equal to itself.
    """
    if tasks == 1:
        return np.zeros(rows.num_rows, np.int32)
    return (hash_keys(rows, keys) % np.uint64(tasks)).astype(np.int32)


def hash_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> Words:
    """A 64-bit hash of each row's key."""
    total = np.zeros(rows.num_rows, np.uint64)
    for key in keys:
        total = mix64(total * GAMMA + GAMMA ^ _hash_column(rows.column(key)))
    return total


def is_hashable(kind: pa.DataType) -> bool:
    """Whether `hash_keys` takes columns of such values: those of fields that can be keys, and their large forms."""
    return can_be_key(kind) or bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _hash_column(column: pa.Array) -> Words:
    if len(column) == 0:
        return np.empty(0, np.uint64)
    if _repeats(column):
        column = column.dictionary_encode()
    hashes = _hash_dictionary(column) if pa.types.is_dictionary(column.type) else _hash_values(column)
    if column.null_count:  # the value in a NULL's place is arbitrary
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def _repeats(column: pa.Array) -> bool:
    """Whether it pays to hash each distinct text once only, by an estimate from the first rows. Both ways give one result.

    Of `_SAMPLE` rows drawn from D equally frequent values, about sample^2 / 2D repeat an earlier one. It pays where there
    are fewer than about half as many values as rows.
    """
    type_ = column.type
    if len(column) <= 2 * _SAMPLE or not (pa.types.is_string(type_) or pa.types.is_binary(type_)):
        return False
    distinct = int(pc.count_distinct(column.slice(0, _SAMPLE), mode="all").as_py())
    return (_SAMPLE - distinct) * len(column) >= _SAMPLE * _SAMPLE


def _hash_dictionary(column: pa.Array) -> Words:
    """Hash each value of the dictionary once. NULL may be an index or a value."""
    if len(column.dictionary) == 0:  # then every index is NULL
        return np.full(len(column), _NULL, np.uint64)
    places: Rows = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return _hash_column(column.dictionary)[places]


def _hash_values(column: pa.Array) -> Words:
    type_ = column.type
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return _hash_bytes(column, np.dtype(np.int32))
    if pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        return _hash_bytes(column, np.dtype(np.int64))
    if pa.types.is_decimal128(type_):
        halves = np.frombuffer(column.buffers()[1], np.uint64)
        pairs = halves[2 * column.offset : 2 * (column.offset + len(column))].reshape(-1, 2)
        return mix64(mix64(pairs[:, 0]) ^ pairs[:, 1])
    if pa.types.is_date32(type_):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(type_) or pa.types.is_uint64(type_):
        column = column.view(pa.int64())
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    return mix64(np.ascontiguousarray(pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False)).view(np.uint64))


def _hash_bytes(column: pa.Array, offset: np.dtype[Any]) -> Words:
    """A polynomial over each value's bytes, for all values in one pass."""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, offset)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    hashes = np.zeros(len(column), np.uint64)
    lengths = np.diff(offsets)
    if data_buffer is not None and offsets[-1] > offsets[0]:
        data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64) + np.uint64(1)
        starts = offsets[:-1] - offsets[0]
        powers = np.full(int(lengths.max()), _BASE, np.uint64)
        powers[0] = 1
        np.multiply.accumulate(powers, out=powers)
        place = np.arange(len(data), dtype=np.int64) - np.repeat(starts, lengths)
        filled = np.flatnonzero(lengths)  # reduceat would give an empty value its neighbour's first byte
        hashes[filled] = np.add.reduceat(data * powers[place], starts[filled])
    return mix64(hashes ^ mix64(lengths.astype(np.uint64)))


# ---- the router

Tasks: TypeAlias = npt.NDArray[np.int32]
"""Task numbers."""

LEVELLED_PAIRS_MAX: Final = 512
"""How many pairs of candidate tasks partial_key levels one by one in a record batch: all of them, up to 32 tasks."""

_FIRST: Final = np.uint64(0x2545F4914F6CDD1D)
_SECOND: Final = np.uint64(0xD1342543DE82EF95)


class Router:
    """Finds the tasks of the tuples that one emitting task sends to one subscriber, and remembers how many it sent to each.

    `tasks` is the number of the subscriber's tasks, `task` the emitting task's number, `component` the subscriber, for
    errors. The same rows in the same order give the same tasks.
    """

    __slots__ = ("_component", "_grouping", "_next", "_sent", "_task", "_tasks")

    def __init__(self, grouping: Grouping, tasks: int, task: int, *, component: str = "?") -> None:
        if tasks < 1 or task < 0:
            raise ValueError(f"task {task} cannot send to {tasks} tasks")
        self._grouping, self._tasks, self._task, self._component = grouping, tasks, task, component
        # Each emitting task begins at another task, so that surplus tuples do not all go to task 0.
        self._next = task % tasks
        self._sent = [0] * (tasks if grouping.kind is GroupingKind.PARTIAL_KEY else 0)

    @property
    def copies(self) -> bool:
        """Whether each row goes to every task; then `route` returns `tasks` numbers a row."""
        return self._grouping.kind is GroupingKind.ALL

    def route(self, rows: pa.RecordBatch, direct: Rows | None = None) -> Tasks:
        """The task of each delivery: one a row, in the rows' order.

        For the all grouping there are as many a row as there are tasks: those of the first row, then of the second.
        `direct` has the emitter's task of each row, for a direct grouping; others ignore it.

        Raises:
            RoutingError: a custom function raised, or returned no task number for a row; or the emitter of a direct
                grouping named none. Its `rows` are the culprits, its `texts` say why; the other rows can be routed without
                them. The router is as it was before.
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
            case GroupingKind.NONE | GroupingKind.LOCAL_OR_SHUFFLE:  # sent, if at all, to the task of the same number
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
        """Two candidates a key; rows with the same two are divided to level the loads of both.

        Rows are counted by their pair of candidates, not by key: there are at most tasks * (tasks - 1) / 2 pairs, for any
        number of keys or rows.
        """
        number = int(rows.num_rows)
        if self._tasks == 1 or number == 0:
            return np.zeros(number, np.int32)
        low, high = candidates(rows, self._grouping.fields, self._tasks)
        # numpy sorts 16-bit integers by radix.
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

        The pairs with the most rows come last: they can level what the others left uneven. Beyond `LEVELLED_PAIRS_MAX`
        pairs, the lighter ones are divided a block at a time, by the loads before the block; each pair levels its part of
        the difference between its two tasks.
        """
        lightest_first = np.argsort(counts, kind="stable")
        light = max(len(counts) - LEVELLED_PAIRS_MAX, 0)
        to_low = np.empty(len(counts), np.int64)
        sent = np.array(self._sent, np.int64)
        for start in range(0, light, LEVELLED_PAIRS_MAX):
            block = lightest_first[start : min(start + LEVELLED_PAIRS_MAX, light)]
            one, other, count = low[block], high[block], counts[block]
            part = max(2 * len(block) // self._tasks, 1)  # the pairs of the block that a task has on average
            odd = np.arange(len(block)) % 2  # where the number of rows is odd, the last row goes to either side in turn
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
        """Call the function with all rows; where its answer is wrong, with halves, until the culprits are alone."""
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
        """The function's answer for these rows, checked."""
        function, number = self._grouping.function, int(rows.num_rows)
        if function is None:
            raise self._error("it has no function")
        name = f"function {name_of(function)}"
        try:
            answer: Any = function(rows, self._tasks)
            if isinstance(answer, (pa.Array, pa.ChunkedArray)) and answer.null_count:
                nulls = answer.is_null().to_numpy(zero_copy_only=False) if len(answer) == number else ()
                raise self._error(f"{name} gave NULL", np.flatnonzero(nulls))
            numbers: npt.NDArray[Any] = np.asarray(answer)
        except RoutingError:
            raise
        except CAUGHT as error:
            raise self._error(f"{name} raised {blame(error)[1]}") from error
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

    They are two hashes of the key, independent of the hash of fields groupings: behind such a grouping, all keys of an
    emitting task have the same task number there.
    """
    keys = hash_keys(rows, fields)
    one = (mix64(keys ^ _FIRST) % np.uint64(tasks)).astype(np.int64)
    step = (mix64(keys ^ _SECOND) % np.uint64(tasks - 1)).astype(np.int64)
    other = (one + 1 + step) % tasks  # never the same one
    return np.minimum(one, other), np.maximum(one, other)
