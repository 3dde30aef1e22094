"""Batches, the newest first: filters and pages. One row a batch, without what its sinks hold; that is `txn`'s."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import UsageError
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.transaction_states import TxnCause, TxnState

PAGE: Final = 50


@dataclass(frozen=True, slots=True)
class BatchFilter:
    """Which batches; None: all. Times are of the open: from `since` on and before `until`."""

    topology: str | None = None
    state: str | None = None
    cause: str | None = None
    kind: str | None = None
    """``new``, ``retry`` (of messages that failed before), ``failed`` (messages failed in it), ``again`` (its job was begun
    more than once), ``rejected`` (a sink rejected messages of it)."""
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch. `steps_ms` is None where it did not get as far as a commit."""

    topology: str
    txid: int
    state: str
    cause: str | None
    attempts: int
    messages: int
    failed: int
    rejected: int
    retry: bool
    tuples: int
    bytes: int
    opened_at: datetime
    ended_at: datetime | None
    steps_ms: dict[str, float] | None

    @property
    def took_s(self) -> float | None:
        """Seconds from open to end; None: it has not ended."""
        return None if self.ended_at is None else (self.ended_at - self.opened_at).total_seconds()


@dataclass(frozen=True, slots=True)
class BatchPage:
    """Some batches. `older` is the place from which the next page goes on; None: there are no more."""

    rows: tuple[BatchRow, ...]
    older: str | None


_KINDS: Final = {
    "new": "not x.retry",
    "retry": "x.retry",
    "failed": "x.failed > 0",
    "again": "x.attempt > 1",
    "rejected": "x.rejected > 0",
}


def batches(ledger: AuditLedger, chosen: BatchFilter, *, after: str | None = None, number: int = PAGE) -> BatchPage:
    """A page of batches, the newest first; `after` is the page before's `older`.

    Raises:
        UsageError: no such topology, a state, cause, kind or place that is none.
        StoreUnavailable: the database does not answer.
    """
    where, values = _conditions(chosen)
    inner = "true"
    if after is not None:
        values["at"], values["txid"], values["of"] = _place(after)
        where.append("(x.opened_at, x.txid, t.name) < (:at, :txid, :of)")
        inner = "x.opened_at <= :at"
    query = f"""
        select t.name as topology, b.* from stormproof.topology t
        cross join lateral (
          select x.txid, x.state, x.cause, x.attempt as attempts, x.messages, x.failed, x.rejected, x.retry, x.tuples,
            x.bytes, x.opened_at, x.ended_at, x.steps_ms
          from stormproof.txn x where x.incarnation = t.incarnation and {" and ".join([inner, *where])}
          order by x.txid desc limit :rows
        ) b
        {"where t.name = :topology" if chosen.topology is not None else ""}
        order by b.opened_at desc, b.txid desc, t.name desc limit :rows
    """
    with ledger.snapshot() as snapshot:
        if chosen.topology is not None:
            snapshot.topology(chosen.topology)
        found = snapshot.connection.execute(sa.text(query), {**values, "rows": number + 1}).mappings()
        rows = tuple(BatchRow(**row) for row in found)
    shown = rows[:number]
    more = f"{shown[-1].opened_at.isoformat()}~{shown[-1].txid}~{shown[-1].topology}" if len(rows) > number else None
    return BatchPage(shown, more)


def _conditions(chosen: BatchFilter) -> tuple[list[str], dict[str, Any]]:
    where, values = list[str](), dict[str, Any]()
    for name, known in (("state", TxnState), ("cause", TxnCause)):
        value = getattr(chosen, name)
        if value is not None:
            if value not in set(known):
                raise UsageError(f"{value!r} is no {name} of a batch; known: {', '.join(known)}", filter=name)
            where.append(f"x.{name} = :{name}")
            values[name] = value
    if chosen.kind is not None:
        if chosen.kind not in _KINDS:
            raise UsageError(f"{chosen.kind!r} is no kind of batches; known: {', '.join(_KINDS)}", filter="kind")
        where.append(_KINDS[chosen.kind])
    for name, compared in (("since", ">="), ("until", "<")):
        value = getattr(chosen, name)
        if value is not None:
            where.append(f"x.opened_at {compared} :{name}")
            values[name] = value
    if chosen.topology is not None:
        values["topology"] = chosen.topology
    return where, values


def _place(after: str) -> tuple[datetime, int, str]:
    at, _, rest = after.partition("~")
    txid, _, of = rest.partition("~")
    try:
        return datetime.fromisoformat(at), int(txid), of
    except ValueError:
        raise UsageError(f"{after[:80]!r} is no place in the list of batches") from None
