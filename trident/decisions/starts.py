"""Decisions that let a refused start go on: another incarnation's rows are adopted, a changed graph is accepted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.trident.ledger import graphs, other_lives
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS

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
    """The topology may start with the graph of this fingerprint."""

    topology: str
    incarnation: str
    accepted: str
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology} may start with the graph {self.accepted}; what its tables hold stays as it is"]


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


def adopt_incarnation(stores: Stores, topology: str, incarnation: str, *, by: str, why: str) -> Adopted:
    """Let a topology write to a table in which another incarnation left rows.

    Raises:
        UsageError: as `require_other_incarnation`.
    """
    row = require_other_incarnation(stores, topology, incarnation)
    with stores.transaction(row) as tx:
        other_lives.adopt(tx, incarnation, by=by, why=why)
    return Adopted(topology, row.incarnation, incarnation, by)


def require_fingerprint(topology: str, fingerprint: str) -> None:
    """Raise UsageError unless the text has the form of a graph's fingerprint."""
    if len(fingerprint) != SHOWN_CHARACTERS or not set(fingerprint) <= set("0123456789abcdef"):
        raise UsageError(
            f"{fingerprint!r} is no fingerprint of a graph; the refused start of {topology!r} names it",
            fingerprint=fingerprint,
        )


def accept_change(stores: Stores, topology: str, fingerprint: str, *, by: str, why: str) -> ChangeAccepted:
    """Let a topology go on with a changed graph; the refused start named the graph's fingerprint.

    Raises:
        UsageError: there is no such topology, or the text is no fingerprint.
    """
    require_fingerprint(topology, fingerprint)
    row = stores.topology(topology)
    with stores.transaction(row) as tx:
        graphs.accept(tx, fingerprint, by=by, why=why)
    return ChangeAccepted(topology, row.incarnation, fingerprint, by, why)
