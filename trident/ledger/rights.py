"""The rights in the ledger that every run needs: asked for before a start, and not in the middle of the first batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from stormproof.core.errors import Json, MissingRight
from stormproof.core.postgres.rights import quoted
from stormproof.trident.ledger import tables as t

_NEEDED: Final[tuple[tuple[sa.Table, tuple[str, ...]], ...]] = (
    (t.topology, ("INSERT", "UPDATE")),
    (t.topology_sink, ("INSERT",)),
    (t.txn, ("INSERT", "UPDATE")),
    (t.attempt, ("INSERT", "UPDATE")),
    (t.txn_sink, ("INSERT", "UPDATE")),
    (t.txn_component, ("INSERT",)),
    (t.txn_edge, ("INSERT",)),
    (t.event, ("INSERT",)),
    (t.reject, ("INSERT",)),
)
"""Without these no batch gets through. A table that is added is not granted by itself: see `grants`."""

_LACKING: Final = sa.text(
    "select current_user::text as role, r.name, r.privilege"
    " from unnest(cast(:names as text[]), cast(:privileges as text[])) with ordinality as r (name, privilege, place)"
    " where not has_table_privilege(r.name, r.privilege) order by r.place"
)


@dataclass(frozen=True, slots=True)
class LackingRights:
    """What a role lacks in the ledger: (table, right), in order."""

    role: str
    found: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lacks = ", ".join(f"{right} on {table}" for table, right in self.found)
        return f"it lacks {lacks}. As their owner run: {self.grants}"

    @property
    def grants(self) -> str:
        """The statements that the tables' owner runs."""
        by_right: dict[str, list[str]] = {}
        for table, right in self.found:
            by_right.setdefault(right, []).append(table)
        return " ".join(
            f"GRANT {right} ON TABLE {', '.join(tables)} TO {quoted(self.role)};" for right, tables in by_right.items()
        )


def lacking_rights(connection: sa.Connection, more: Iterable[tuple[sa.Table, str]] = ()) -> LackingRights | None:
    """What the connection's role lacks to run a topology, and `more`; None where it lacks nothing."""
    if connection.dialect.name != "postgresql":
        return None
    needed = [*((table, right) for table, rights in _NEEDED for right in rights), *more]
    asked = {"names": [f"{t.SCHEMA}.{table.name}" for table, _ in needed], "privileges": [right for _, right in needed]}
    rows = connection.execute(_LACKING, asked).all()
    return LackingRights(str(rows[0].role), tuple((row.name, row.privilege) for row in rows)) if rows else None


def require_rights(connection: sa.Connection, topology: str) -> None:
    """Raise MissingRight where this role could start the topology, and then not record its first batch."""
    lacking = lacking_rights(connection)
    if lacking is None:
        return
    grants: list[Json] = [f"{right} on table {table}" for table, right in lacking.found]
    raise MissingRight(
        f"topology {topology!r} was not started: role {quoted(lacking.role)} cannot write to the ledger: {lacking} "
        "(stormproof ledger sql --grants ROLE prints all that a role needs)",
        role=lacking.role,
        rights=grants,
        grant=lacking.grants,
    )
