"""`stormproof audit components`, as tables or JSON."""

from __future__ import annotations

from stormproof.core.clock import SystemClock
from stormproof.trident.audit.components import ComponentsReport, components
from stormproof.trident.cli.output import emit, say, table
from stormproof.trident.cli.stores import opened
from stormproof.trident.wording import counted, parse_time


def show_components(topology: str, *, since: str | None, as_json: bool) -> None:
    """Show what each component did, and how many tuples went over each edge."""
    with opened() as stores:
        report = components(stores.audit, topology, parse_time(since, SystemClock().now()))
    emit(report, as_json=as_json, text=lambda: _text(report))


def _text(report: ComponentsReport) -> None:
    if report.components:
        table(
            ["component", "kind", "executed", "emitted", "acked", "failed", "busy ms", "ms a tuple"],
            [
                (
                    *(one.component, one.kind, one.executed, one.emitted, one.acked, one.failed),
                    *(f"{one.busy_ms:.0f}", None if one.latency_ms is None else f"{one.latency_ms:.3g}"),
                )
                for one in report.components
            ],
        )
        table(
            ["from", "stream", "to", "tuples", "a second"],
            [
                (
                    one.origin,
                    one.stream,
                    one.target,
                    one.tuples,
                    None if one.tuples_per_s is None else f"{one.tuples_per_s:.3g}",
                )
                for one in report.edges
            ],
        )
    where = "" if report.first_txid is None else f", txids {report.first_txid} to {report.last_txid}"
    views = "stormproof.audit_components and stormproof.audit_edges"
    say(f"{counted(report.batches, 'batch', 'batches')}{where}; batch by batch in SQL: {views}")
