"""What the log says of a Delta table's newest version apart from its files: enough for a commit that only adds some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from deltalake import DeltaTable, Metadata, Schema
from deltalake.table import ProtocolVersions


class TableHead(Protocol):
    """One version of a table: a loaded `DeltaTable` is one, and `TableAhead` is."""

    def version(self) -> int:
        """Its number."""
        ...

    def transaction_version(self, app_id: str) -> int | None:
        """The newest version of an application's transaction identifier."""
        ...

    def metadata(self) -> Metadata:
        """Id, partition columns and properties."""
        ...

    def protocol(self) -> ProtocolVersions:
        """The versions and features that it asks of readers and writers."""
        ...

    def schema(self) -> Schema:
        """Its columns."""
        ...


@dataclass(frozen=True, slots=True)
class TableAhead:
    """A version that is known without being loaded: behind the loaded one lie only versions that this process wrote, each
    of which added files under its own identifier and changed nothing else.
    """

    loaded: DeltaTable
    number: int
    identifiers: Mapping[str, int]

    def version(self) -> int:
        """Its number."""
        return self.number

    def transaction_version(self, app_id: str) -> int | None:
        """What this process wrote last, else what is loaded."""
        return self.identifiers[app_id] if app_id in self.identifiers else self.loaded.transaction_version(app_id)

    def metadata(self) -> Metadata:
        """As loaded."""
        return self.loaded.metadata()

    def protocol(self) -> ProtocolVersions:
        """As loaded."""
        return self.loaded.protocol()

    def schema(self) -> Schema:
        """As loaded."""
        return self.loaded.schema()
