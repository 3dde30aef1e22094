"""Which of a stream's sequences are accounted for: received, or removed by the server and decided on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from stormproof.core.base.errors import Json
from stormproof.core.source.nats.consumer import StreamFacts
from stormproof.core.source.nats.message_metadata import time_of

_EARLIER_S: Final = 3_600.0
"""A stream that was set back is read again from so long before the last message that is known: clocks may differ."""


@dataclass(slots=True)
class Sequences:
    """Everything up to `through` is accounted for, and what is in `above` was received, with when the stream took it.

    `began` is where the stream ended when it was first read, and `absent` how many messages up to there were gone already,
    and are not met yet. `mark` is the last message up to `through` that was received, and `compared` the connection by which
    it was compared with the server's. `end` is where the stream ended at the last look.
    """

    through: int = 0
    began: int = 0
    absent: int = 0
    mark: tuple[int, int] | None = None
    above: dict[int, int] = field(default_factory=dict[int, int])
    compared: int = 0
    end: int | None = None

    @classmethod
    def begun(cls, facts: StreamFacts, *, latest: bool) -> Sequences:
        """Of a stream that is read from here on: what it has not any more is not missed."""
        through = facts.last if latest else max(0, facts.first - 1)  # an empty stream begins at 0
        return cls(through, facts.last, 0 if latest else facts.holes, end=facts.last)

    @property
    def highest(self) -> int:
        """The highest sequence that was received, or is accounted for."""
        return max(self.above, default=self.through)

    def since(self, horizon_s: float) -> datetime | str:
        """From when on the stream is to be read again so that nothing is left out."""
        if self.mark is None:
            return "earliest"
        return time_of(self.mark[1]) - timedelta(seconds=min(_EARLIER_S, horizon_s))

    def received(self, messages: Iterable[tuple[int, int]]) -> None:
        """These were received: sequence, and when the stream took it."""
        self.above.update(one for one in messages if one[0] > self.through)

    def misses(self, top: int) -> bool:
        """Whether one up to `top` is not accounted for."""
        return top - self.through > len(self.above)

    def passed(self, first: int, holes: Sequence[int], upto: int) -> int:
        """Move on over what was received and what is gone: the stream begins at `first`, and `holes` are gone behind it. All
        up to `upto` that is there is not waited for. Gives how many are missed.
        """
        low, gone = max(self.through, first - 1), set(holes)
        through = max(low, upto)
        while through + 1 in self.above or through + 1 in gone:
            through += 1
        left = [one for one in gone if low < one <= through and one not in self.above]
        early = [one for one in self.above if one <= low]
        old = sum(one <= self.began for one in left) + max(0, min(low, self.began) - self.through)
        excused = min(self.absent, max(0, old - sum(one <= self.began for one in early)))
        missed = len(left) + low - self.through - len(early) - excused
        self.absent -= excused
        self.move(through)
        return missed

    def move(self, through: int) -> None:
        """All up to here is accounted for, and what follows on it."""
        passed = [one for one in self.above if one <= through]
        while through + 1 in self.above:
            through += 1
            passed.append(through)
        if passed:
            last = max(passed)
            self.mark = max((last, self.above[last]), self.mark or (0, 0))
        for one in passed:
            del self.above[one]
        self.through = max(self.through, through)

    def to_json(self) -> dict[str, Json]:
        """For the position."""
        mark: list[Json] | None = None if self.mark is None else [*self.mark]
        return {"through": self.through, "began": self.began, "absent": self.absent, "mark": mark}

    @classmethod
    def of(cls, position: Mapping[str, Json]) -> Sequences:
        """What `to_json` wrote."""
        match position:
            case {"through": int(through), "began": int(began), "absent": int(absent), "mark": mark}:
                pair = (int(mark[0]), int(mark[1])) if isinstance(mark, list) else None  # type: ignore[arg-type]
                return cls(through, began, absent, pair)
            case _:
                return cls()
