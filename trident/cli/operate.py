"""What an operator decided, printed: `retry`, `ledger adopt|accept-change|accept-loss`, `forget`, `queue unsubscribe`."""

from __future__ import annotations

from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions import blocked, losses, starts
from stormproof.trident.decisions import forget as forgetting


def retry_txid(topology: str, txid: int, *, by: str, why: str, as_json: bool) -> None:
    """Make a blocked batch prepared again: the topology's next start tries to commit it."""
    with opened() as stores:
        done = blocked.retry_txid(stores, topology, txid, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def adopt_incarnation(topology: str, incarnation: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology write to a table in which another incarnation left rows."""
    with opened() as stores:
        done = starts.adopt_incarnation(stores, topology, incarnation, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def accept_change(topology: str, fingerprint: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology go on with a changed graph; the refused start named the graph's fingerprint."""
    with opened() as stores:
        done = starts.accept_change(stores, topology, fingerprint, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def accept_loss(topology: str, fingerprint: str | None, *, by: str, why: str, as_json: bool) -> None:
    """Accept what a source's server lost; without the fingerprint of that, show it."""
    with opened() as stores:
        if fingerprint is None:
            done = losses.open_losses(stores, topology)
        else:
            done = losses.accept_loss(stores, topology, fingerprint, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def forget(topology: str, *, dry_run: bool, by: str, why: str, as_json: bool) -> None:
    """Have the ledger forget a topology."""
    with opened() as stores:
        done = forgetting.forget(stores, topology, by=by, why=why, dry_run=dry_run)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def unsubscribe(queue: str, reader: str, *, dry_run: bool, by: str, why: str, as_json: bool) -> None:
    """Have a queue forget a reader."""
    with opened() as stores:
        done = forgetting.unsubscribe(stores, queue, reader, by=by, why=why, dry_run=dry_run)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))
