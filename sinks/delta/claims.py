"""Who has claimed a Delta table, also before anything was committed to it: a property of the table for each life.

A property stays whatever becomes of the log, and a change of properties conflicts with every other one: of two that claim
a table at the same instant, one is told to look again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deltalake import CommitProperties, DeltaTable

from stormproof.sinks.protocol import SinkIdentity

CLAIMED: Final = "claimed"
RELEASED: Final = "released"
"""Values of the property that is named after the transaction identifier's application; delta-rs cannot remove one."""

_PREFIX: Final = "stormproof.claim."


def properties_of(identity: SinkIdentity) -> Mapping[str, str]:
    """What a table that is made for this life is made with."""
    return {_name(identity): CLAIMED}


def is_claimed(table: DeltaTable, identity: SinkIdentity) -> bool:
    """Whether it has this life's claim."""
    return table.metadata().configuration.get(_name(identity)) == CLAIMED


def lives(table: DeltaTable, identity: SinkIdentity) -> tuple[str, ...]:
    """The other lives that have claimed it, named as `SinkIdentity.other_life` does."""
    claims = table.metadata().configuration
    found = {
        identity.other_life(name.removeprefix(_PREFIX))
        for name, value in claims.items()
        if value == CLAIMED and name.startswith(_PREFIX)
    }
    return tuple(sorted(life for life in found if life is not None))


def put(table: DeltaTable, identity: SinkIdentity, value: str) -> None:
    """Write the claim, or take it back, in a version of its own.

    Raises:
        CommitFailedError: another writer changed the table's properties since it was loaded.
    """
    table.alter.set_table_properties(
        {_name(identity): value},
        raise_if_not_exists=False,
        commit_properties=CommitProperties(max_commit_retries=0),
    )


def _name(identity: SinkIdentity) -> str:
    return _PREFIX + identity.application_id
