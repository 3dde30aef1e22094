"""`ledger skip`, also with `--rows`: what was given up."""

from __future__ import annotations

from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions import skips


def skip_sink(topology: str, txid: int, sink: str, *, messages: bool, by: str, why: str, as_json: bool) -> None:
    """Give up a batch's rows at one sink."""
    with opened() as stores:
        report = skips.skip_sink(stores, topology, txid, sink, messages=messages, by=by, why=why)
    emit(report, as_json=as_json, text=lambda: say("\n".join(report.lines())))


def skip_rows(topology: str, txid: int, sink: str, *, by: str, why: str, as_json: bool) -> None:
    """Commit a batch to one sink without the rows that its table refuses."""
    with opened() as stores:
        report = skips.skip_rows(stores, topology, txid, sink, by=by, why=why)
    emit(report, as_json=as_json, text=lambda: say("\n".join(report.lines())))
