"""How large a batch is and how many are in flight: what a tuner is told and says, and the one that tunes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from stormproof.core.errors import Json
from stormproof.core.source.protocol import Limit

TUNED_IN_FLIGHT_MAX: Final = 4
"""Batches in flight, at most, where a latency is to be held and no other limit is set."""


def in_flight_max(chosen: int | None, latency_target_s: float | None) -> int:
    """How many batches may ever be in flight: as chosen, else one, or a few where the tuner picks their number."""
    if chosen is not None:
        return chosen
    return 1 if latency_target_s is None else TUNED_IN_FLIGHT_MAX


@dataclass(frozen=True, slots=True)
class Setting:
    """What the next batches are to be: messages in each, and batches in flight, both at most."""

    messages: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.messages} messages a batch, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Sample:
    """One committed batch: how many messages, from open to committed in how many seconds, and when it was committed.

    `full`: it had as many messages as its limit allowed, or came near it; else the source had no more, and its throughput
    says nothing. `setting` is what was in force when it was opened.
    """

    messages: int
    latency_s: float
    ended_s: float
    full: bool
    setting: Setting


@dataclass(frozen=True, slots=True)
class Step:
    """What a tuner decided, and why. `below_reach`: it found that nothing holds the target."""

    before: Setting
    after: Setting
    why: str
    below_reach: bool = False

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}" if self.before != self.after else f"stays at {self.after}"


@dataclass(frozen=True, slots=True)
class Figures:
    """How batches are to be at one moment; the ledger keeps it with every batch that is opened.

    At most `messages` and `bytes` a batch, and `in_flight` at once, of `in_flight_max` that there may ever be. Where
    `latency_target_s` is set they are tuned: `step` is the last decision, and `why` it was taken. `floor_s` says that the
    target is below reach: even small batches, one at a time, take so many seconds.
    """

    messages: int
    bytes: int
    in_flight: int
    in_flight_max: int
    latency_target_s: float | None = None
    floor_s: float | None = None
    step: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Json]:
        """As the ledger keeps it."""
        return asdict(self)

    @staticmethod
    def of_json(found: Mapping[str, Json]) -> Figures | None:
        """As the ledger gave it back; None where it is of another version, or was tampered with."""
        numbers = [found.get(name) for name in ("messages", "bytes", "in_flight", "in_flight_max")]
        seconds = [found.get(name) for name in ("latency_target_s", "floor_s")]
        texts = [found.get(name, "") for name in ("step", "why")]
        whole = [number for number in numbers if isinstance(number, int)]
        timed = [float(s) if isinstance(s, int | float) else None for s in seconds]
        if len(whole) < len(numbers):
            return None
        return Figures(whole[0], whole[1], whole[2], whole[3], timed[0], timed[1], str(texts[0]), str(texts[1]))


class Tuner(Protocol):
    """Says how batches are to be, and learns from those that were committed."""

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        ...

    @property
    def in_flight(self) -> int:
        """How many batches may be in flight."""
        ...

    @property
    def figures(self) -> Figures:
        """All that there is to say about it."""
        ...

    def learn(self, sample: Sample) -> Step | None:
        """A batch was committed. What was decided on it, if anything."""
        ...


@dataclass(frozen=True, slots=True)
class AsSet:
    """Nothing is tuned."""

    limit: Limit
    in_flight: int

    @property
    def figures(self) -> Figures:
        """As they were set."""
        return Figures(self.limit.messages, self.limit.bytes, self.in_flight, self.in_flight)

    def learn(self, sample: Sample) -> Step | None:
        """Nothing to learn."""
