"""What the audit needs to know of files: which rows are registered."""

from __future__ import annotations

from typing import Any

from stormproof.core.pending.audit import NumberedAudit
from stormproof.core.pending.rows import At
from stormproof.core.postgres.store import query

_MINE = "from stormproof.file_entry where source = %s and subscription = %s"


class FilesAudit(NumberedAudit):
    """One subscription of a file source. A message's origin is the number of its file."""

    def has(self, id_: int, origin: int) -> bool:
        """Whether a registered file of this number has the message."""
        return bool(
            self._one(
                f"select count(*) {_MINE} and number = %s and first_id <= %s and %s < first_id + rows", origin, id_, id_
            )
        )

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the range encloses the number, and it is the file's."""
        return super().contains(at, id_, origin) and self.has(id_, origin)

    def unopened(self, position: At) -> tuple[int, float | None]:
        """Of the files that are registered."""
        registered = int(self._one(f"select coalesce(max(first_id + rows), 0) {_MINE}"))
        return max(0, registered - self.reach({"range": [0, position.get("next", 0)]})), None

    def _one(self, statement: str, *parameters: object) -> Any:
        (row,) = query(self._cursor, statement, self._who.source, self._who.subscription, *parameters).fetchall()
        return row[0]
