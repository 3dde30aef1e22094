"""The log on standard error; if that is a terminal, with a line of progress below it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from stormproof.trident.cli.layout import terminal_width, wrapped
from stormproof.trident.cli.run_text import log_line

if TYPE_CHECKING:
    from rich.console import Console


def facts_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """The word and the facts of a line such as ``txn {"txid": 1}``; None if it is a sentence."""
    word, _, facts = text.partition(" ")
    if not facts.startswith("{"):
        return None
    try:
        return word, json.loads(facts)
    except json.JSONDecodeError:
        return None


class JsonLines(logging.Formatter):
    """One JSON object a line. The facts of a line are under its word: ``txn``, ``recovered``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        text = record.getMessage()
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        told = facts_of(text)
        if told is None:
            line["message"] = text
        else:
            line[told[0]] = told[1]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Lines for people: the time, the level if it is above INFO, and what happened in words."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        text = record.getMessage()
        told = facts_of(text)
        text = (None if told is None else log_line(*told)) or text
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{datetime.fromtimestamp(record.created, UTC).astimezone():%H:%M:%S} {level}{text}{error}"


@contextmanager
def logging_to_stderr(level: str, form: Literal["auto", "text", "json"]) -> Generator[Callable[[str], None]]:
    """Log Stormproof's own lines; yields a function that shows progress, if standard error is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    is_text = console.is_terminal if form == "auto" else form == "text"
    formatter = TextLines() if is_text else JsonLines()
    logger = logging.getLogger("stormproof")
    before = logger.level, logger.propagate
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        if not console.is_terminal:
            handler.setFormatter(formatter)
            logger.addHandler(handler)
            yield _nothing
            return
        status = console.status("")

        def show(text: str) -> None:
            status.update(Text(text, no_wrap=True, overflow="ellipsis"))
            status.start()  # not earlier: a starting JVM writes lines of its own

        # Lines go through the console: else the progress would overwrite them.
        handler = _ConsoleHandler(console)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        try:
            yield show
        finally:
            status.stop()
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not text.startswith("{"):
            text = "\n".join(part for line in text.split("\n") for part in wrapped(line, terminal_width()))
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _nothing(text: str) -> None:
    del text
