"""`ledger prune`."""

from __future__ import annotations

from collections.abc import Sequence

from stormproof.core.clock import SystemClock
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.prune import PruneReport, prune
from stormproof.trident.wording import counted, parse_age


def prune_ledger(topology: str | None, *, older_than: str, dry_run: bool, by: str, as_json: bool) -> None:
    """Prune one topology, or all."""
    age = parse_age(older_than)
    with opened() as stores:
        now = SystemClock().now()
        with stores.audit.snapshot() as snapshot:
            names = [row.name for row in snapshot.topologies()] if topology is None else [topology]
        reports = [
            prune(stores.ledger, stores.audit, name, ended_before=now - age, now=now, by=by, dry_run=dry_run)
            for name in names
        ]
    emit({"topologies": reports}, as_json=as_json, text=lambda: _text(reports))


def _text(reports: Sequence[PruneReport]) -> None:
    if not reports:
        say("no topology was run here yet")
    for report in reports:
        rows = ", ".join(f"{counted(count, 'row')} of {table}" for table, count in report.removed.items() if count)
        done, verb = ("would be pruned", "would remove") if report.dry_run else ("pruned", "removed")
        kept = f"; kept some of {counted(report.kept_txids, 'txid')}: still needed" if report.kept_txids else ""
        say(
            f"{report.topology}: {done} up to txid {report.upto} (before: {report.before}); {verb} {rows or 'nothing'}{kept}"
        )
