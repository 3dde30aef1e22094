"""Refuses bolts and functions that would lose tuples silently, before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from stormproof.core.bolt.api import ArrowBolt, BasicBolt, Bolt
from stormproof.core.errors import TopologyError
from stormproof.core.user_functions import never_begins, refuse_unfit_call

_CALLS: Final[Mapping[type, Mapping[str, tuple[str, ...]]]] = {
    Bolt: {"prepare": ("context", "collector"), "execute": ("tuple",), "finish": (), "cleanup": ()},
    BasicBolt: {"prepare": ("context",), "execute": ("tuple", "emit"), "cleanup": ()},
    ArrowBolt: {"prepare": ("context",), "execute": ("rows",), "cleanup": ()},
}
"""The methods of each kind of bolt that are called, with their arguments."""
_BOLTS: Final = tuple(_CALLS)


def refuse_unfit_bolt(name: str, bolt: object) -> None:
    """Refuse a bolt that is a class, or with a method that is a generator, is `async`, or takes other arguments.

    Calling a generator or an `async` method runs nothing of it: every tuple would be acked unread.

    Raises:
        TopologyError: the bolt is one of these.
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


def refuse_unfit_function(name: str, function: object, *, taken: Collection[str], instead: str) -> str | None:
    """Refuse a function of a kind that is not `taken`, where calling it runs nothing of it. Its kind: see `never_begins`.

    Raises:
        TopologyError: the function is of such a kind.
    """
    kind = never_begins(function)
    if kind is not None and kind not in taken:
        raise TopologyError(
            f"component {name!r}: its function is {kind}, and calling it runs nothing of it; {instead}", component=name
        )
    return kind
