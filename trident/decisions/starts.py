"""Decisions that let a refused start go on: another incarnation's rows are adopted, a changed graph is accepted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.ledger import graphs, other_lives

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow
    from stormproof.trident.stores import Stores

_OTHER_LIFE: Final = re.compile(r"[^/\s]+/[A-Za-z0-9_.-]+|[0-9a-f]+(-[0-9a-f]+)*")
"""How a refused start names another incarnation; that of a streaming query contains the query's id."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The topology may write beside the rows of the adopted incarnation."""

    topology: str
    incarnation: str
    adopted: str
    by: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology} may write beside the rows of incarnation {self.adopted}, which stay as they are"]


@dataclass(frozen=True, slots=True)
class ChangeAccepted:
    """The topology may start with the change of this fingerprint; `refused` is what a start said of it."""

    topology: str
    incarnation: str
    accepted: str
    refused: str
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology} may start with the change {self.accepted}; what its tables hold stays as it is"]


def require_other_incarnation(stores: Stores, topology: str, incarnation: str) -> TopologyRow:
    """The topology, where the text names an incarnation that is not its own.

    Raises:
        UsageError: there is no such topology, or the text names none, or the topology's own.
    """
    row = stores.topology(topology)
    if not _OTHER_LIFE.fullmatch(incarnation) or incarnation == row.incarnation:
        raise UsageError(
            f"{incarnation!r} names no incarnation other than that of {topology} ({row.incarnation}): give INCARNATION "
            "or NAME/INCARNATION, as the refused start names it",
            incarnation=incarnation,
        )
    return row


def look_at_incarnation(stores: Stores, topology: str, incarnation: str) -> Look:
    """Whose rows are adopted by whom."""
    row = require_other_incarnation(stores, topology, incarnation)
    return Look({"its own incarnation": row.incarnation, "adopts": incarnation})


def adopt_incarnation(stores: Stores, topology: str, incarnation: str, *, by: str, why: str) -> Adopted:
    """Let a topology write to a table in which another incarnation left rows.

    Raises:
        UsageError: as `require_other_incarnation`.
    """
    row = require_other_incarnation(stores, topology, incarnation)
    with stores.transaction(row) as tx:
        other_lives.adopt(tx, incarnation, by=by, why=why)
    return Adopted(topology, row.incarnation, incarnation, by)


def refused_change(stores: Stores, row: TopologyRow, fingerprint: str) -> str:
    """What a refused start of the topology said of the change with this fingerprint.

    Raises:
        UsageError: no start was refused with it.
    """
    with stores.transaction(row) as tx:
        refused = graphs.refusal_of(tx.connection, row.incarnation, fingerprint)
    if refused is None:
        raise UsageError(
            f"{fingerprint!r} is the fingerprint of no change for which a start of {row.name!r} was refused; after a dry "
            f"run: stormproof run FILE.py:NAME --accept-change {fingerprint}",
            fingerprint=fingerprint,
        )
    return refused


def look_at_change(stores: Stores, topology: str, fingerprint: str) -> Look:
    """Which change is accepted, and why a start was refused with it."""
    row = stores.topology(topology)
    refused = refused_change(stores, row, fingerprint)
    return Look({"incarnation": row.incarnation, "fingerprint": fingerprint, "refused": refused})


def accept_change(stores: Stores, topology: str, fingerprint: str, *, by: str, why: str) -> ChangeAccepted:
    """Let a topology go on with a changed graph; the refused start named the change's fingerprint.

    Raises:
        UsageError: there is no such topology, or as `refused_change`.
    """
    row = stores.topology(topology)
    refused = refused_change(stores, row, fingerprint)
    with stores.transaction(row) as tx:
        graphs.accept(tx, fingerprint, by=by, why=why)
    return ChangeAccepted(topology, row.incarnation, fingerprint, refused, by, why)
