"""Several calls of a user's function at a time.

They are for functions that wait for something. A blocking function is called in threads, an `async`
one in an event loop. Both outlast the record batch, so that a client may keep its connections, by thread or by loop. Only
the task's own thread hands out calls, takes their results and gives signs of life.

A call that is not over in time fails its own message, and the others go on. A coroutine is then cancelled. A thread cannot
be ended: it is left behind, and another one takes its place. Time in which this process, or the loop, did not run counts
against no call. The driver then hears no sign of life, and ends the job, as it does for any other function.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

from stormproof.core.base.errors import MachineUnavailable
from stormproof.core.base.message import FailureReason
from stormproof.core.base.process import end_if_fork, kept_from_forks
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.user_code.functions import CAUGHT, Blamed, all_copied, answer_with, blame

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
            is_many = hasattr(given, "__aiter__")
            value = [all_copied(one) async for one in given] if is_many else all_copied(await given)
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
