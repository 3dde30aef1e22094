"""What some sources can do beside what all do (`stormproof.core.source.protocol`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.protocol import Source


@runtime_checkable
class SupportsDeadLetters(Source, Protocol):
    """A source that keeps its own dead letters, and does with them what an operator decides."""

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, those that were disposed of included, oldest first."""
        ...

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with their failures counted from 0; returns those that were dead."""
        ...

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that were dead."""
        ...

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Requeue a dead letter with this payload in place of the old one; False where it is not a dead letter.

        The message keeps its id and its history, to which the decision is added with the SHA-256 of both payloads; the
        dead letter keeps the old payload and the new one. All of it or nothing: a crash leaves no part of it.

        Raises:
            UsageError: the source cannot store such a payload; nothing was changed.
        """
        ...
