"""Runs users' functions over record batches: in tight loops as long as none raises.

A function that raises (sys.exit included, Ctrl-C not), or returns a value that its schema cannot hold, fails the row that it
was called with; the other rows go on. Values are checked before anything is combined or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CoroutineType, NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, storable_text
from stormproof.core.graph.components import OperationKind
from stormproof.core.graph.plan import OperationNode
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.concurrent_calls import Call, Waiting
from stormproof.core.user_code import functions
from stormproof.core.user_code.functions import CAUGHT

_ONE_VALUE: Final = frozenset({str, bytes, dict, NoneType})


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The result of an operation on a record batch.

    `counts[i]` is the number of tuples made of input row i; `rows` has them in order of the input; None: one of each.
    `failed` has the input rows that failed, with the error; their tuples hold nothing that may be used. `reasons` has the
    reason of those that failed by another one than `error`.
    """

    rows: pa.RecordBatch
    counts: Rows | None
    failed: Mapping[int, str]
    reasons: Mapping[int, FailureReason] = field(default_factory=dict[int, FailureReason])


def _unknown(row: int) -> str:
    raise UsageError(f"context.message_id: nobody knows the message of row {row}")


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls of a function need to know: the id of each row's message, and, where several calls are made at a time, how
    long each may take, and what raises where the job is cancelled.
    """

    message_id: Callable[[int], str] = _unknown
    timeout_s: float = math.inf
    go_on: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Failures:
    """The rows that failed, with the first failure of each."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    reasons: dict[int, FailureReason] = field(default_factory=dict[int, FailureReason])

    def raised(self, row: int, error: BaseException) -> None:
        """Note that the function raised for a row; Ctrl-C is raised again."""
        reason, self.texts[row] = functions.blame(error)
        if reason is not FailureReason.ERROR:
            self.reasons[row] = reason

    def applied(self, rows: pa.RecordBatch, counts: Rows | None) -> OperationResult:
        return OperationResult(rows, counts, self.texts, self.reasons)


def apply(
    node: OperationNode, rows: pa.RecordBatch, heartbeat: Heartbeat | None = None, calls: Calls | None = None
) -> OperationResult:
    """Run an operation's function over all rows.

    Each call is a sign of life in `heartbeat`. A careful heartbeat also notes the message in hand, where it knows the
    rows' messages (`Heartbeat.at`); for an Arrow-wise function it notes none.
    """
    given = _OperationInput(node, rows, heartbeat, calls or Calls())
    with functions.calls_end_here():
        match node.kind:
            case OperationKind.MAP:
                return _map(given)
            case OperationKind.FLAT_MAP:
                return _flat_map(given)
            case OperationKind.FILTER:
                return _filter(given)
            case OperationKind.EACH | OperationKind.FLAT_EACH:
                return _each(given)
            case OperationKind.PROJECT:
                columns = [rows.column(name) for name in node.fields]
                return OperationResult(pa.RecordBatch.from_arrays(columns, schema=node.schema), None, {})
            case OperationKind.PEEK:
                return _called(given)[1].applied(rows, None)
            case OperationKind.ARROW:
                return _arrow(node, rows, heartbeat)


def input_text(node: OperationNode, rows: pa.RecordBatch, row: int) -> str:
    """The fields that the function was called with for one row, as text."""
    shown = {name: rows.column(name)[row].as_py() for name in node.fields}
    return storable_text(repr(shown), INPUT_TEXT_MAX)


@dataclass(frozen=True, slots=True)
class _OperationInput:
    """What an operation works on."""

    node: OperationNode
    rows: pa.RecordBatch
    heartbeat: Heartbeat | None
    calls: Calls

    def each(self, done: list[Any]) -> tuple[Callable[[Any], Any], Iterator[Any]]:
        """What to call, and the argument for each row in turn; `done` grows by one for each row that is done with.

        The argument is a tuple where there are several fields, and a call that has ended where several are made at a time.
        """
        node, heartbeat, function = self.node, self.heartbeat, self.node.function
        columns: list[list[object]] = [self.rows.column(name).to_pylist() for name in node.fields]
        call = function if len(columns) == 1 else lambda arguments: function(*arguments)
        if node.concurrency is not None:
            return Call.result, iter(self._waited_for(node.concurrency, call, columns))
        functions.answer_with(lambda: self.calls.message_id(len(done)))
        first = iter(columns[0]) if heartbeat is None else heartbeat.each(columns[0])
        return call, first if len(columns) == 1 else zip(first, *columns[1:], strict=True)

    def _waited_for(self, at_a_time: int, call: Callable[[Any], Any], columns: list[list[object]]) -> list[Call]:
        node, heartbeat, calls = self.node, self.heartbeat, self.calls
        arguments: Iterable[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        if heartbeat is not None and heartbeat.careful:  # it notes one message at a time
            at_a_time, arguments = 1, heartbeat.each(list(arguments))
        if not node.is_async:
            call = _collected(call) if node.kind in (OperationKind.FLAT_MAP, OperationKind.FLAT_EACH) else _taken(call)
        waiting = Waiting(node.component, call, node.is_async, at_a_time, calls.timeout_s, heartbeat, calls.go_on)
        return waiting.calls(arguments, calls.message_id)


def _taken(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As the function, but what it returns is taken by whoever calls it: its next call may fill the same list again."""
    return lambda argument: functions.all_copied(call(argument))


def _collected(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As the function, but what it yields is gathered by whoever calls it."""

    def collect(argument: Any) -> Any:
        result = call(argument)
        return result if result.__class__ in _ONE_VALUE else [functions.all_copied(value) for value in result]

    return collect


def _called(given: _OperationInput) -> tuple[list[object], _Failures]:
    """What the function returns for each row; None where it raised."""
    made: list[object] = []
    call, arguments = given.each(made)
    append, failed, copies = made.append, _Failures(), functions.copies_of(given.node.schema)
    while True:
        try:
            for argument in arguments:
                result = call(argument)
                append(result if result.__class__ not in copies else functions.copied(result, copies))
            break
        except CAUGHT as error:
            failed.raised(len(made), error)
            append(None)
    return made, failed


def _map(given: _OperationInput) -> OperationResult:
    made, failed = _called(given)
    batch, errors = functions.batch_of(made, given.node.schema, failed.texts.keys())
    for row, text in errors:
        failed.texts.setdefault(row, text)
    return failed.applied(batch, None)


def _flat_map(given: _OperationInput) -> OperationResult:
    made: list[object] = []
    ends: list[int] = []
    call, arguments = given.each(ends)
    extend, mark, failed, copies = made.extend, ends.append, _Failures(), functions.copies_of(given.node.schema)
    while True:
        try:
            for argument in arguments:
                result = call(argument)
                if result.__class__ in _ONE_VALUE:  # it may be iterable, but its letters or keys are not meant
                    raise TypeError(f"a flat_map's function gives an iterable of values, got {_shown_value(result)}")
                extend([functions.copied(value, copies) for value in result] if copies else result)
                mark(len(made))
            break
        except CAUGHT as error:
            failed.raised(len(ends), error)
            del made[ends[-1] if ends else 0 :]  # the values of an iterable that then raised
            mark(len(made))
    marks = np.array([0, *ends], np.int64)
    counts = marks[1:] - marks[:-1]
    batch, errors = functions.batch_of(made, given.node.schema, ())
    if errors:
        parent = np.repeat(np.arange(len(counts)), counts)
        for row, text in errors:
            failed.texts.setdefault(int(parent[row]), text)
    return failed.applied(batch, counts)


def _each(given: _OperationInput) -> OperationResult:
    """Add the function's results to the tuple's own fields."""
    node, rows = given.node, given.rows
    added = replace(given, node=replace(node, schema=pa.schema(list(node.schema)[rows.num_columns :])))
    made = (_map if node.kind is OperationKind.EACH else _flat_map)(added)
    if made.counts is not None:
        rows = rows.take(pa.array(np.repeat(np.arange(rows.num_rows), made.counts)))
    return replace(made, rows=pa.RecordBatch.from_arrays([*rows.columns, *made.rows.columns], schema=node.schema))


def _shown_value(value: object) -> str:
    if value is None:
        return "None; give [] for nothing"
    return f"the {'text' if isinstance(value, str) else type(value).__name__} {value!r:.80}; give [it] for one value"


def _filter(given: _OperationInput) -> OperationResult:
    rows, kept = given.rows, list[bool]()
    call, arguments = given.each(kept)
    append, failed = kept.append, _Failures()
    while True:
        try:
            for argument in arguments:
                result = call(argument)
                if result.__class__ is CoroutineType:  # which is true, whatever it would come to
                    raise TypeError("a filter's function gave a coroutine: make the function itself async")
                append(bool(result))
            break
        except CAUGHT as error:
            failed.raised(len(kept), error)
            append(False)
    mask = np.array(kept, np.bool_)
    return failed.applied(rows if mask.all() else rows.filter(pa.array(mask)), mask.astype(np.int64))


def _arrow(node: OperationNode, rows: pa.RecordBatch, heartbeat: Heartbeat | None) -> OperationResult:
    """Call the function with all rows; where it fails, with halves, until the culprits are alone."""
    given = rows.select(list(node.fields))
    failed = _Failures()
    parts: list[tuple[pa.RecordBatch, Rows]] = []
    todo = [(0, given.num_rows)] if given.num_rows else []
    while todo:
        start, stop = todo.pop()
        if heartbeat is not None:
            heartbeat.beat()
        try:
            batch, parent = functions.arrow_result(
                node.function(given.slice(start, stop - start)), stop - start, node.schema
            )
            parts.append((batch, parent + start))
        except CAUGHT as error:
            if stop - start == 1:
                failed.raised(start, error)
                continue
            middle = (start + stop) // 2
            todo += [(middle, stop), (start, middle)]  # the first half comes off first: rows stay in order
    if not parts:
        return failed.applied(functions.no_rows(node.schema), np.zeros(given.num_rows, np.int64))
    batch = parts[0][0] if len(parts) == 1 else pa.concat_batches([part for part, _ in parts])
    parent = np.concatenate([rows_ for _, rows_ in parts])
    if len(parent) > 1 and (np.diff(parent) < 0).any():
        order = np.argsort(parent, kind="stable")
        batch, parent = batch.take(pa.array(order)), parent[order]
    for column, wanted in zip(batch.columns, node.schema, strict=True):
        for row, text in functions.nulls_refused(column, wanted):
            failed.texts.setdefault(int(parent[row]), text)
    return failed.applied(batch, np.bincount(parent, minlength=given.num_rows))
