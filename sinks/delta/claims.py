"""Who has claimed a Delta table, also before anything is committed to it: one property of the table for each life.

A property outlives the log's retention, and a change of properties conflicts with every other one: where two lives claim a
table at the same instant, one of them has to look again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from stormproof.core.base.errors import StoreUnavailable
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.committers import Committers
from stormproof.sinks.delta.delta_rs import shown
from stormproof.sinks.delta.features import Committer
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.newest_version import NewestTable, entry_of

CLAIM_TRIES_MAX: Final = 20
"""How often we look again because another writer changed the table's properties between our look and our change."""

_PREFIX: Final = "stormproof.claim."
_CLAIMED: Final = "claimed"
_RELEASED: Final = "released"
"""The two values of a life's property. A released one stays, since delta-rs cannot remove a property."""


def properties_of(identity: SinkIdentity) -> Mapping[str, str]:
    """The properties with which a table is made for this life."""
    return {_name(identity): _CLAIMED}


def is_claimed_by(table: DeltaTable, identity: SinkIdentity) -> bool:
    """Whether this life has claimed the table."""
    return table.metadata().configuration.get(_name(identity)) == _CLAIMED


def other_claims(table: DeltaTable, identity: SinkIdentity) -> tuple[str, ...]:
    """The other lives that have claimed the table."""
    properties = table.metadata().configuration.items()
    return identity.other_lives(
        name.removeprefix(_PREFIX) for name, value in properties if value == _CLAIMED and name.startswith(_PREFIX)
    )


class Claims:
    """The claims on one table, seen by one life."""

    def __init__(
        self,
        log: DeltaLog,
        newest: NewestTable,
        identity: SinkIdentity,
        where: str,
        committers: Committers,
    ) -> None:
        self._log = log
        self._newest = newest
        self._identity = identity
        self._where = where
        self._committers = committers

    def put(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Claim the table for this life; where lives that are not `accepted` have claimed it, they are returned instead.

        Raises:
            StoreUnavailable: the table cannot be changed, or other writers keep changing its properties.
        """
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if is_claimed_by(table, self._identity):
                power_loss.sync_version(self._log, table.version())
                return ()
            strangers = tuple(life for life in other_claims(table, self._identity) if life not in accepted)
            if strangers:
                return strangers
            self._write(table, _CLAIMED)
        raise self._contended()

    def release(self) -> bool:
        """Take this life's claim back; whether there was one. Raises as `put`."""
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if not is_claimed_by(table, self._identity):
                return False
            if self._write(table, _RELEASED):
                return True
        raise self._contended()

    def _write(self, table: DeltaTable, value: str) -> bool:
        """Whether it was written, in a version of its own; False: another writer's change came first."""
        seen = table.version()  # before anything else loads the newest version, which brings `table` up to date
        try:
            with self._committers.alone(self._committers.of(self._newest.head())):
                if self._newest.load().version() != seen:
                    return False
                self.set_property(table, _name(self._identity), value)
        except FileExistsError:
            return False
        except (DeltaError, OSError, ValueError) as error:
            raise StoreUnavailable(f"{self._where}: the table cannot be claimed: {shown(error)}") from error
        return True

    def set_property(self, table: DeltaTable, name: str, value: str) -> None:
        """Set a property of the table, in the version behind the one that is loaded; the caller keeps others of us out.

        Raises:
            FileExistsError: another writer's version came first.
            OSError, ValueError: the table cannot be changed.
        """
        by = self._committers.of(self._newest.head())
        try:
            if by is Committer.SPARK:
                self._committers.spark.set_property(name, value)
            else:
                power_loss.sync_tail(self._log, table.version())
                entry = self._entry(table, {name: value})
                self._log.files.put_new(self._log.entry_path(table.version() + 1), entry)
        finally:
            self._newest.forget()
        power_loss.sync_version(self._log, self._newest.load().version())

    def _entry(self, table: DeltaTable, parameters: Mapping[str, str]) -> bytes:
        """The log entry that sets our property, and changes nothing else.

        Not by delta-rs: with a property it adds features to the table's protocol, which older readers then refuse.
        """
        metadata = table.metadata()
        told: dict[str, object] = {
            "id": str(metadata.id),
            "name": metadata.name,
            "description": metadata.description,
            "format": self._log.file_format(table.version()),
            "schemaString": table.schema().to_json(),
            "partitionColumns": metadata.partition_columns,
            "configuration": {**metadata.configuration, **parameters},
            "createdTime": metadata.created_time,
        }
        told = {name: part for name, part in told.items() if part is not None}
        return entry_of("SET TBLPROPERTIES", {"properties": json.dumps(parameters)}, [{"metaData": told}], {})

    def _contended(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where}: other writers keep changing the table's properties; try again")


def _name(identity: SinkIdentity) -> str:
    return _PREFIX + identity.application_id
