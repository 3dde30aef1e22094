"""How every command prints and ends: JSON or text on standard output, errors in one line on standard error."""

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

from stormproof.core.errors import CannotTell, Fenced, StormproofError, UsageError
from stormproof.core.message import storable_text
from stormproof.trident.cli.layout import cell_text, print_table, terminal_width, wrapped
from stormproof.trident.wording import counted

TRACEBACK_VARIABLE: Final = "PYTHONFAULTHANDLER"
"""Python's own variable; if it is set, errors are shown with their tracebacks."""

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
    """The exit status of a command that ends with this error."""
    match error:
        case UsageError():
            return Exit.USAGE
        case Fenced():
            return Exit.FENCED
        case CannotTell():
            return Exit.CANNOT_TELL
        case _:
            return Exit.FAILED


def json_text(report: object) -> str:
    """A report as JSON: a dataclass by its fields (`is_` as `is`), a time in ISO 8601."""
    return json.dumps(report, indent=2, default=_jsonable)


def json_line(report: object) -> str:
    """The same in one line, for a command that prints several over time."""
    return json.dumps(report, default=_jsonable)


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
    match value:
        case datetime():
            return value.isoformat()
        case Enum():
            return value.value
        case Mapping():
            return dict(value)
        case Iterable() if not isinstance(value, bytes):
            return list(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON form")


def emit(report: object, *, as_json: bool, text: Callable[[], None]) -> None:
    """Print a report: as JSON, or by calling `text`."""
    if as_json:
        printed(json_text(report))
    else:
        text()


def say(text: str) -> None:
    """Print lines on standard output, wrapped between words if that is a terminal."""
    for line in _fitted(text, sys.stdout):
        sys.stdout.write(f"{line}\n")


def written(text: str, indent: str = "") -> None:
    """Print a user's text, such as a payload: control characters are escaped, each line is indented and wrapped."""
    for line in storable_text(text, len(text)).expandtabs(4).split("\n"):
        say(f"{indent}{line}")


def printed(text: str) -> None:
    """Print text for another program, unchanged."""
    sys.stdout.write(f"{text}\n")


def note(text: str, end: str = "\n") -> None:
    """Print lines on standard error, wrapped between words if that is a terminal."""
    sys.stderr.write("\n".join(_fitted(text, sys.stderr)) + end)
    sys.stderr.flush()


def confirmed(
    topology: str,
    verb: str,
    noun: str,
    chosen: int,
    *,
    every: bool,
    as_json: bool,
    show: Callable[[], None] | None = None,
) -> None:
    """Have a person confirm what a filter chose. A script passes `--yes`, or `--all`, which leaves nothing to confirm.

    `show` prints what was chosen, before the question. Ends the program where the answer is no.
    """
    number = counted(chosen, noun)
    if as_json or not sys.stdin.isatty():
        if not every:
            raise UsageError(
                f"the filter chooses {number} of {topology}, and there is nobody to ask: add --yes to {verb} them",
                chosen=chosen,
            )
        return
    if show is not None:
        show()
    note(f"{verb} {number} of {topology}? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was done")
        finish(Exit.FAILED)


def _fitted(text: str, stream: TextIO) -> Iterator[str]:
    if not stream.isatty():
        yield text
        return
    width = terminal_width()
    for line in text.split("\n"):
        yield from wrapped(line, width)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output, as wide as the terminal; if that is none, tab-separated lines."""
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
    """Turn errors into one line and an exit status. Errors of `passing` are raised, for the caller to show.

    Standard output is flushed here, so that a reader that has gone, or a full disk, is met here and not at exit.
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
    except Exception as error:  # noqa: BLE001 - the outermost frame shows any error
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            _discard_output()  # nothing may be written at exit, either
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
    """What the operating system refuses, where, and what to do about it."""
    where = error.filename or "standard output, or a file that the system does not name"
    where = where.decode(errors="replace") if isinstance(where, bytes) else where
    return f"{error.strerror}: {where}; {_NEXT_STEPS[error.errno or 0]}"


def _reader_has_gone() -> bool:
    """Whether the broken pipe is our standard output; if not, it is another connection."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Send the rest of standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _error_json(as_json: bool, kind: str, message: str, details: dict[str, Any]) -> None:
    if as_json:
        printed(json.dumps({"error": {"kind": kind, "message": message, "details": details}}, indent=2))
