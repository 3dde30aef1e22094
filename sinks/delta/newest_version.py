"""A Delta table at its newest version; only what has changed since the last call is loaded."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.core.storage.protocol import FileState
from stormproof.sinks.delta.failures import panics_as_errors, shown
from stormproof.sinks.delta.loaded import load_table
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.protocol import SinkProblem


class NewestTable:
    """Keeps one table loaded, and brings it up to date at each call."""

    def __init__(self, log: DeltaLog, where: str) -> None:
        self._log = log
        self._where = where
        self._table: DeltaTable | None = None
        self._table_entry: FileState | None = None

    def forget(self) -> None:
        """Load it anew the next time."""
        self._table = None

    def load(self) -> DeltaTable:
        """The table at its newest version.

        Loading a table anew reads its whole state. So the loaded one is updated, as long as the log entry of its version is
        the same file as before; a log that was cut or replaced is loaded anew. Versions have no gaps: where the next
        version's entry is missing, the loaded version is the newest, and delta-rs need not list the log's folder to find
        that out, which takes about a millisecond for each thousand entries in it.

        Raises:
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        try:
            if (
                self._table is not None
                and self._table_entry is not None
                and self._entry_state(self._table.version()) == self._table_entry
            ):
                if self._entry_state(self._table.version() + 1) is None:
                    return self._table
                with panics_as_errors():
                    self._table.update_incremental()
            else:
                with panics_as_errors():
                    self._table = load_table(self._log.table)
            self._table_entry = self._entry_state(self._table.version())
        except TableNotFoundError as error:
            self._table = None
            raise SinkRefused(
                f"{self._where}: the table is gone: {shown(error)}", problem=SinkProblem.TABLE_GONE
            ) from error
        except (DeltaError, OSError) as error:
            self._table = None
            raise StoreUnavailable(f"{self._where}: the table cannot be read: {shown(error)}") from error
        return self._table

    def _entry_state(self, version: int) -> FileState | None:
        return self._log.files.stat(self._log.entry_path(version))
