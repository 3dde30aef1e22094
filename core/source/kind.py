"""What a source promises about a batch that is replayed: the same messages, others, or nothing at all."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SourceKind(StrEnum):
    """Trident's three kinds of sources."""

    NON_TRANSACTIONAL = "non-transactional"
    """Nothing: what was in flight may be lost, or handed out again beside what was done with it."""
    TRANSACTIONAL = "transactional"
    """A slice can be read again, with the very same messages."""
    OPAQUE = "opaque"
    """Each message is confirmed once; a batch that is replayed may be put together anew."""


WEAKEST_FIRST: Final = (SourceKind.NON_TRANSACTIONAL, SourceKind.OPAQUE, SourceKind.TRANSACTIONAL)
