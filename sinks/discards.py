"""Values that a column cannot hold, written as NULL and counted: what ``schema_contract="discard_value"`` does in a task."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from stormproof.core.sink import PreparedFile, TaskWriter
from stormproof.sinks.limits import Limits


class DiscardingWriter:
    """A task's writer that writes NULL for what the limits do not allow; the first file says how often, by column."""

    def __init__(self, inner: TaskWriter, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits
        self._counts = Counter[str]()

    def write(self, rows: pa.RecordBatch) -> None:
        """Write the rows, whose required columns were checked."""
        kept, counts = self._limits.without_misfits(rows)
        self._counts.update(counts)
        self._inner.write(kept)

    def close(self) -> Sequence[PreparedFile]:
        """Finish the files."""
        files = list(self._inner.close())
        if files and self._counts:
            files[0] = replace(files[0], discarded=json.dumps(dict(sorted(self._counts.items()))))
        return files

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._inner.discard()


def discarded_in(files: Iterable[PreparedFile]) -> dict[str, int]:
    """How many values of each column were discarded in these files."""
    total = Counter[str]()
    for file in files:
        total.update(json.loads(file.discarded))
    return dict(sorted(total.items()))
