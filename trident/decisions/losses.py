"""What a source's server removed, or may have, is accepted: a person has looked into it, and `audit verify` goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stormproof.core.errors import Json, UsageError
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.ledger import events
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS
from stormproof.trident.transaction_states import OperatorAction

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores


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


def look(stores: Stores, topology: str) -> Look:
    """What would be accepted: what is on record now, and nothing that comes later."""
    found = open_losses(stores, topology)
    return Look(
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
        events.decided(tx, OperatorAction.ACCEPT_LOSS, by=by, why=why, about="at the source", detail=detail)
    return Losses(topology, found.records, fingerprint, True, by, why)


def _fingerprint(records: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(records).encode()).hexdigest()[:SHOWN_CHARACTERS]
