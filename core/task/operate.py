"""Runs users' functions over record batches: in tight loops as long as none raises, or several calls at a time.

A function that raises (sys.exit included, Ctrl-C not), or returns a value that its schema cannot hold, fails the row that it
was called with; the other rows go on. Values are checked before anything is combined or written.

Several calls at a time are for functions that wait for something. A blocking function is called in threads, an `async`
one in an event loop. Both outlast the record batch, so that a client may keep its connections, by thread or by loop. Only
the task's own thread hands out calls, takes their results and gives signs of life.

A call that is not over in time fails its own message, and the others go on. A coroutine is then cancelled. A thread cannot
be ended: it is left behind, and another one takes its place. Time in which this process, or the loop, did not run counts
against no call. The driver then hears no sign of life, and ends the job, as it does for any other function.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from types import CoroutineType, NoneType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import MachineUnavailable, UsageError
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, storable_text
from stormproof.core.base.process import end_if_fork, kept_from_forks
from stormproof.core.graph.components import OperationKind
from stormproof.core.graph.plan import OperationNode
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.user_code.functions import (
    CAUGHT,
    Blamed,
    answer_with,
    arrow_result,
    batch_of,
    blame,
    calls_end_here,
    no_rows,
    nulls_refused,
)

TICK_S: Final = 0.5
"""How often the task's thread looks for calls that are overdue, at least."""

STACK_BYTES: Final = 2 << 20
"""Of each thread. The usual 8 MiB count in full against the memory that a worker may take."""

LEFT_MAX: Final = 100
"""So many calls that were given up may still run in threads of this process."""


@dataclass(slots=True, eq=False)
class Call:
    """One call; `value` and `error` belong to the task's thread, `is_over` and `task` to whoever runs it."""

    argument: Any
    context: Context
    begun_s: float = 0.0
    value: object = None
    error: BaseException | None = None
    is_over: bool = False
    task: asyncio.Task[None] | None = None

    def result(self) -> Any:
        """What the function returned; raises what it raised, or that the call was given up."""
        if self.error is not None:
            raise self.error
        return self.value


_Ended: TypeAlias = tuple[Call, object, BaseException | None]
_Done: TypeAlias = "SimpleQueue[_Ended]"


class _Caller(Protocol):
    """Makes calls outside of the task's thread. The end of each is put into `done`."""

    def start(self, call: Call, done: _Done) -> None: ...

    def lives(self) -> bool:
        """Whether calls could go on since this was asked last."""
        ...

    def give_up(self, call: Call) -> None: ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """How the calls of one operation are made: `at_a_time` of them, with `timeout_s` for each.

    `go_on` is called twice a second at least, and raises where the job is cancelled.
    """

    component: str
    function: Callable[[Any], Any]
    is_async: bool
    at_a_time: int
    timeout_s: float
    heartbeat: Heartbeat | None
    go_on: Callable[[], None]

    def calls(self, arguments: Iterable[Any], message_id: Callable[[int], str]) -> list[Call]:
        """All calls, ended, in the order of their arguments. `message_id` answers for an argument by its number.

        Calls that met a MemoryError beside others are made again, one at a time: it may have been another's doing.

        Raises:
            MachineUnavailable: a thread cannot be started, or too many are left behind.
        """
        caller = _Loop(self.function) if self.is_async else _Threads(self.function, self.component)
        made: list[Call] = []

        def each() -> Iterator[Call]:
            for number, argument in enumerate(arguments):
                call = Call(argument, copy_context())
                call.context.run(answer_with, partial(message_id, number))
                made.append(call)
                yield call

        self._make(each(), caller, self.at_a_time)
        if self.at_a_time > 1:
            self._make([call for call in made if _lacked_memory(call.error)], caller, 1)
        return made

    def _make(self, calls: Iterable[Call], caller: _Caller, at_a_time: int) -> None:
        todo, waiting = iter(calls), dict[Call, None]()  # in the order in which they began
        done: _Done = SimpleQueue()
        tick_s = min(TICK_S, self.timeout_s / 4)
        lived_s = looked_s = sign_s = 0.0
        seen_s = time.monotonic()
        try:
            while True:
                for call in islice(todo, at_a_time - len(waiting)):
                    call.begun_s, call.is_over, waiting[call] = lived_s, False, None
                    caller.start(call, done)
                if not waiting:
                    return
                ended = _next(done, tick_s)
                now_s = time.monotonic()
                if ended is not None or caller.lives():
                    lived_s += min(now_s - seen_s, 2 * tick_s)
                seen_s = now_s
                if ended is not None and ended[0] in waiting:
                    call, call.value, call.error = ended
                    del waiting[call]
                    sign_s = self._sign(lived_s, 1)
                if lived_s - sign_s >= self.timeout_s / 2:
                    sign_s = self._sign(lived_s, 0)
                if lived_s - looked_s >= tick_s:
                    looked_s = lived_s
                    self._look(waiting, caller, lived_s)
        finally:
            for call in waiting:
                caller.give_up(call)

    def _sign(self, lived_s: float, ended: int) -> float:
        """Give a sign of life; returns when."""
        if self.heartbeat is not None and ended and not self.heartbeat.careful:
            self.heartbeat.beat()
        elif self.heartbeat is not None:  # a careful heartbeat counts the rows that it hands out
            self.heartbeat.reset()
        return lived_s

    def _look(self, waiting: dict[Call, None], caller: _Caller, lived_s: float) -> None:
        """Give up the calls that are overdue."""
        self.go_on()
        for call in list(waiting):
            if lived_s - call.begun_s < self.timeout_s:
                return
            caller.give_up(call)
            del waiting[call]
            still = "" if self.is_async else "; its thread cannot be ended, and may still run"
            call.error = Blamed(
                FailureReason.TIMEOUT, f"the call was not over after {self.timeout_s:g} s, and was given up{still}"
            )


def _next(done: _Done, tick_s: float) -> _Ended | None:
    try:
        return done.get(timeout=tick_s)
    except Empty:
        return None


def _lacked_memory(error: BaseException | None) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, Blamed) and error.text.startswith("MemoryError: "))


def _blamed(error: BaseException) -> BaseException:
    """What a call raised, without what the traceback holds; where nobody is blamed for it, the error itself."""
    try:
        return Blamed(*blame(error))
    except BaseException as unblamed:  # noqa: BLE001 - Ctrl-C, or no memory to tell: the task's thread raises it
        return unblamed


# Threads. Those that wait for a call are shared by all tasks of this process, and end with it.

_Inbox: TypeAlias = "SimpleQueue[tuple[_Threads, Call, _Done]]"
_idle: list[_Inbox] = []
left_behind: set[Call] = set()


class _Threads:
    def __init__(self, function: Callable[[Any], Any], component: str) -> None:
        self._function = function
        self._component = component

    def start(self, call: Call, done: _Done) -> None:
        if len(left_behind) >= LEFT_MAX:
            raise self._unavailable(
                f"{len(left_behind)} calls were not over in time, and their threads cannot be ended",
                "see whether the service answers; let its client give up earlier than message_timeout_s",
            )
        try:
            inbox = _idle.pop()
        except IndexError:
            inbox = self._started()
        inbox.put((self, call, done))

    def lives(self) -> bool:
        return True

    def give_up(self, call: Call) -> None:
        left_behind.add(call)
        if call.is_over:
            left_behind.discard(call)

    def made(self, call: Call) -> tuple[object, BaseException | None]:
        """Make the call, in the present thread."""
        try:
            value = call.context.run(self._function, call.argument)
            end_if_fork()
        except CAUGHT as error:
            return None, _blamed(error)
        return value, None

    def _started(self) -> _Inbox:
        inbox: _Inbox = SimpleQueue()
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=_serve, args=(inbox,), name="stormproof-call", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            advice = "raise the limit of processes (ulimit -u), give its workers more memory, or lower concurrency"
            raise self._unavailable(f"a thread cannot be started: {error}", advice) from error
        finally:
            threading.stack_size(before)
        return inbox

    def _unavailable(self, why: str, advice: str) -> MachineUnavailable:
        return MachineUnavailable(
            f"component {self._component!r} on {socket.gethostname()}: {why}. No message is to blame; its messages are "
            f"opened again. What to do: {advice}",
            component=self._component,
            host=socket.gethostname(),
        )


def _serve(inbox: _Inbox) -> None:
    with kept_from_forks():
        while True:
            caller, call, done = inbox.get()
            value, error = caller.made(call)
            call.is_over = True
            left_behind.discard(call)
            _idle.append(inbox)
            done.put((call, value, error))
            del caller, call, done, value, error  # an idle thread keeps nothing of a batch alive


# The event loop: one a process.


class _Loop:
    _running: asyncio.AbstractEventLoop | None = None
    _lock = threading.Lock()

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._has_answered = True
        with self._lock:
            if _Loop._running is None:
                _Loop._running = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_for_ever, args=(_Loop._running,), name="stormproof-loop", daemon=True
                ).start()
            self._loop = _Loop._running

    def start(self, call: Call, done: _Done) -> None:
        self._loop.call_soon_threadsafe(self._begin, call, done)

    def lives(self) -> bool:
        answered = self._has_answered
        if answered:
            self._has_answered = False
            self._loop.call_soon_threadsafe(self._answer)
        return answered

    def give_up(self, call: Call) -> None:
        self._loop.call_soon_threadsafe(self._cancel, call)

    def _answer(self) -> None:
        self._has_answered = True

    def _begin(self, call: Call, done: _Done) -> None:
        call.task = self._loop.create_task(self._awaited(call, done), context=call.context)

    def _cancel(self, call: Call) -> None:
        if call.task is not None:
            call.task.cancel()

    async def _awaited(self, call: Call, done: _Done) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            given = self._function(call.argument)
            value = [one async for one in given] if hasattr(given, "__aiter__") else await given
            end_if_fork()
        except CAUGHT as raised:  # Ctrl-C and sys.exit, too: raised here, they would end the loop
            error = _blamed(raised)
        done.put((call, value, error))


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    with kept_from_forks():
        loop.run_forever()


def _in_child() -> None:
    _idle.clear()
    left_behind.clear()
    _Loop._running, _Loop._lock = None, threading.Lock()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_in_child)


# ---- an operation over the rows of a record batch

_ONE_VALUE: Final = frozenset({str, bytes, dict, NoneType})


@dataclass(frozen=True, slots=True)
class Applied:
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
        reason, self.texts[row] = blame(error)
        if reason is not FailureReason.ERROR:
            self.reasons[row] = reason

    def applied(self, rows: pa.RecordBatch, counts: Rows | None) -> Applied:
        return Applied(rows, counts, self.texts, self.reasons)


def apply(
    node: OperationNode, rows: pa.RecordBatch, heartbeat: Heartbeat | None = None, calls: Calls | None = None
) -> Applied:
    """Run an operation's function over all rows.

    Each call is a sign of life in `heartbeat`. A careful heartbeat also notes the message in hand, where it knows the
    rows' messages (`Heartbeat.at`); for an Arrow-wise function it notes none.
    """
    given = _Given(node, rows, heartbeat, calls or Calls())
    with calls_end_here():
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
                return Applied(pa.RecordBatch.from_arrays(columns, schema=node.schema), None, {})
            case OperationKind.PEEK:
                return _called(given)[1].applied(rows, None)
            case OperationKind.ARROW:
                return _arrow(node, rows, heartbeat)


def input_text(node: OperationNode, rows: pa.RecordBatch, row: int) -> str:
    """The fields that the function was called with for one row, as text."""
    shown = {name: rows.column(name)[row].as_py() for name in node.fields}
    return storable_text(repr(shown), INPUT_TEXT_MAX)


@dataclass(frozen=True, slots=True)
class _Given:
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
        answer_with(lambda: self.calls.message_id(len(done)))
        first = iter(columns[0]) if heartbeat is None else heartbeat.each(columns[0])
        return call, first if len(columns) == 1 else zip(first, *columns[1:], strict=True)

    def _waited_for(self, at_a_time: int, call: Callable[[Any], Any], columns: list[list[object]]) -> list[Call]:
        node, heartbeat, calls = self.node, self.heartbeat, self.calls
        arguments: Iterable[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        if heartbeat is not None and heartbeat.careful:  # it notes one message at a time
            at_a_time, arguments = 1, heartbeat.each(list(arguments))
        if node.kind in (OperationKind.FLAT_MAP, OperationKind.FLAT_EACH) and not node.is_async:
            call = _collected(call)
        waiting = Waiting(node.component, call, node.is_async, at_a_time, calls.timeout_s, heartbeat, calls.go_on)
        return waiting.calls(arguments, calls.message_id)


def _collected(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As the function, but what it yields is gathered by whoever calls it."""

    def collect(argument: Any) -> Any:
        result = call(argument)
        return result if result.__class__ in _ONE_VALUE else list(result)

    return collect


def _called(given: _Given) -> tuple[list[object], _Failures]:
    """What the function returns for each row; None where it raised."""
    made: list[object] = []
    call, arguments = given.each(made)
    append, failed = made.append, _Failures()
    while True:
        try:
            for argument in arguments:
                append(call(argument))
            break
        except CAUGHT as error:
            failed.raised(len(made), error)
            append(None)
    return made, failed


def _map(given: _Given) -> Applied:
    made, failed = _called(given)
    batch, errors = batch_of(made, given.node.schema, failed.texts.keys())
    for row, text in errors:
        failed.texts.setdefault(row, text)
    return failed.applied(batch, None)


def _flat_map(given: _Given) -> Applied:
    made: list[object] = []
    ends: list[int] = []
    call, arguments = given.each(ends)
    extend, mark, failed = made.extend, ends.append, _Failures()
    while True:
        try:
            for argument in arguments:
                result = call(argument)
                if result.__class__ in _ONE_VALUE:  # it may be iterable, but its letters or keys are not meant
                    raise TypeError(f"a flat_map's function gives an iterable of values, got {_shown_value(result)}")
                extend(result)
                mark(len(made))
            break
        except CAUGHT as error:
            failed.raised(len(ends), error)
            del made[ends[-1] if ends else 0 :]  # the values of an iterable that then raised
            mark(len(made))
    marks = np.array([0, *ends], np.int64)
    counts = marks[1:] - marks[:-1]
    batch, errors = batch_of(made, given.node.schema, ())
    if errors:
        parent = np.repeat(np.arange(len(counts)), counts)
        for row, text in errors:
            failed.texts.setdefault(int(parent[row]), text)
    return failed.applied(batch, counts)


def _each(given: _Given) -> Applied:
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


def _filter(given: _Given) -> Applied:
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


def _arrow(node: OperationNode, rows: pa.RecordBatch, heartbeat: Heartbeat | None) -> Applied:
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
            batch, parent = arrow_result(node.function(given.slice(start, stop - start)), stop - start, node.schema)
            parts.append((batch, parent + start))
        except CAUGHT as error:
            if stop - start == 1:
                failed.raised(start, error)
                continue
            middle = (start + stop) // 2
            todo += [(middle, stop), (start, middle)]  # the first half comes off first: rows stay in order
    if not parts:
        return failed.applied(no_rows(node.schema), np.zeros(given.num_rows, np.int64))
    batch = parts[0][0] if len(parts) == 1 else pa.concat_batches([part for part, _ in parts])
    parent = np.concatenate([rows_ for _, rows_ in parts])
    if len(parent) > 1 and (np.diff(parent) < 0).any():
        order = np.argsort(parent, kind="stable")
        batch, parent = batch.take(pa.array(order)), parent[order]
    for column, wanted in zip(batch.columns, node.schema, strict=True):
        for row, text in nulls_refused(column, wanted):
            failed.texts.setdefault(int(parent[row]), text)
    return failed.applied(batch, np.bincount(parent, minlength=given.num_rows))
