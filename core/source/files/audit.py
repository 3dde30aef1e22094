"""What the audit asks a file source: which messages are registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from stormproof.core.base.errors import PositionMismatch, StormproofError
from stormproof.core.pending.audit import Finding, Kept, NumberedAudit, OpenedSlice
from stormproof.core.pending.rows import At
from stormproof.core.source.files import entries
from stormproof.core.source.files.formats import check_unchanged, digests_now, scan
from stormproof.core.storage.files import files_at


class FilesAudit(NumberedAudit):
    """The answers for one subscription of a file source. A message's origin is the number of its file."""

    def has(self, id_: int, origin: int) -> bool:
        """Whether a registered file of this number has the message."""
        return entries.has(self._cursor, self._who, origin, id_)

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the message is in the range, and its file has it."""
        return super().contains(at, id_, origin) and self.has(id_, origin)

    def unopened(self, position: At) -> tuple[int, float | None]:
        """How many messages of the registered files lie behind the position."""
        _, registered = entries.last(self._cursor, self._who)
        return max(0, registered - self.reach({"range": [0, position.get("next", 0)]})), None

    def kept(self, slices: Sequence[OpenedSlice]) -> Kept:
        """By the digests that were taken when the files were registered. A file that is gone is not kept."""
        same, wrong, left_out = 0, list[Finding](), list[str]()
        for file in entries.registered(self._cursor, self._who, "text") if slices else ():
            try:
                now = files_at(file.path).stat(file.path)
                if now is None:
                    continue
                check_unchanged(file.path, now, file.size_bytes, None)
                parquet = replace(file, format="parquet")
                found = digests_now(parquet) if file.digested else scan(file.path, "text", pa.schema([])).digests
                altered = found != file.digests
            except (PositionMismatch, pa.ArrowInvalid):
                altered = True
            except (OSError, StormproofError) as error:
                left_out.append(f"the messages of {file.path}: {error}")
                continue
            if altered:
                wrong.append(Finding(f"file {file.path} has another content than when its messages were read"))
            else:
                same += file.rows
        return Kept(same, f"{same} messages of files that are still there", tuple(wrong), tuple(left_out))
