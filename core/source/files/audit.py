"""What the audit asks a file source: which messages are registered."""

from __future__ import annotations

from stormproof.core.pending.audit import NumberedAudit
from stormproof.core.pending.rows import At
from stormproof.core.source.files import entries


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
