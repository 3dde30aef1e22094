"""What can be seen to be wrong with a bolt or a function before anything runs, and would lose tuples silently."""

from __future__ import annotations

import inspect
from typing import Final

from stormproof.core.bolt.api import ArrowBolt, BasicBolt, Bolt
from stormproof.core.errors import TopologyError

_CALLED: Final = ("prepare", "execute", "finish", "cleanup")
_BOLTS: Final = (Bolt, BasicBolt, ArrowBolt)


def refuse_unfit_bolt(name: str, bolt: object) -> None:
    """Raise TopologyError where a bolt is a class, or where one of its methods would not even begin when it is called.

    Calling a method that has a `yield` or is `async` makes an object and runs nothing: every tuple would be acked unread.
    """
    if isinstance(bolt, type) and issubclass(bolt, _BOLTS):
        raise TopologyError(
            f"bolt {name!r}: {bolt.__name__} is a class; give an object of it: {bolt.__name__}()", component=name
        )
    if not isinstance(bolt, _BOLTS):
        return
    for called in _CALLED:
        kind = _never_begins(getattr(bolt, called, None))
        if kind is not None:
            instead = "call emit for each tuple" if isinstance(bolt, BasicBolt) else "call what it needs, and return"
            raise TopologyError(
                f"bolt {name!r}: {type(bolt).__name__}.{called} is {kind}, and calling it runs nothing of it; {instead}",
                component=name,
            )


def refuse_unfit_function(name: str, function: object, *, yields: bool) -> None:
    """Raise TopologyError where calling a function would run nothing of it. `yields`: it may be a generator function."""
    kind = _never_begins(function)
    if kind is None or (yields and inspect.isgeneratorfunction(function)):
        return
    raise TopologyError(
        f"component {name!r}: its function is {kind}, and calling it runs nothing of it; return the result"
        f"{'s, or yield them without async' if yields else ', or use flat_map for one that yields'}",
        component=name,
    )


def _never_begins(function: object) -> str | None:
    if inspect.isgeneratorfunction(function):
        return "a generator function"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return None
