"""The error for a blocked batch: which sink refused it, why, and each way on as the exact command."""

from __future__ import annotations

from collections.abc import Mapping

from stormproof.core.errors import Json, SinkRefused
from stormproof.sinks.abilities import SupportsSkipRows


def blocked(
    topology: str,
    txid: int,
    reason: str | None,
    sink: str | None,
    session: object,
    details: Mapping[str, Json] | None = None,
) -> SinkRefused:
    """The error for a batch that `sink` refused, whose session is `session`. Without a known sink nothing can be skipped."""
    text = (
        f"txid {txid} of topology {topology!r} is blocked: {reason}. Repair the cause, then: stormproof retry "
        f"{topology} {txid}"
    )
    if sink is not None:
        text += f"; or give up its rows at that sink, on record: stormproof ledger skip {topology} {txid} {sink}"
    if isinstance(session, SupportsSkipRows):
        text += " (with --rows: only those that its table refuses)"
    return SinkRefused(text, **{**(details or {}), "txid": txid, "sink": sink})
