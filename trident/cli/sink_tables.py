"""`ledger adopt-table`, `ledger release-table`: which table is a sink's own."""

from __future__ import annotations

from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions import adopt_table as adoption
from stormproof.trident.decisions import release_table as release


def adopt_table(topology: str, sink: str, *, accept_loss: bool, by: str, why: str, as_json: bool) -> None:
    """Make the table that has the sink's name now the sink's own."""
    with opened() as stores:
        done = adoption.adopt_table(stores, topology, sink, accept_loss=accept_loss, by=by, why=why)
    report = {
        "topology": topology,
        "sink": sink,
        "was": done.was,
        "is": done.is_,
        "lost": done.lost,
        "by": by,
        "why": why,
    }
    emit(report, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def release_table(topology: str, sink: str, *, by: str, why: str, as_json: bool) -> None:
    """Remove the topology's claim from the table, and the table from the ledger."""
    with opened() as stores:
        done = release.release_table(stores, topology, sink, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))
