"""Decisions by which a refused start goes on: another incarnation's rows are adopted, a changed graph is accepted.

So is what a source's server removed, or may have: a person has looked into it, and `audit verify` goes on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stormproof.core.base.errors import Json, UsageError
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import DecisionPreview
from stormproof.trident.ledger import graphs, other_lives
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS
from stormproof.trident.terms.transaction_states import OperatorAction

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow


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


def look_at_incarnation(stores: Stores, topology: str, incarnation: str) -> DecisionPreview:
    """Whose rows are adopted by whom."""
    row = require_other_incarnation(stores, topology, incarnation)
    return DecisionPreview({"its own incarnation": row.incarnation, "adopts": incarnation})


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


def look_at_change(stores: Stores, topology: str, fingerprint: str) -> DecisionPreview:
    """Which change is accepted, and why a start was refused with it."""
    row = stores.topology(topology)
    refused = refused_change(stores, row, fingerprint)
    return DecisionPreview({"incarnation": row.incarnation, "fingerprint": fingerprint, "refused": refused})


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


@dataclass(frozen=True, slots=True)
class Losses:
    """What is on record of a topology's sources, and whether it was accepted.

    `fingerprint` names exactly these records. It is empty where there are none.
    """

    topology: str
    records: tuple[str, ...]
    fingerprint: str
    accepted: bool = False
    by: str = ""
    why: str = ""

    def lines(self) -> list[str]:
        """What there is, or what was done, for people."""
        if not self.records:
            return [f"{self.topology}: nothing is on record that was not accepted"]
        if self.accepted:
            next_step = f"the next `stormproof audit verify {self.topology}` has it as a note"
            return [*self.records, f"{self.topology}: accepted, on record; {next_step}"]
        return [
            *self.records,
            f"to accept exactly this: stormproof ledger accept-loss {self.topology} {self.fingerprint}",
        ]


def open_losses(stores: Stores, topology: str) -> Losses:
    """What was removed, or may have been, and nobody accepted.

    Raises:
        UsageError: there is no such topology.
    """
    from stormproof.trident.audit import source

    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        records = sorted(source.open_losses(snapshot, row, source.stored_source(snapshot, row)))
    return Losses(topology, tuple(records), _fingerprint(records) if records else "")


def look_at_losses(stores: Stores, topology: str) -> DecisionPreview:
    """What would be accepted: what is on record now, and nothing that comes later."""
    found = open_losses(stores, topology)
    return DecisionPreview(
        {"fingerprint": found.fingerprint},
        len(found.records),
        "record",
        {"fingerprint": found.fingerprint},
        found.records,
        nothing=None if found.records else found.lines()[0],
    )


def accept_loss(stores: Stores, topology: str, fingerprint: str | None, *, by: str, why: str) -> Losses:
    """Accept exactly the records that the fingerprint names. What is noted later is none of them. None: only show them.

    Raises:
        UsageError: there is no such topology, or other records are there now.
    """
    found = open_losses(stores, topology)
    if fingerprint is None:
        return found
    if not found.records or found.fingerprint != fingerprint:
        raise UsageError(
            f"{fingerprint!r} does not name what is on record of {topology!r} now; stormproof ledger accept-loss {topology} "
            "shows it",
            fingerprint=fingerprint,
        )
    with stores.transaction(stores.topology(topology)) as tx:
        records: list[Json] = [*found.records]
        detail = {"records": records}
        tx.decided(OperatorAction.ACCEPT_LOSS, by=by, why=why, about="at the source", detail=detail)
    return Losses(topology, found.records, fingerprint, True, by, why)


def _fingerprint(records: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(records).encode()).hexdigest()[:SHOWN_CHARACTERS]
