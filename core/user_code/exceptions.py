"""What a user's code raised, as a message's failure: the reason, the text and the place.

Used wherever users' functions and bolts are called. Whatever a function raises fails its message (`sys.exit`, asyncio's
CancelledError and GeneratorExit, too); only Ctrl-C is nobody's failure.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from pathlib import Path
from typing import Final

from stormproof.core.base.forks import end_if_fork
from stormproof.core.base.message import FailureReason, storable_text
from stormproof.core.heartbeat.wire import ContactLost

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
