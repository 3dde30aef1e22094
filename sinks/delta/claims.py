"""Who has claimed a Delta table, also before anything is committed to it: one property of the table for each life.

A property outlives the log's retention, and a change of properties conflicts with every other one: where two lives claim a
table at the same instant, one of them has to look again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from stormproof.core.errors import StoreUnavailable
from stormproof.sinks.delta import durable
from stormproof.sinks.delta.failures import panics_as_errors, shown
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.newest import NewestTable
from stormproof.sinks.protocol import SinkIdentity

CLAIM_TRIES_MAX: Final = 20
"""How often we look again because another writer changed the table's properties between our look and our change."""

_PREFIX: Final = "stormproof.claim."
_CLAIMED: Final = "claimed"
_RELEASED: Final = "released"
"""The two values of a life's property. A released one stays, since delta-rs cannot remove a property."""


def properties_of(identity: SinkIdentity) -> Mapping[str, str]:
    """The properties with which a table is made for this life."""
    return {_name(identity): _CLAIMED}


class Claims:
    """The claims on one table, seen by one life."""

    def __init__(self, log: DeltaLog, newest: NewestTable, identity: SinkIdentity, where: str) -> None:
        self._log = log
        self._newest = newest
        self._identity = identity
        self._where = where

    def put(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Claim the table for this life; where lives that are not `accepted` have claimed it, they are returned instead.

        Raises:
            StoreUnavailable: the table cannot be changed, or other writers keep changing its properties.
        """
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if self._is_put(table):
                durable.sync_version(self._log, table.version())
                return ()
            strangers = tuple(life for life in self._other_lives(table) if life not in accepted)
            if strangers:
                return strangers
            self._write(table, _CLAIMED)
        raise self._contended()

    def release(self) -> bool:
        """Take this life's claim back; whether there was one. Raises as `put`."""
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if not self._is_put(table):
                return False
            if self._write(table, _RELEASED):
                return True
        raise self._contended()

    def _is_put(self, table: DeltaTable) -> bool:
        return table.metadata().configuration.get(_name(self._identity)) == _CLAIMED

    def _other_lives(self, table: DeltaTable) -> list[str]:
        found = {
            self._identity.other_life(name.removeprefix(_PREFIX))
            for name, value in table.metadata().configuration.items()
            if value == _CLAIMED and name.startswith(_PREFIX)
        }
        return sorted(life for life in found if life is not None)

    def _write(self, table: DeltaTable, value: str) -> bool:
        """Whether it was written, in a version of its own; False: another writer's change came first."""
        try:
            with panics_as_errors():
                table.alter.set_table_properties(
                    {_name(self._identity): value},
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
        except CommitFailedError:
            return False
        except (DeltaError, OSError) as error:
            raise StoreUnavailable(f"{self._where}: the table cannot be claimed: {shown(error)}") from error
        finally:
            self._newest.forget()
        durable.sync_version(self._log, self._newest.load().version())
        return True

    def _contended(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where}: other writers keep changing the table's properties; try again")


def _name(identity: SinkIdentity) -> str:
    return _PREFIX + identity.application_id
