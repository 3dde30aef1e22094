"""What a server removed before it was received, on record in a subscription's position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stormproof.core.errors import Json
from stormproof.core.pending.rows import At

LOST_MAX: Final = 1_000
"""Lost ranges on record; above that the oldest are taken together."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages that the server removed before they were received.

    `behind` and `before` are the server's ids around them; `at` is when that was seen (ISO 8601). The same `behind` stands
    for the same range, of which more may be gone when it is seen again.
    """

    messages: int
    behind: str
    before: str
    at: str

    def __str__(self) -> str:
        return (
            f"{self.messages} messages between {self.behind} and {self.before} were lost: the server had removed them "
            f"before they were read (seen {self.at}, on_gap='record')"
        )


def lost_in(position: At) -> list[Lost]:
    """The lost ranges that a position has on record, oldest first."""
    found = position.get("lost")
    ranges: list[Lost] = []
    for one in found if isinstance(found, list) else ():
        match one:
            case [int(messages), str(behind), str(before), str(at)]:
                ranges.append(Lost(messages, behind, before, at))
            case _:
                continue
    return ranges


def with_lost(position: At, lost: Lost) -> At:
    """The position, with a lost range on record; unchanged where it is already."""
    ranges = lost_in(position)
    same = next((place for place, one in enumerate(ranges) if one.behind == lost.behind), None)
    if same is None:
        ranges.append(lost)
    elif ranges[same].messages >= lost.messages:
        return position
    else:
        ranges[same] = lost
    if len(ranges) > LOST_MAX:
        first, second = ranges[:2]
        ranges[:2] = [Lost(first.messages + second.messages, first.behind, second.before, second.at)]
    written: list[Json] = [[one.messages, one.behind, one.before, one.at] for one in ranges]
    return {**position, "lost": written}
