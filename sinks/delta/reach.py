"""The versions of a Delta table whose rows a RESTORE of another writer has removed."""

from __future__ import annotations

from stormproof.sinks.delta.log import OF_TIME, DeltaLog, LogEntry


class Reach:
    """Follows a log back from its newest version, and finds the versions whose rows a RESTORE has removed.

    A RESTORE keeps the transaction identifiers and drops the rows. The versions between its target and itself no longer
    count, and neither do the RESTOREs among them.
    """

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._reach: int | None = None
        self._by: int = -1

    def taken_back_by(self, entry: LogEntry) -> int | None:
        """The version of the RESTORE that removed this entry's rows, if any. To be called for each entry, newest first."""
        if self._reach is not None and entry.version > self._reach:
            return self._by
        target = entry.restored_to
        if target is not None:
            self._reach, self._by = self._of_time(entry) if target == OF_TIME else target, entry.version
        return None

    def _of_time(self, restore: LogEntry) -> int:
        """The version that a RESTORE to a time went back to: the newest one that lists the files which it left.

        The time does not tell: Spark writes it as a text without its zone. Where a file was listed again with other
        deletions, or the log does not reach back so far, no version before is known to be left: -1.
        """
        differ: set[str] = set()
        for version in range(restore.version, 0, -1):
            entry = self._log.entry(version)
            toggled = None if entry is None else _toggled(entry)
            if toggled is None:
                return -1
            differ ^= toggled
            if not differ:
                return version - 1
        return -1


def _toggled(entry: LogEntry) -> set[str] | None:
    """The files that are listed either before a version or behind it; None where one is listed anew."""
    added, removed = {file.path for file in entry.added}, {path for path, _ in entry.removed}
    return None if added & removed else added | removed
