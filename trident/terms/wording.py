"""Counts, ages and times as a person reads and writes them: one form on the command line and on the page."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import storable_text

_AGE: Final = re.compile(r"(\d+)\s*([smhdw])")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 message``, ``2 messages``; `plural` if an s does not make it."""
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def cut(text: str, characters: int) -> str:
    """A text in one line, of at most so many characters, with control characters escaped."""
    line = " ".join(storable_text(text).split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def local_time(at: datetime) -> str:
    """A time to the second, in this machine's zone."""
    return at.astimezone().isoformat(sep=" ", timespec="seconds")


def parse_age(text: str) -> timedelta:
    """An age as `30d`, `12h`, `90m`, `45s` or `2w`.

    Raises:
        UsageError: it is none.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no age; write a number and one of {', '.join(_UNITS_S)}, as in 30d")
    return timedelta(seconds=int(match[1]) * _UNITS_S[match[2]])


def parse_time(text: str | None, now: datetime) -> datetime | None:
    """A time in ISO 8601, local where it names no zone; or an age, as 12h: so long before `now`. Of nothing, None.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            return now - parse_age(text)
        except UsageError:
            raise UsageError(
                f"{text!r} is no time: write it as 2026-11-23T05:00:00+00:00, or as an age, as in 12h"
            ) from None
    return found.astimezone(UTC)
