"""What every command prints and how it ends: JSON or tables on standard output, errors in one line on standard error."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any, Final, NoReturn, TextIO

from stormproof.core.errors import CannotTell, Fenced, Json, StormproofError, UsageError
from stormproof.core.message import storable_text
from stormproof.trident.cli.layout import cell_text, counted, print_table, terminal_width, wrapped

__all__ = [
    "TRACEBACK_VARIABLE",
    "Exit",
    "counted",
    "emit",
    "exit_status",
    "finish",
    "guarded",
    "note",
    "printed",
    "say",
    "table",
    "to_json",
    "written",
]

TRACEBACK_VARIABLE: Final = "PYTHONFAULTHANDLER"
"""Python's own switch for more than one line; set, an unexpected error shows where it was raised."""


_NEXT_STEPS: Final = {
    errno.EACCES: "make it accessible for this user, or set STORMPROOF_HOME (and staging_dir) to a folder that is",
    errno.EPERM: "make it accessible for this user, or set STORMPROOF_HOME (and staging_dir) to a folder that is",
    errno.EROFS: "the file system is read-only: set STORMPROOF_HOME (and staging_dir) to a folder that can be written",
    errno.ENOSPC: "free some space, and start again",
    errno.EDQUOT: "free some of this user's quota, and start again",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or name another folder",
    errno.EISDIR: "a folder stands where a file is needed: name a file",
    errno.EMFILE: "raise the limit of open files, as in: ulimit -n 4096",
    errno.ENFILE: "too many files are open on this machine: see which with lsof",
}


class Exit(IntEnum):
    """The exit statuses; scripts rely on them."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FENCED = 3
    CANNOT_TELL = 4
    INTERRUPTED = 130


def exit_status(error: StormproofError) -> Exit:
    """The exit status that an error ends a command with."""
    match error:
        case UsageError():
            return Exit.USAGE
        case Fenced():
            return Exit.FENCED
        case CannotTell():
            return Exit.CANNOT_TELL
        case _:
            return Exit.FAILED


def to_json(value: object) -> Json:
    """A report as JSON values: a dataclass's fields by their names, times as ISO 8601."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    match value:
        case Enum():
            return to_json(value.value)
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            return value.isoformat()
        case Mapping():
            return {str(to_json(key)): to_json(item) for key, item in value.items()}
        case Iterable() if not isinstance(value, bytes):
            return [to_json(item) for item in value]
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON form")


def emit(report: object, *, as_json: bool, text: Callable[[], None]) -> None:
    """Print a report: as JSON, or as `text` prints it."""
    if as_json:
        printed(json.dumps(to_json(report), indent=2))
    else:
        text()


def say(text: str) -> None:
    """Lines on standard output; on a terminal broken between words."""
    for line in _fitted(text, sys.stdout):
        sys.stdout.write(f"{line}\n")


def written(text: str, indent: str = "") -> None:
    """A text that is not ours, such as a payload: control characters escaped, each line indented and broken to fit."""
    for line in storable_text(text, len(text)).expandtabs(4).split("\n"):
        say(f"{indent}{line}")


def printed(text: str) -> None:
    """Text for another program, exactly as it is."""
    sys.stdout.write(f"{text}\n")


def note(text: str, end: str = "\n") -> None:
    """Lines on standard error; on a terminal broken between words."""
    sys.stderr.write("\n".join(_fitted(text, sys.stderr)) + end)
    sys.stderr.flush()


def _fitted(text: str, stream: TextIO) -> Iterator[str]:
    if not stream.isatty():
        yield text
        return
    width = terminal_width()
    for line in text.split("\n"):
        yield from wrapped(line, width)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output, as wide as the terminal; plain tab-separated lines where that is none."""
    if sys.stdout.isatty():
        print_table(columns, rows, terminal_width(), sys.stdout)
        return
    printed("\t".join(columns))
    for row in rows:
        printed("\t".join(map(cell_text, row)))


def finish(status: int) -> NoReturn:
    """End the command with this status."""
    raise SystemExit(int(status))


@contextmanager
def guarded(*, as_json: bool, passing: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Turn errors into one line and an exit status; `passing` are those that another one shows.

    What was printed is flushed in here, so that a reader that has gone, or a full disk, is met here and not at exit.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except passing:
        raise
    except StormproofError as error:
        note(f"stormproof: {error.message}")
        if os.environ.get(TRACEBACK_VARIABLE):
            note("".join(traceback.format_exception(error)))
        _error_json(as_json, error.kind.value, error.message, dict(error.details))
        finish(exit_status(error))
    except KeyboardInterrupt:
        note("stormproof: interrupted")
        _error_json(as_json, "interrupted", "interrupted", {})
        finish(Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is, it is shown and ends the command
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            _discard_output()  # as `head` does; nothing may be written at exit either
            finish(Exit.FAILED)
        text, kind = f"{type(error).__name__}: {error}", "unexpected"
        if isinstance(error, OSError) and error.errno in _NEXT_STEPS:
            text, kind = _environment(error), "environment"
            note(f"stormproof: {text}")
            if error.errno == errno.ENOSPC and error.filename is None:
                _discard_output()  # it may be the output that cannot be written
        else:
            note(f"stormproof: unexpected error: {text}")
        if os.environ.get(TRACEBACK_VARIABLE):
            note("".join(traceback.format_exception(error)))
        elif kind == "unexpected":
            frame = traceback.extract_tb(error.__traceback__)[-1]
            note(
                f"  at {frame.filename}:{frame.lineno} in {frame.name}; {TRACEBACK_VARIABLE}=1 shows the whole way there"
            )
        _error_json(as_json, kind, text, {})
        finish(Exit.FAILED)


def _environment(error: OSError) -> str:
    """What the file system refuses, where, and what to do about it."""
    where = error.filename or "standard output, or a file that the system does not name"
    where = where.decode(errors="replace") if isinstance(where, bytes) else where
    return f"{error.strerror}: {where}; {_NEXT_STEPS[error.errno or 0]}"


def _reader_has_gone() -> bool:
    """Whether it is our own output that nobody reads any more; else the error is another connection's."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """What is still to be written to standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _error_json(as_json: bool, kind: str, message: str, details: dict[str, Any]) -> None:
    if as_json:
        printed(json.dumps({"error": {"kind": kind, "message": message, "details": details}}, indent=2))
