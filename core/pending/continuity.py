"""Whether what a server has follows on what it had: what each look at it has shown, and the one place that decides on it.

What is pending stands with us. What a server has, it may lose, remove, or number again. So a source notes with its position
what it saw last, compares the server with that before the position moves on, and says what it found: a `ContinuityLook`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Literal, Protocol, TypeAlias

from stormproof.core.base.arguments import require_choice
from stormproof.core.base.errors import Json, PositionMismatch
from stormproof.core.pending.rows import At

log = logging.getLogger("stormproof.source")

OnGap: TypeAlias = Literal["fail", "record"]
OnNewStream: TypeAlias = Literal["fail", "adopt", "same"]

RECORD_MAX: Final = 1_000
"""Looks on record; above that the oldest of a kind are taken together."""
_KEY: Final = "breaks"


class Continuity(StrEnum):
    """What a look has shown of a server's messages."""

    CONTINUOUS = "continuous"
    REMOVED = "removed"
    """Messages are gone that were never received."""
    REWOUND = "rewound"
    """The server lost the newest of what it had, as by a copy that was restored: their numbers are given again."""
    ANOTHER = "another"
    """It is another stream of the same name."""
    UNKNOWN = "unknown"
    """It cannot be told."""


@dataclass(frozen=True, slots=True)
class ContinuityLook:
    """What a look at a stream, or at a partition, has shown.

    `text` says it as a clause. `messages` were removed, or may have been; `behind` and `before` are the server's ids around
    them. `place` is the partition's number within the position. `at` (ISO 8601) and `by`, the argument that let the run go
    on, are known once it is on record.
    """

    verdict: Continuity
    text: str = ""
    messages: int = 0
    behind: str = ""
    before: str = ""
    place: int = 0
    at: str = ""
    by: str = ""

    def __str__(self) -> str:
        lost = ", and are lost" if self.verdict is Continuity.REMOVED else ""
        return f"{self.text}{lost} (seen {self.at}{self.by and f', {self.by}'})"


CONTINUOUS: Final = ContinuityLook(Continuity.CONTINUOUS)


class _Ahead(Protocol):
    """How far a subscription is, in numbers that the server gives."""

    @property
    def first(self) -> int: ...
    @property
    def next(self) -> int: ...


def at_least(position: _Ahead) -> str:
    """What stands before the number of removed messages, where what was read before them went, too: whether the server was
    set back, and lost more of the same numbers, cannot be told then.
    """
    return "at least " if position.next > position.first else ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What follows a look: what the user said by `on_gap` and `on_new_stream`.

    `keep` and `anew` are next steps, for the error: how the server keeps more, and how another stream is read.
    """

    where: str
    source: str
    keep: str
    anew: str
    on_gap: OnGap = "fail"
    on_new_stream: OnNewStream = "fail"

    def __post_init__(self) -> None:
        require_choice(self.where, "on_gap", self.on_gap, ("fail", "record"))
        require_choice(self.where, "on_new_stream", self.on_new_stream, ("fail", "adopt", "same"))

    def decided(self, looks: Iterable[ContinuityLook]) -> list[ContinuityLook]:
        """What goes on record of these looks; the run goes on.

        Raises:
            PositionMismatch: the run must not go on behind them.
        """
        noted: list[ContinuityLook] = []
        for look in looks:
            if look.verdict is Continuity.CONTINUOUS:
                continue
            by = self._by(look)
            log.error("%s: %s; it is on record%s", self.where, look.text, by and f" ({by})")
            noted.append(replace(look, at=datetime.now(UTC).isoformat(timespec="seconds"), by=by))
        return noted

    def _by(self, look: ContinuityLook) -> str:
        """The argument that lets the run go on; none is needed where it cannot be told whether anything is gone."""
        if look.verdict in (Continuity.REWOUND, Continuity.ANOTHER):
            if self.on_new_stream == "fail":
                raise self._refused(look, self.anew)
            return f"on_new_stream={self.on_new_stream!r}"
        if not look.messages:
            return ""
        if self.on_gap == "fail":
            raise self._refused(
                look, f"To go on without them, and have them on record, pass on_gap='record'; {self.keep}"
            )
        return f"on_gap={self.on_gap!r}"

    def _refused(self, look: ContinuityLook, next_step: str) -> PositionMismatch:
        return PositionMismatch(
            f"{self.where}: {look.text}. {next_step}",
            source=self.source,
            verdict=str(look.verdict),
            messages=look.messages,
            behind=look.behind,
            before=look.before,
        )


def looks_in(position: At) -> list[ContinuityLook]:
    """What a position has on record, oldest first."""
    found = position.get(_KEY)
    looks: list[ContinuityLook] = []
    for one in found if isinstance(found, list) else ():
        match one:
            case [str(verdict), str(text), int(messages), str(behind), str(before), int(place), str(at), str(by)]:
                looks.append(ContinuityLook(Continuity(verdict), text, messages, behind, before, place, at, by))
            case _:
                continue
    return looks


def with_looks(position: At, looks: Sequence[ContinuityLook]) -> At:
    """The position, with these on record. What is seen again behind the same id stands once, as seen last, with the higher
    number.
    """
    if not looks:
        return position
    kept = {(one.verdict, one.place, one.behind): one for one in looks_in(position)}
    for look in looks:
        key = (look.verdict, look.place, look.behind)
        larger = max(kept.pop(key, look), look, key=lambda one: one.messages)
        kept[key] = replace(larger, at=look.at, by=look.by)  # it happened again: what was accepted before was not this
    written: list[Json] = [
        [str(one.verdict), one.text, one.messages, one.behind, one.before, one.place, one.at, one.by]
        for one in _few(list(kept.values()))
    ]
    return {**position, _KEY: written}


def _few(looks: list[ContinuityLook]) -> list[ContinuityLook]:
    """At most `RECORD_MAX`, or as many as there are kinds and places."""
    merged: dict[tuple[Continuity, int], ContinuityLook] = {}
    old = len(looks) - RECORD_MAX
    for one in looks[: old + 1] if old > 0 else ():
        first = merged.setdefault((one.verdict, one.place), one)
        if first is not one:
            messages = first.messages + one.messages
            text = f"{messages} messages, at several times, between {first.behind} and {one.before}"
            merged[one.verdict, one.place] = replace(first, text=text, messages=messages, before=one.before, at=one.at)
    return [*merged.values(), *looks[old + 1 if old > 0 else 0 :]]
