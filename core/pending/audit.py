"""What the audit asks of a kind of source: where its slices reach, and whether they leave gaps or overlap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stormproof.core.pending.rows import At, Subscriber


@dataclass(frozen=True, slots=True)
class OpenedSlice:
    """Messages that were opened together: by a batch, or in a slice that the store still has.

    `holder` is for people. `taken`: they left the source with it, so nothing else may hold them. One that is not taken was
    given back; it only shows what was handed out.
    """

    at: At
    holder: str
    txid: int | None
    taken: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the slices of a source.

    `unreachable`: it is with messages that were never in a slice, and cannot come into one. `doubt`: whether something is
    wrong cannot be told.
    """

    text: str
    txid: int | None = None
    unreachable: bool = False
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of a comparison of messages that were opened, as the source still keeps them, with what is on record: how
    many are as they were, in which words; what is wrong; and what was not compared, and why.
    """

    messages: int = 0
    compared: str = ""
    wrong: tuple[Finding, ...] = ()
    left_out: tuple[str, ...] = ()


class SliceAudit(ABC):
    """What a connector knows of slices that others wrote down, with nothing but the store's database."""

    def __init__(self, who: Subscriber, cursor: Any) -> None:
        self._who = who
        self._cursor = cursor

    @abstractmethod
    def can_read(self, at: At) -> bool:
        """Whether this is a slice of such a source."""

    @abstractmethod
    def reach(self, at: At) -> Any:
        """How far into the source a slice goes; comparable with another's."""

    @abstractmethod
    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether a slice holds a message."""

    def has(self, id_: int, origin: int) -> bool:
        """Whether the source has the message; also true where that is not known, as by default."""
        return True

    def count(self, at: At) -> int | None:
        """How many messages of a slice the source still has; None: not known, as by default."""
        return None

    @abstractmethod
    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the message lies behind the position."""

    def unopened(self, position: At) -> tuple[int, float | None]:
        """How many messages were never opened, and how many seconds the oldest has waited; (0, None), as by default: not
        known.
        """
        return 0, None

    @abstractmethod
    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """Overlaps of what was taken, messages before the position that nobody took, and messages that nobody can reach.

        `held` has the batches first, in their order. Everything up to the furthest of `trusted` counts as handed out once.
        """

    def unsubscribed(self) -> list[Finding]:
        """What is wrong with the source where the topology has no subscription to it yet, since its start was refused. By
        default nothing is known of it.
        """
        return []

    def kept(self, slices: Sequence[OpenedSlice]) -> Kept:
        """Compare what the source still keeps of these slices with what they were when they were opened. By default only a
        server has them.
        """
        why = "its messages: their server keeps them, and no digest of them is on record"
        return Kept(left_out=(why,) if slices else ())


class NumberedAudit(SliceAudit):
    """Messages have numbers without gaps: slices are ranges of them, and the position is the next number."""

    def can_read(self, at: At) -> bool:
        """Whether it is a range."""
        return _range_of(at) is not None

    def reach(self, at: At) -> int:
        """The number behind the range."""
        found = _range_of(at)
        return 0 if found is None else found.stop

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the range encloses the number."""
        found = _range_of(at)
        return found is not None and id_ in found

    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the number lies behind the position."""
        return id_ >= (_next_of(position) or 0)

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """Ranges that were taken must cover, once, all that was handed out."""
        end = _next_of(position)
        if position and end is None:
            return [Finding(f"the position of source {self._who.source} cannot be read: {sorted(position)}")]
        known = max((self.reach(at) for at in trusted), default=0)
        pieces = [
            (found.start, found.stop, one) for one in held if one.taken and (found := _range_of(one.at)) is not None
        ]
        findings: list[Finding] = []
        covered = _first_of(position)
        for start, stop, one in sorted(pieces, key=lambda piece: piece[:2]):
            if start < covered:
                findings.append(Finding(f"{one.holder} holds messages that another batch holds, too", one.txid))
            elif start > max(covered, known):
                findings.append(self._missed(start - max(covered, known), f"before {one.holder}", one.txid))
            covered = max(covered, stop)
        if end is not None and covered > end:
            findings.append(
                Finding(
                    f"the position of source {self._who.source} is {end}, and batches hold messages up to {covered}: "
                    f"{covered - end} would be opened again"
                )
            )
        covered = max(covered, known)
        if end is not None and covered < end:
            findings.append(self._missed(end - covered, "behind the last batch", None))
        return findings

    def _missed(self, messages: int, where: str, txid: int | None) -> Finding:
        return Finding(f"{messages} messages of source {self._who.source} {where} were handed out to no batch", txid)


def _next_of(position: At) -> int | None:
    """The number of the first message that was never opened; None where the position has none."""
    number = position.get("next")
    return number if isinstance(number, int) else None


def _first_of(position: At) -> int:
    """The number that the subscription began with; 0 where there is none."""
    number = position.get("first")
    return number if isinstance(number, int) else 0


def _range_of(at: At) -> range | None:
    """The numbers of a slice; None where it is not of numbered messages, which `can_read` tells the audit."""
    match at.get("range"):
        case [int(first), int(stop)]:
            return range(first, stop)
        case _:
            return None
