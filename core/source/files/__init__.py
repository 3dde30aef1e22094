"""Files as a pending source: one message a row, confirmed by position; public is `FileSource`."""

from __future__ import annotations

from stormproof.core.source.files.source import FileSource

__all__ = ["FileSource"]
