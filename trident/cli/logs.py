"""The log's lines on standard error, and a line of progress below them where that is a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console


class JsonLines(logging.Formatter):
    """One JSON object a line; the facts of a txid or a recovery stand under that word."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        text = record.getMessage()
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        word, _, facts = text.partition(" ")
        try:
            line[word] = json.loads(facts) if facts.startswith("{") else None
        except json.JSONDecodeError:
            line[word] = None
        if line[word] is None:
            del line[word]
            line["message"] = text
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def logging_to_stderr(level: str, form: Literal["text", "json"]) -> Generator[Callable[[str], None]]:
    """Log Stormproof's own lines; yields what shows progress (nothing, where standard error is no terminal)."""
    from rich.console import Console

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    formatter = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
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
        with console.status("starting ...") as status:
            # Lines go through the console, or they would be drawn over by the progress.
            handler = _ConsoleHandler(console)
            handler.setFormatter(formatter)
            logger.addHandler(handler)
            yield status.update
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def _nothing(text: str) -> None:
    del text
