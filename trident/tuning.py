"""The size and number of batches in flight: the interface of a tuner, and the tuner that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from pydantic import TypeAdapter, ValidationError

from stormproof.core.errors import Json
from stormproof.core.source.protocol import Limit

TUNED_IN_FLIGHT_MAX: Final = 4
"""The most batches in flight under a latency target without a limit of its own."""


def in_flight_max(chosen: int | None, latency_target_s: float | None) -> int:
    """The most batches that may ever be in flight: as chosen, else one, or a few where a tuner picks their number.

    Of a plan that is `serial` (its jobs read a state) the coordinator runs one at a time, whatever this says.
    """
    if chosen is not None:
        return chosen
    return 1 if latency_target_s is None else TUNED_IN_FLIGHT_MAX


@dataclass(frozen=True, slots=True)
class Setting:
    """Limits of the next batches: messages in each, and batches in flight."""

    messages: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.messages} messages a batch, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Sample:
    """One committed batch: its messages, its seconds from open to commit, and the time of its commit.

    `full`: it had about as many messages as its limit allowed; otherwise the source had no more, and its throughput says
    nothing. `setting` was in force when it was opened.
    """

    messages: int
    latency_s: float
    ended_s: float
    full: bool
    setting: Setting


@dataclass(frozen=True, slots=True)
class Step:
    """What a tuner decided, and why. `below_reach`: no setting reaches the target."""

    before: Setting
    after: Setting
    why: str
    below_reach: bool = False

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}" if self.before != self.after else f"stays at {self.after}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The size and number of batches at one moment; the ledger keeps it with every batch that is opened.

    At most `messages` and `bytes` a batch, and `in_flight` batches at once, of `in_flight_max` that there may ever be. With
    a `latency_target_s` they are tuned: `step` is the last decision, and `why` its reason. `floor_s`: the target is below
    reach, since even small batches, one at a time, take this many seconds.
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
        """As the ledger gave it back; None where another version wrote it, or it was tampered with."""
        try:
            return _FIGURES.validate_python(found)
        except ValidationError:
            return None


_FIGURES: Final = TypeAdapter(Figures)


class Tuner(Protocol):
    """Chooses the size and number of batches, and learns from those that were committed."""

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of batches that may be in flight."""
        ...

    @property
    def figures(self) -> Figures:
        """The present choice, for the ledger and the statistics."""
        ...

    def learn(self, sample: Sample) -> Step | None:
        """Take in a committed batch. What was decided on it, if anything."""
        ...


@dataclass(frozen=True, slots=True)
class AsSet:
    """The tuner that changes nothing."""

    limit: Limit
    in_flight: int

    @property
    def figures(self) -> Figures:
        """The limits as they were set."""
        return Figures(self.limit.messages, self.limit.bytes, self.in_flight, self.in_flight)

    def learn(self, sample: Sample) -> Step | None:
        """Decide nothing."""
