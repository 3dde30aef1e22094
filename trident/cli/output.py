"""How every command prints and ends: JSON or text on standard output, errors in one line on standard error.

On a terminal tables and lines are laid out to its width, and broken between words.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import select
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any, Final, NoReturn, TextIO

from stormproof.core.base.errors import CannotTell, Fenced, StormproofError, UsageError
from stormproof.core.base.message import storable_text
from stormproof.trident.terms.wording import counted

FALLBACK: Final = (80, 24)
SHORT: Final = 26
"""A column of at most so many characters is never wrapped: an id, a number, a time."""

NARROW: Final = 20
"""The least width of a column of longer text; if there is no room for it, each row becomes a record."""

GAP: Final = 2
_COMMAND: Final = re.compile(r"stormproof(?: [^\s;,()]*[^\s;,().:])+")
_COMMAND_MAX: Final = 60
_HELD: Final = "\x00"


def terminal_width() -> int:
    """The terminal's columns."""
    return max(shutil.get_terminal_size(FALLBACK).columns, 20)


def wrapped(line: str, width: int) -> list[str]:
    """A line as lines of at most this width, broken between words; the indent is kept, and short commands stay whole.

    Only a word that is longer than a line is broken.
    """
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    held = _COMMAND.sub(lambda m: m[0].replace(" ", _HELD) if len(m[0]) <= _COMMAND_MAX else m[0], line.strip())
    parts = textwrap.wrap(
        held,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=True,
    )
    return [part.replace(_HELD, " ") for part in parts] or [""]


def cell_text(value: object) -> str:
    """A cell's text, in one line; times are local."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    return " ".join(str(value).split())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int, file: TextIO) -> None:
    """Write a table of at most this width. If its longer columns have no room, each row is written as a record."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    values = [list(row) for row in rows]
    cells = [[cell_text(value) for value in row] for row in values]
    least = [_least([name, *(row[place] for row in cells)]) for place, name in enumerate(columns)]
    if cells and sum(least) + GAP * (len(columns) - 1) > width:
        for line in _records(columns, cells, width):
            file.write(f"{line}\n")
        return
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_edge=False)
    for place, (name, minimum) in enumerate(zip(columns, least, strict=True)):
        is_short = max(len(row[place]) for row in cells) <= SHORT if cells else True
        is_number = bool(values) and all(isinstance(row[place], int) for row in values)
        drawn.add_column(
            Text(name), no_wrap=is_short, min_width=minimum, justify="right" if is_number else "left", overflow="fold"
        )
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    # The height is given, too: without it Rich takes any dumb terminal to be 80 columns wide.
    Console(file=file, width=width, height=FALLBACK[1]).print(drawn)


def _least(texts: Sequence[str]) -> int:
    """The least width of a column: its longest text if that is short, else its longest word."""
    longest = max(map(len, texts))
    words = max((len(word) for text in texts for word in text.split()), default=0)
    return longest if longest <= SHORT else max(NARROW, words)


def _records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Each row as lines of name and value, with an empty line between rows."""
    label = max(map(len, columns))
    for number, row in enumerate(cells):
        if number:
            yield ""
        for name, cell in zip(columns, row, strict=True):
            first, *more = wrapped(cell, width - label - GAP) or [""]
            yield f"{name:<{label}}  {first}".rstrip()
            yield from (f"{'':<{label}}  {part.lstrip()}" for part in more)


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
