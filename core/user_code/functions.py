"""A user's function before it is called: whether it takes the arguments that it will get, its name, where it is defined.

A function that takes other arguments than it gets would raise for every message, and each message would become a dead
letter. A function without a readable signature (some builtins and extension types) is not checked. For a decorated
function the decorator's own parameters count: it may pass more arguments on than it gets.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any, Final

from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import storable_text

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
