"""A user's function: whether it takes the arguments that it will get, and what becomes of what it raises.

A function that takes other arguments than it gets would raise for every message, and each message would become a dead
letter. A function without a readable signature (some builtins and extension types) is not checked. For a decorated
function the decorator's own parameters count: it may pass more arguments on than it gets.

Whatever a function or a bolt raises fails its message (`sys.exit`, asyncio's
CancelledError and GeneratorExit, too); only Ctrl-C is nobody's failure.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.base.message import FailureReason, storable_text
from stormproof.core.base.process import end_if_fork
from stormproof.core.heartbeat.wire import ContactLost

_NAME_MAX: Final = 200
GENERATOR: Final = "a generator function"
ASYNC: Final = "async"
ASYNC_GENERATOR: Final = "an async generator function"
_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def refuse_unfit_call(component: str, where: str, function: Any, given: Sequence[str], instead: str) -> None:
    """Check that a function can be called with the values named in `given`, by position.

    Raises:
        TopologyError: it cannot; says what it gets, what it takes, where it is defined, and what to do `instead`.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError:
        name, place = name_of(function), place_of_function(function)
        raise TopologyError(
            f"{where}: function {name}{place} gets {_counted(given)}; it takes {_taken(signature)}; {instead}",
            component=component,
            function=name,
        ) from None


def never_begins(function: Any) -> str | None:
    """The kind of a function whose call runs nothing of its body, such as `ASYNC`; None for others."""
    is_object = callable(function) and not isinstance(function, type)
    for one in (function, type(function).__call__ if is_object else None):
        if inspect.isgeneratorfunction(one):
            return GENERATOR
        if inspect.iscoroutinefunction(one):
            return ASYNC
        if inspect.isasyncgenfunction(one):
            return ASYNC_GENERATOR
    return None


def name_of(function: object) -> str:
    """A function's name, for errors."""
    function = _unwrapped(function)
    name = getattr(function, "__qualname__", None)
    shown = name if isinstance(name, str) else type(function).__qualname__
    return storable_text(shown.rpartition("<locals>.")[2], _NAME_MAX)


def place_of_function(function: Any) -> str:
    """The file and line of a function's definition, in parentheses; empty where they are unknown."""
    function = _unwrapped(function)
    if isinstance(function, type):
        function = function.__dict__.get("__init__")
    elif not hasattr(function, "__code__") and not inspect.isbuiltin(function):
        function = getattr(function, "__func__", type(function).__call__)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({storable_text(os.path.basename(code.co_filename))}:{code.co_firstlineno})"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _counted(names: Sequence[str]) -> str:
    number = "no values" if not names else "1 value" if len(names) == 1 else f"{len(names)} values"
    return f"{number}: {', '.join(names)}" if names else number


def _taken(signature: inspect.Signature) -> str:
    """The arguments that a call has to give, for errors."""
    parameters = list(signature.parameters.values())
    by_place = [p for p in parameters if p.kind in _BY_PLACE]
    needed = [p.name for p in by_place if p.default is p.empty]
    names = [p.name for p in by_place]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        text = f"at least {_counted(needed)}" if needed else "any number of values"
    elif len(needed) == len(names):
        text = _counted(names)
    else:
        text = f"{len(needed)} to {_counted(names)}"
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is p.empty]
    return f"{text}, and {', '.join(by_name)} by name, which nothing gives" if by_name else text


# ---- what a user's code raised, as a message's failure: the reason, the text and the place

CAUGHT: Final = BaseException
"""What is caught around a call of a user's code; `blame` lets Ctrl-C through again."""

_SHORTAGE: Final = re.compile(r"OSError: \[Errno (\d+)\]")
_SHORTAGES: Final = frozenset({"ENOSPC", "EDQUOT", "EROFS", "EMFILE", "ENFILE", "ENOMEM"})
_OWN_FOLDER: Final = f"{Path(__file__).parents[1]}{os.sep}"


class FailTuple(Exception):
    """Raised by a function or a bolt to fail the tuple in hand, and with it its message, with the reason `failed`.

    Any other exception fails it, too, with the reason `error`.
    """

    def __init__(self, reason_text: str = "") -> None:
        super().__init__(reason_text)
        self.reason_text = reason_text


class Blamed(Exception):
    """A failure whose reason and text are known: what was raised elsewhere, or what nobody raised."""

    def __init__(self, reason: FailureReason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


def blame(error: BaseException) -> tuple[FailureReason, str]:
    """The reason and the text of the failure that an exception means.

    In a fork that a user's function made, and that comes back with this exception, the process ends here.

    Raises:
        KeyboardInterrupt: that was the exception.
        ContactLost: likewise; the loop's own iterator raised it, and no function.
    """
    end_if_fork(error)
    if isinstance(error, KeyboardInterrupt | ContactLost):
        raise error
    if isinstance(error, Blamed):
        return error.reason, error.text
    if isinstance(error, FailTuple):
        said = storable_text(error.reason_text) if error.reason_text else "raised FailTuple without a reason"
        return FailureReason.FAILED, f"{said}{_place(error)}"
    return FailureReason.ERROR, error_text(error)


def lacked_in(text: str) -> str | None:
    """The name of the errno in a text of `error_text`, where it says that the machine lacks something; else None."""
    found = _SHORTAGE.match(text)
    name = None if found is None else errno.errorcode.get(int(found[1]))
    return name if name in _SHORTAGES else None


def error_text(error: BaseException) -> str:
    """An exception's type, text and place."""
    return f"{type(error).__name__}: {storable_text(error)}{_place(error)}"


def _place(error: BaseException) -> str:
    """The last frame outside this package: the user's line, also where our code raised because of it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OWN_FOLDER):
            return f" ({storable_text(os.path.basename(frame.filename))}:{frame.lineno} in {frame.name})"
    return ""


# ---- `context`: what a user's function may ask about the call that it is in

_message_id: ContextVar[Callable[[], str] | None] = ContextVar("stormproof_message_id", default=None)
"""Answers for the call in hand. A function is called far more often than it asks."""


class CallContext:
    """The call that a function is in: that of `map`, `flat_map`, `each`, `filter` or `peek`. Made once, as `context`."""

    @property
    def message_id(self) -> str:
        """The id of the message that the function's tuple was made of, as dead letters and lineage columns show it.

        It is the same at each attempt at the message, and no other message of the topology has it: an idempotency key,
        where the function makes one request for a message. Where `flat_map` made several tuples of a message before, they
        share its id.

        Raises:
            UsageError: this is no such call, or a thread that the function started itself; or the tuple was made of several
                messages, or of none (behind a group or a join).
        """
        answer = _message_id.get()
        if answer is None:
            raise UsageError(
                "context.message_id is known inside a call of a function of map, flat_map, each, filter or peek, in the "
                "thread that runs the call; ask there, and hand it on"
            )
        return answer()


context = CallContext()
"""The call that the present thread, or the present asyncio task, is in."""


def answer_with(message_id: Callable[[], str]) -> None:
    """Have `context` ask this for calls of the present thread or task, up to the end of `calls_end_here`."""
    _message_id.set(message_id)


@contextmanager
def calls_end_here() -> Generator[None]:
    """Undoes `answer_with` at the block's end."""
    before = _message_id.set(None)
    try:
        yield
    finally:
        _message_id.reset(before)
