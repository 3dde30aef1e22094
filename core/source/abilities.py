"""Abilities that some sources have in addition to `stormproof.core.source.protocol.Source`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from stormproof.core.source.dead_letter import DeadLetter


@runtime_checkable
class SupportsDeadLetters(Protocol):
    """A source that keeps its own dead letters, and carries out an operator's decisions about them.

    It names these methods alone: before Python 3.12 `isinstance` reads every attribute that a protocol names, and a group
    of sources has no decoder to read.
    """

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, oldest first, including those that were decided."""
        ...

    def undecided_among(self, ids: Collection[str]) -> frozenset[str]:
        """Those of these messages that are dead letters which wait for a decision. No payload is read."""
        ...

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with failures counted from 0; returns those that waited for a decision."""
        ...

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that waited for a decision."""
        ...

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Requeue a dead letter with this payload in place of the old one; False where it is not a dead letter.

        The message keeps its id and its history; the decision is added to it, with the SHA-256 of both payloads. The dead
        letter keeps the old payload and the new one. A crash leaves all of this or none of it.

        Raises:
            UsageError: the source cannot store such a payload; nothing was changed.
        """
        ...
