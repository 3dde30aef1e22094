"""Batches: the list, with filters and pages, the newest first; and one batch whole, with what its sinks hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import Json, UsageError
from stormproof.trident.audit.inspect import Has, Holding, SinkOpener
from stormproof.trident.audit.ledger import AttemptRow, AuditLedger
from stormproof.trident.audit.message import Failure
from stormproof.trident.audit.source import server_ids
from stormproof.trident.audit.status import holdings_of
from stormproof.trident.ledger.tables import Event, Reject, SinkWork, record_of
from stormproof.trident.terms.transaction_states import EventKind, TxnCause, TxnState

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


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """What the batch writes to one sink. `rows` were prepared, and `rejected` of them refused by its table.

    `has` says whether the sink has it, by the ledger or by its store, and `why` why it was not asked. `committed_at` is the
    time of the commit by the sink's store; None: it does not have it, or its store does not say.
    """

    sink: str
    target: str
    follows_txid: int | None
    rows: int
    bytes: int
    files: int
    digest: str
    committed_at: datetime | None
    outcome: str | None
    version: int | None = None
    """The table's version that has it; None where the table has none, or the ledger does not know it."""
    has: Has = Has.NOT_ASKED
    why: str | None = None
    rejected: int = 0

    @staticmethod
    def of(work: SinkWork, found: Holding, rejects: Sequence[Reject]) -> SinkOutput:
        """From the ledger's record, and what the sink holds."""
        return record_of(
            SinkOutput,
            work,
            target=found.target,
            follows_txid=work.previous,
            files=len(work.files),
            committed_at=found.at,
            has=found.has,
            why=found.why,
            rejected=found.rejected or sum(one.rows for one in rejects if one.sink == work.sink),
        )


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """Any other event of the batch: blocked, retried by an operator, suppressed."""

    kind: str
    at: datetime | None
    sink: str | None
    message: str | None
    text: str
    action: str | None = None
    """What an operator decided."""


@dataclass(frozen=True, slots=True)
class TxnReport:
    """One batch, whole."""

    topology: str
    txid: int
    state: str
    guarantee: str
    epoch: int
    cause: str | None
    """Why it is blocked, was aborted or was abandoned."""
    reason: str | None
    """The cause in words."""
    source: str
    position: dict[str, Json]
    messages: int
    failed: int
    tuples: int
    bytes: int
    retry: bool
    opened_at: datetime
    prepared_at: datetime | None
    ended_at: datetime | None
    steps_ms: dict[str, float]
    attempts: tuple[AttemptRow, ...]
    sinks: tuple[SinkOutput, ...]
    failures: tuple[Failure, ...]
    replayed: tuple[str, ...]
    events: tuple[OtherEvent, ...]
    returned: tuple[Failure, ...] = ()
    server_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """What their server calls the messages that are named here, where that is on record."""


_OWN_PLACE = (EventKind.FAILURE, EventKind.RETURNED, EventKind.REPLAY)


def _text(event: Event) -> str:
    """The row of a reject; of any other event, what went wrong or what was done."""
    if event.kind is EventKind.REJECT:
        return event.input or ""
    return (event.error if event.kind is not EventKind.OPERATOR else None) or event.reason or ""


def txn(ledger: AuditLedger, topology: str, txid: int, opener: SinkOpener | None = None) -> TxnReport:
    """One batch. With an `opener` the sinks that the ledger does not know to hold it are asked.

    Raises:
        UsageError: there is no such topology or txid.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = snapshot.txns(row.incarnation, txid, txid)
        if not found:
            last, pruned = snapshot.last_txid(row.incarnation), snapshot.pruned_upto(row.incarnation)
            known = "none yet" if last is None else f"{pruned + 1} to {last}"
            known += f" (pruned up to txid {pruned})" if pruned else ""
            raise UsageError(f"topology {topology!r} has no txid {txid}; known: {known}", topology=topology, txid=txid)
        attempts = snapshot.attempts(row.incarnation, txid, txid)
        work = snapshot.work(row.incarnation, txid, txid)
        events = snapshot.events(row.incarnation, first=txid, last=txid)
        holdings = holdings_of(snapshot, row, opener)
        rejects = snapshot.rejects(row.incarnation, first=txid, last=txid, texts=False)
        events = [event for event in events if event.txid == txid]
        at_servers = server_ids(snapshot, row, {event.message for event in events if event.message is not None})
    batch = found[0]
    return record_of(
        TxnReport,
        batch,
        topology=topology,
        state=batch.state.value,
        guarantee=batch.guarantee.value,
        attempts=tuple(attempts),
        sinks=tuple(SinkOutput.of(item.work, holdings.of(batch, item.work), rejects) for item in work),
        failures=tuple(Failure.of(e) for e in events if e.kind is EventKind.FAILURE),
        replayed=tuple(e.message or "" for e in events if e.kind is EventKind.REPLAY),
        events=tuple(
            OtherEvent(e.kind.value, e.at, e.sink, e.message, _text(e), e.action)
            for e in events
            if e.kind not in _OWN_PLACE
        ),
        returned=tuple(Failure.of(e) for e in events if e.kind is EventKind.RETURNED),
        server_ids=at_servers,
    )
