"""Checks of the arguments of declarations; an error names the thing, the argument, its value and what it must be.

And the default of each argument `by`.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from numbers import Integral, Real

from stormproof.core.base.errors import Json, TopologyError, UsageError


@contextmanager
def error_prefix(where: str, **details: Json) -> Generator[None]:
    """Begin a TopologyError that is raised inside, such as a schema's, with the thing that the argument was given to."""
    try:
        yield
    except TopologyError as error:
        raise TopologyError(f"{where}: {error.message}", **{**error.details, **details}) from error


def operator(given: str = "") -> str:
    """Who decides: the given name, else the user at the keyboard."""
    try:
        return given or getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def require_whole(where: str, argument: str, value: object, low: int) -> None:
    """Raise UsageError unless the value is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise _wrong(where, argument, value, f"a whole number, at least {low}")


def require_seconds(where: str, argument: str, value: object) -> None:
    """Raise UsageError unless the value is a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise _wrong(where, argument, value, "a number of seconds, at least 0")


def require_flag(where: str, argument: str, value: object) -> None:
    """Raise UsageError unless the value is True or False."""
    if not isinstance(value, bool):
        raise _wrong(where, argument, value, "True or False")


def require_choice(where: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError unless the value is one of these texts."""
    if not isinstance(value, str) or value not in choices:
        raise _wrong(where, argument, value, " or ".join(repr(choice) for choice in choices))


def require_path(where: str, argument: str, value: object) -> None:
    """Raise UsageError unless the value is a path; an empty one would be the process's current folder."""
    if not isinstance(value, (str, os.PathLike)) or not value:
        raise _wrong(where, argument, value, "a path, as text or a Path; '.' is the current folder")


def require_text(where: str, argument: str, value: object, form: str) -> None:
    """Raise UsageError unless the value is text; `form` is an example."""
    if not isinstance(value, str) or not value:
        raise _wrong(where, argument, value, f"text, such as {form!r}")


def require_text_if_given(where: str, argument: str, value: object, form: str) -> None:
    """`require_text`, but None is taken, too."""
    if value is not None:
        require_text(where, argument, value, form)


def require_function(where: str, argument: str, value: object, form: str) -> None:
    """Raise UsageError unless the value can be called; `form` is an example of a call."""
    if not callable(value):
        raise _wrong(where, argument, value, f"a function, called as {form}")


def require_object(where: str, argument: str, value: object, kind: type | tuple[type, ...], form: str) -> None:
    """Raise UsageError unless the value is an object of the class; `form` is an example."""
    if not isinstance(value, kind):
        raise _wrong(where, argument, value, f"an object such as {form}")


def require_payloads(where: str, payloads: object) -> None:
    """Raise UsageError for a single payload, whose bytes or letters would be taken for payloads."""
    if isinstance(payloads, (str, bytes, bytearray, memoryview)) or not isinstance(payloads, Iterable):
        raise UsageError(
            f"{where}: payloads is {shown(payloads)}; it must be a list with one for each message, like [b'a line']",
            argument="payloads",
        )


def payload_of(where: str, number: int, payload: object) -> bytes | str:
    """The payload; of a buffer, which may be filled again, a copy.

    Raises:
        UsageError: it is none.
    """
    if isinstance(payload, (bytes, str)):
        return payload
    if isinstance(payload, (bytearray, memoryview)):
        return bytes(payload)
    raise UsageError(f"{where}: payload {number} is {shown(payload)}; it must be bytes, like b'a line'")


def lacks(thing: object, *attributes: str) -> bool:
    """Whether a thing cannot be what a protocol describes: it is a class, or lacks one of these attributes."""
    # The class is asked first: asking the object may run the user's code, which may raise.
    return isinstance(thing, type) or not all(hasattr(type(thing), a) or hasattr(thing, a) for a in attributes)


def shown(thing: object) -> str:
    """A wrong argument, as errors show it."""
    name = getattr(thing, "__name__", None)
    if isinstance(name, str):
        return f"the {'class' if isinstance(thing, type) else 'function'} {name}"
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(map(shown, thing[:3]))}{', ...' if len(thing) > 3 else ''}]"
    if type(thing).__repr__ is object.__repr__:
        return f"{type(thing).__name__}(...)"
    return f"{thing!r:.80}"


def instead_of(thing: object, otherwise: str) -> str:
    """The advice about a wrong argument: to make an object of it where it is a class, else `otherwise`."""
    return f"give an object of it, {thing.__name__}(...)" if isinstance(thing, type) else otherwise


def _wrong(where: str, argument: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{where}: {argument} is {shown(value)}; it must be {wanted}", argument=argument)
