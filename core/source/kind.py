"""What a source promises about a batch that is replayed: the same messages, others, or nothing at all."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

from stormproof.core.guarantee import Guarantee
from stormproof.core.source.protocol import Source


class SourceKind(StrEnum):
    """Trident's three kinds of sources."""

    NON_TRANSACTIONAL = "non-transactional"
    """Nothing: what was in flight may be lost, or handed out again beside what was done with it."""
    TRANSACTIONAL = "transactional"
    """A slice can be read again, with the very same messages."""
    OPAQUE = "opaque"
    """Each message is confirmed once; a batch that is replayed may be put together anew."""


WEAKEST_FIRST: Final = (SourceKind.NON_TRANSACTIONAL, SourceKind.OPAQUE, SourceKind.TRANSACTIONAL)


@runtime_checkable
class SaysKind(Protocol):
    """A source that says its kind."""

    @property
    def kind(self) -> SourceKind:
        """What it promises about a batch that is replayed."""
        ...


def kind_of(source: Source) -> SourceKind:
    """A source's kind. One that does not say is opaque where it serves exactly-once, and else non-transactional."""
    if isinstance(source, SaysKind):
        return source.kind
    return SourceKind.OPAQUE if source.serves(Guarantee.EXACTLY_ONCE) is None else SourceKind.NON_TRANSACTIONAL
