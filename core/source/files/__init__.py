"""Files as a pending source: one message a row, confirmed by position; public is `FileSource`.

| module | question that it answers |
| --- | --- |
| `source`, `micro_batches` | how do files, and the micro-batches of a streaming query, become messages |
| `entries` | which files are registered for a subscription; is a file still the one that was registered |
| `formats`, `rows` | how are Parquet, JSON lines and text read; was one changed; how is a row stored as a payload |
| `reader` | which rows of which files is a range of messages; how does an executor read them |
"""

from __future__ import annotations

from stormproof.core.source.files.source import FileSource

__all__ = ["FileSource"]
