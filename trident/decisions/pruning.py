"""The ledger is pruned: one topology of it, or all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from stormproof.core.clock import SystemClock
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.prune import PruneReport, prune
from stormproof.trident.stores import Stores
from stormproof.trident.wording import parse_age


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed of each topology, or with a dry run would be."""

    topologies: tuple[PruneReport, ...]

    def lines(self) -> list[str]:
        """What was or would be removed, for people."""
        return [line for one in self.topologies for line in one.lines()] or ["no topology was run here yet"]


def look(stores: Stores, topology: str, older_than: str) -> Look:
    """What is old enough now."""
    now = SystemClock().now()
    (report,) = prune_ledger(stores, topology, older_than, dry_run=True, by="", why="", now=now).topologies
    rows = sum(report.removed.values())
    return Look(
        {},
        rows,
        "row",
        {"now": now},
        (f"batches that ended more than {older_than} ago", *report.lines()),
        nothing=None if rows else "Nothing is old enough to be pruned.",
    )


def prune_ledger(
    stores: Stores,
    topology: str | None,
    older_than: str,
    *,
    dry_run: bool = False,
    by: str,
    why: str,
    now: datetime | None = None,
) -> Pruned:
    """Prune one topology, or all, of batches that ended more than an age before `now`.

    Raises:
        UsageError: that is no age, or there is no such topology.
    """
    now = now or SystemClock().now()
    before = now - parse_age(older_than)
    with stores.audit.snapshot() as snapshot:
        names = [row.name for row in snapshot.topologies()] if topology is None else [topology]
    return Pruned(
        tuple(
            prune(stores.ledger, stores.audit, name, ended_before=before, now=now, by=by, why=why, dry_run=dry_run)
            for name in names
        )
    )
