"""One failed message's dead letters and rejects, with payloads: for a person who may see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.core.pending.registry import connector_of
from stormproof.core.source.files.rows import shown_payload
from stormproof.core.source.spouts import member_subscription, unshown
from stormproof.core.source.stored import payload_in
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.source import recorded_ids

PAYLOAD_MAX: Final = 65_536
"""Bytes of a payload that are read to be shown."""


@dataclass(frozen=True, slots=True)
class ShownPayload:
    """A payload's beginning as text, and its length in bytes."""

    text: str
    bytes: int


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """A dead letter, or a reject, whole."""

    what: str
    """``dead_letter`` or ``reject``."""
    message: str
    source: str | None
    sink: str | None
    txid: int | None
    at: datetime
    reason: str
    error: str
    state: str
    payload: ShownPayload | None
    new_payload: ShownPayload | None
    row: str | None
    """Of a reject, the refused row."""
    history: tuple[Mapping[str, Json], ...]
    decided_by: str | None
    decided_why: str | None
    decided_at: datetime | None


_LETTERS: Final = sa.text(
    """
    select s.source, s.dead_at, s.reason, s.error, s.disposal, s.history, s.disposed_by, s.disposed_why, s.disposed_at,
      substring(s.payload for :most) as payload, length(s.payload) as bytes,
      substring(s.new_payload for :most) as new_payload, length(s.new_payload) as new_bytes
    from stormproof.dead_letter s
    where s.kind = :kind and s.source = :source and s.subscription = :subscription and s.id = :id and s.origin = :origin
    order by s.dead_at desc
    """
)
_REJECTS: Final = sa.text(
    """
    select r.sink, r.txid, r.at, coalesce(r.sqlstate, 'refused') as reason, r.error, r.state, r.row, r.decided_by,
      r.decided_why, r.decided_at, substring(r.payload for :most) as payload, length(r.payload) as bytes
    from stormproof.reject r where r.incarnation = :incarnation and r.message = :message order by r.id desc
    """
)
_SUBSCRIPTIONS: Final = sa.text(
    "select kind, source, subscription from stormproof.pending_subscription"
    " where subscription = any(:names) order by subscription, kind, source"
)


def failed_message(ledger: AuditLedger, topology: str, message: str) -> tuple[FailedMessage, ...]:
    """The dead letters and the rejects of a message, the newest first, with what they hold of its payload.

    Raises:
        UsageError: no such topology, or the message is neither.
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        (message,) = recorded_ids(snapshot, row, [message])
        found = [*_letters(snapshot, row, message), *_rejects(snapshot, row, message)]
    if not found:
        raise UsageError(
            f"message {message} of topology {topology!r} is no dead letter, and no sink rejected it", message=message
        )
    return tuple(found)


def _letters(snapshot: LedgerSnapshot, row: TopologyRow, message: str) -> list[FailedMessage]:
    member = unshown(message)
    names = [row.incarnation, row.name] if member is None else [member_subscription(row.incarnation, member[0])]
    inner = message if member is None else member[1]
    found: list[FailedMessage] = []
    for who in snapshot.connection.execute(_SUBSCRIPTIONS, {"names": names}):
        number = connector_of(who.kind).number_of(inner)
        if number is None:
            continue
        asked = {"kind": who.kind, "source": who.source, "subscription": who.subscription, "most": PAYLOAD_MAX}
        letters = snapshot.connection.execute(_LETTERS, {**asked, "id": number[0], "origin": number[1]})
        found += [_letter(message, one) for one in letters]
    return found


def _letter(message: str, one: Any) -> FailedMessage:
    return FailedMessage(
        what="dead_letter",
        message=message,
        source=one.source,
        sink=None,
        txid=None,
        at=one.dead_at,
        reason=one.reason,
        error=one.error,
        state=one.disposal or "undecided",
        payload=_shown(one.payload, one.bytes),
        new_payload=_shown(one.new_payload, one.new_bytes),
        row=None,
        history=tuple(one.history or ()),
        decided_by=one.disposed_by,
        decided_why=one.disposed_why,
        decided_at=one.disposed_at,
    )


def _rejects(snapshot: LedgerSnapshot, row: TopologyRow, message: str) -> list[FailedMessage]:
    asked = {"incarnation": row.incarnation, "message": message, "most": PAYLOAD_MAX}
    return [
        FailedMessage(
            what="reject",
            message=message,
            source=None,
            sink=one.sink,
            txid=one.txid,
            at=one.at,
            reason=one.reason,
            error=one.error,
            state=one.state,
            payload=_shown(one.payload, one.bytes),
            new_payload=None,
            row=one.row,
            history=(),
            decided_by=one.decided_by,
            decided_why=one.decided_why,
            decided_at=one.decided_at,
        )
        for one in snapshot.connection.execute(_REJECTS, asked)
    ]


def _shown(payload: Any, length: int | None) -> ShownPayload | None:
    if payload is None:
        return None
    stored = bytes(payload)
    before = len(stored) - len(payload_in(stored))  # what the server said of it
    return ShownPayload(shown_payload(stored), int(length or 0) - before)
