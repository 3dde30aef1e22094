"""A run's texts for people: a line for each batch, a running total, a summary at the end; and how its log is printed."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from stormproof.trident.cli.output import terminal_width, wrapped
from stormproof.trident.terms.observers import BatchResult, RunStatistics
from stormproof.trident.terms.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

REASON_CHARACTERS: Final = 120
SPINNER_CHARACTERS: Final = 2


def log_line(word: str, facts: Mapping[str, Any]) -> str | None:
    """A line of the log in words; None if there are no words for it."""
    told = _TOLD.get(word)
    return None if told is None else told(facts)


def _batch(f: Mapping[str, Any]) -> str:
    """`{"txid": 12, "outcome": "committed", ...}` as ``txid 12: 998 messages committed, 2 retried (2 error), 0.31 s``."""
    failed, dead, returned, rejected = f["failed"], f["dead_letters"], f["returned"], f.get("rejected", 0)
    parts: list[str] = []
    match f["outcome"]:
        case "committed":
            parts.append(f"{counted(f['messages'] - failed - returned - rejected, 'message')} committed")
        case "split":
            parts.append(f"{counted(f['messages'], 'message')} split, to be opened again in parts")
        case "failed":
            parts.append("nothing committed")
        case outcome:
            parts.append(f"{counted(f['messages'], 'message')} {outcome}")
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(f["reasons"].items()))
    if failed - dead:
        parts.append(f"{failed - dead} to be retried")
    if dead:
        parts.append(counted(dead, "dead letter"))
    if reasons:
        parts[-1] += f" ({reasons})"
    if returned:
        parts.append(f"{returned} returned with them")
    if rejected:
        parts.append(f"{rejected} rejected by a sink")
    if "total" in f["steps_ms"]:  # not of a batch that an earlier driver opened
        parts.append(f"{f['steps_ms']['total'] / 1000:.2f} s")
    reason = f": {f['reason'][:REASON_CHARACTERS]}" if f["reason"] else ""
    return f"txid {f['txid']}{' (retry)' if f['retry'] else ''}: {', '.join(parts)}{reason}"


_RECOVERED: Final = {
    "rolled_forward": "committed txid",
    "aborted": "returned the messages of txid",
    "abandoned": "gave up txid",
    "confirms_repeated": "repeated the confirm of txid",
    "suppressed": "suppressed a duplicate of txid",
}


def recovery_text(f: Mapping[str, Any]) -> str:
    """What a start did about what an earlier run left unfinished."""
    done = [f"{words} {', '.join(map(_txid, f[key]))}" for key, words in _RECOVERED.items() if f.get(key)]
    if f.get("files_swept"):
        done.append(f"removed {counted(f['files_swept'], 'file')} of dead attempts")
    if f.get("in_hand"):
        done.append(f"set {counted(len(f['in_hand']), 'message')} apart that a driver died of")
    return "; ".join(done) or "nothing was left unfinished"


def _txid(item: object) -> str:
    """A txid, or a pair of txid and sink."""
    return f"{item[0]} at {item[1]}" if isinstance(item, list) else str(item)


_TOLD: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "txn": _batch,
    "recovered": lambda facts: f"recovered: {recovery_text(facts)}",
    "tuning": lambda facts: f"tuning: {facts['step']}, since {facts['why']}",
}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """What a run has done so far, for the line of progress; `retried` is how many messages now wait for their retry."""

    done: RunStatistics
    retried: int = 0

    def after(self, result: BatchResult) -> RunProgress:
        """The total with one batch more."""
        ended = result.outcome in ("committed", "failed")
        again = result.messages - result.returned if result.retry and ended else 0
        return RunProgress(self.done.after(result), max(self.retried - again, 0) + result.failed - result.dead_letters)

    @property
    def text(self) -> str:
        """The line."""
        return (
            f"{self.done.topology}: {counted(self.done.messages, 'message')} committed in "
            f"{counted(self.done.batches, 'batch', 'batches')}"
            + (f", {self.retried} to be retried" if self.retried else "")
            + (f", {counted(self.done.dead_letters, 'dead letter')}" if self.done.dead_letters else "")
            + (f", {counted(self.done.rejected, 'reject')}" if self.done.rejected else "")
        )


def run_text(s: RunStatistics) -> str:
    """A run's summary: what it did, why it ended, and the next command."""
    lines = [
        f"{s.topology} ({s.guarantee}, epoch {s.epoch}): {counted(s.batches, 'batch', 'batches')}, "
        f"{counted(s.messages, 'message')} committed, {counted(s.failed, 'failure')}{_reasons(s)}, "
        f"{counted(s.dead_letters, 'dead letter')}, {counted(s.suppressed, 'duplicate')} suppressed, {s.elapsed_s:.1f} s",
        f"ended: {_ENDS.get(s.stopped, s.stopped)}",
    ]
    if s.superseded:
        lines.append(f"{counted(s.superseded, 'row')} superseded by later ones of their keys")
    if s.rejected:
        rejected = f"{counted(s.rejected, 'message')} rejected by a sink, whose table refuses their rows"
        lines.append(f"{rejected}; see them: stormproof dead-letters list {s.topology}")
    if s.dead_letters:
        lines.append(f"see the dead letters: stormproof dead-letters list {s.topology}")
    if s.tuning is not None:
        f, floor_s = s.tuning, s.tuning.floor_s
        reach = "" if floor_s is None else f", which is below reach: even small batches take {floor_s:.3g} s"
        lines.append(
            f"{s.topology}: tuned to {counted(f.messages, 'message')} a batch, {f.in_flight} of at most {f.in_flight_max} "
            f"in flight, to commit within {f.latency_target_s:g} s of the open{reach}"
        )
    return "\n".join(lines)


_ENDS: Final = {
    "idle": "nothing is left to read",
    "limit": "the limit of batches is reached; the next run goes on from here",
    "signal": "stopped by a signal; nothing is left half done, and the next run goes on from here",
    "event": "stopped by its program; nothing is left half done, and the next run goes on from here",
    "stop": "an operator stopped it; nothing is left half done, and the next run goes on from here",
    "drain": "an operator drained it; no message is pending, and the next run goes on from here",
}


def _reasons(s: RunStatistics) -> str:
    by = [f"{number} {reason}" for reason, number in sorted(s.failed_by_reason.items())]
    by += [f"{s.returned} more messages returned with them"] if s.returned else []
    return f" ({', '.join(by)})" if by else ""


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
    """Lines for people: the time, with the date where they are kept; the level if it is above INFO; and what happened in
    words.
    """

    def __init__(self, *, is_kept: bool) -> None:
        super().__init__()
        self._time = "%Y-%m-%d %H:%M:%S" if is_kept else "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        text = record.getMessage()
        told = facts_of(text)
        text = (None if told is None else log_line(*told)) or text
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{datetime.fromtimestamp(record.created, UTC).astimezone():{self._time}} {level}{text}{error}"


@contextmanager
def logging_to_stderr(level: str, form: Literal["text", "json"]) -> Generator[Callable[[str], None]]:
    """Log Stormproof's own lines; yields a function that shows progress, if standard error is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    formatter = JsonLines() if form == "json" else TextLines(is_kept=not console.is_terminal)
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
            line = Text(text)
            line.truncate(
                console.width - SPINNER_CHARACTERS, overflow="ellipsis"
            )  # in two rows it would leave one behind
            status.update(line)
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
    pass
