"""What a source promises about a batch that is replayed."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SourceKind(StrEnum):
    """Trident's three kinds of sources."""

    NON_TRANSACTIONAL = "non-transactional"
    """Nothing: messages in flight may be lost, or handed out again after they were applied."""
    TRANSACTIONAL = "transactional"
    """A slice can be read again, with the same messages."""
    OPAQUE = "opaque"
    """Each message is confirmed once, but a replayed batch may hold other messages."""


WEAKEST_FIRST: Final = (SourceKind.NON_TRANSACTIONAL, SourceKind.OPAQUE, SourceKind.TRANSACTIONAL)
