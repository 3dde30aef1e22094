"""What can be seen to be wrong with a bolt or a function before anything runs, and would lose tuples silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stormproof.core.bolt.api import ArrowBolt, BasicBolt, Bolt
from stormproof.core.errors import TopologyError
from stormproof.core.user_functions import GENERATOR, never_begins, refuse_unfit_call

_CALLS: Final[Mapping[type, Mapping[str, tuple[str, ...]]]] = {
    Bolt: {"prepare": ("context", "collector"), "execute": ("tuple",), "finish": (), "cleanup": ()},
    BasicBolt: {"prepare": ("context",), "execute": ("tuple", "emit"), "cleanup": ()},
    ArrowBolt: {"prepare": ("context",), "execute": ("rows",), "cleanup": ()},
}
"""What is called of each kind of bolt, and what it gets."""
_BOLTS: Final = tuple(_CALLS)


def refuse_unfit_bolt(name: str, bolt: object) -> None:
    """Raise TopologyError where a bolt is a class, or one of its methods would not even begin when it is called, or takes
    other arguments than it gets.

    Calling a method that has a `yield` or is `async` makes an object and runs nothing: every tuple would be acked unread.
    """
    if isinstance(bolt, type) and issubclass(bolt, _BOLTS):
        raise TopologyError(
            f"bolt {name!r}: {bolt.__name__} is a class; give an object of it: {bolt.__name__}()", component=name
        )
    calls = next((calls for kind, calls in _CALLS.items() if isinstance(bolt, kind)), {})
    for called, given in calls.items():
        method = getattr(bolt, called)
        kind = never_begins(method)
        if kind is not None:
            instead = "call emit for each tuple" if isinstance(bolt, BasicBolt) else "call what it needs, and return"
            raise TopologyError(
                f"bolt {name!r}: {type(bolt).__name__}.{called} is {kind}, and calling it runs nothing of it; {instead}",
                component=name,
            )
        refuse_unfit_call(name, f"bolt {name!r}", method, given, "change its parameters")


def refuse_unfit_function(name: str, function: object, *, yields: bool) -> None:
    """Raise TopologyError where calling a function would run nothing of it. `yields`: it may be a generator function."""
    kind = never_begins(function)
    if kind is None or (yields and kind == GENERATOR):
        return
    raise TopologyError(
        f"component {name!r}: its function is {kind}, and calling it runs nothing of it; return the result"
        f"{'s, or yield them without async' if yields else ', or use flat_map for one that yields'}",
        component=name,
    )
