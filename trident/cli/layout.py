"""Text for a terminal's width: wrapped lines, and tables that become records if they are too wide."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, TextIO

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
