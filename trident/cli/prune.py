"""`ledger prune`."""

from __future__ import annotations

from collections.abc import Sequence

from stormproof.core.clock import SystemClock
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.prune import PruneReport, prune
from stormproof.trident.wording import parse_age


def prune_ledger(topology: str | None, *, older_than: str, dry_run: bool, by: str, why: str, as_json: bool) -> None:
    """Prune one topology, or all."""
    age = parse_age(older_than)
    with opened() as stores:
        now = SystemClock().now()
        with stores.audit.snapshot() as snapshot:
            names = [row.name for row in snapshot.topologies()] if topology is None else [topology]
        reports = [
            prune(stores.ledger, stores.audit, name, ended_before=now - age, now=now, by=by, why=why, dry_run=dry_run)
            for name in names
        ]
    emit({"topologies": reports}, as_json=as_json, text=lambda: _text(reports))


def _text(reports: Sequence[PruneReport]) -> None:
    if not reports:
        say("no topology was run here yet")
    for report in reports:
        say("\n".join(report.lines()))
