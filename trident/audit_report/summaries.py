"""What the batches of a time come to, worked out by the database: the report stays small however many there are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.trident.audit.ledger import LedgerSnapshot
from stormproof.trident.audit_report.plain import plain

DAYS_MAX: Final = 400
LIVES_MAX: Final = 200
STEPS: Final = ("open", "job", "wait", "prepare", "commit", "finish", "total")
DIGEST_OF: Final = (
    "SHA-256 over one line a batch, in txid order: txid, state, messages, failed, returned, rejected; then one line a sink "
    "of it, by name: txid, sink, the txid before, rows, digest of its content, outcome"
)

Scope = Mapping[str, Any]
_WITHIN: Final = (
    "x.incarnation = :incarnation and (:since is null or x.opened_at >= :since)"
    " and (:until is null or x.opened_at < :until)"
)
_TIMES: Final = {"since": sa.DateTime(timezone=True), "until": sa.DateTime(timezone=True)}


def scope_of(incarnation: str, since: datetime | None, until: datetime | None) -> Scope:
    """The batches of a topology that were opened from `since` on and before `until`."""
    return {"incarnation": incarnation, "since": since, "until": until}


def _rows(snapshot: LedgerSnapshot, sql: str, scope: Scope, **more: Any) -> list[dict[str, Json]]:
    statement = sa.text(sql).bindparams(*(sa.bindparam(name, type_=type_) for name, type_ in _TIMES.items()))
    found = snapshot.connection.execute(statement, {**scope, **more}).mappings()
    return [{key: plain(value) for key, value in row.items()} for row in found]


def totals(snapshot: LedgerSnapshot, scope: Scope) -> dict[str, Json]:
    """All batches as one row; `first` and `last` are None where there is none."""
    (row,) = _rows(
        snapshot,
        "select count(*) as batches, min(txid) as first, max(txid) as last, min(opened_at) as opened_first,"
        " max(opened_at) as opened_last, coalesce(sum(messages), 0) as messages, coalesce(sum(failed), 0) as failed,"
        " coalesce(sum(returned), 0) as returned, coalesce(sum(rejected), 0) as rejected,"
        f" coalesce(sum(tuples), 0) as tuples, coalesce(sum(bytes), 0) as bytes from stormproof.txn x where {_WITHIN}",
        scope,
    )
    return row


def by_state(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """The batches by state, cause and guarantee."""
    return _rows(
        snapshot,
        "select state, cause, guarantee, count(*) as batches, sum(messages) as messages, sum(failed) as failed,"
        f" min(txid) as first, max(txid) as last from stormproof.txn x where {_WITHIN} group by 1, 2, 3 order by 1, 2, 3",
        scope,
    )


def by_day(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """The batches by day (UTC), the newest days first."""
    return _rows(
        snapshot,
        "select cast((opened_at at time zone 'UTC') as date) as day, count(*) as batches,"
        " count(*) filter (where state = 'committed') as committed, sum(messages) as messages, sum(failed) as failed,"
        f" sum(rejected) as rejected from stormproof.txn x where {_WITHIN} group by 1 order by 1 desc limit :most",
        scope,
        most=DAYS_MAX,
    )


def by_sink(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """What the batches wrote to each sink, and how that ended."""
    return _rows(
        snapshot,
        "select k.sink, k.outcome, count(*) as batches, sum(k.rows) as rows, sum(k.bytes) as bytes,"
        " sum(k.superseded) as superseded, min(k.txid) as first, max(k.txid) as last, min(k.version) as first_version,"
        " max(k.version) as last_version from stormproof.txn x join stormproof.txn_sink k"
        f" on k.incarnation = x.incarnation and k.txid = x.txid where {_WITHIN} group by 1, 2 order by 1, 2",
        scope,
    )


def by_step(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """How long each step took, in milliseconds: of the batches of which that is on record."""
    values = ", ".join(f"('{step}', cast(x.steps_ms ->> '{step}' as double precision))" for step in STEPS)
    return _rows(
        snapshot,
        "select s.step, count(s.ms) as batches, percentile_cont(0.5) within group (order by s.ms) as half_within,"
        " percentile_cont(0.9) within group (order by s.ms) as nine_in_ten_within, max(s.ms) as longest"
        f" from stormproof.txn x cross join lateral (values {values}) s (step, ms) where {_WITHIN} and s.ms is not null"
        " group by 1 order by 3 desc",
        scope,
    )


def lives(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """The runs of the driver that opened batches, the newest first."""
    return _rows(
        snapshot,
        "select epoch, count(*) as batches, min(txid) as first, max(txid) as last, min(opened_at) as opened_first,"
        " max(opened_at) as opened_last, count(*) filter (where state = 'committed') as committed,"
        " count(*) filter (where state in ('aborted', 'abandoned')) as given_back"
        f" from stormproof.txn x where {_WITHIN} group by 1 order by 1 desc limit :most",
        scope,
        most=LIVES_MAX,
    )


def of_note(snapshot: LedgerSnapshot, topology: str, scope: Scope, most: int) -> tuple[list[dict[str, Json]], int]:
    """The newest batches that did not simply commit at their first attempt, from `audit_txn`; and how many are left out."""
    condition = (
        f"from stormproof.txn x where {_WITHIN} and (x.state <> 'committed' or x.attempt > 1 or x.failed > 0"
        " or x.returned > 0 or x.rejected > 0 or x.retry)"
    )
    (counted,) = _rows(snapshot, f"select count(*) as number {condition}", scope)
    rows = _rows(
        snapshot,
        "select v.* from stormproof.audit_txn v where v.topology = :topology and v.txid = any(array("
        f"select x.txid {condition} order by x.txid desc limit :most)) order by v.txid desc",
        scope,
        topology=topology,
        most=most,
    )
    number = counted["number"]
    assert isinstance(number, int)
    return rows, number - len(rows)


def digest(snapshot: LedgerSnapshot, scope: Scope) -> dict[str, Json]:
    """One digest of all batches and of what they wrote: two reports of one time must have the same, if all had ended."""
    hasher = hashlib.sha256()
    lines = sa.text(
        "select line from ("
        " select x.txid, '' as sink, concat_ws(' ', x.txid, x.state, x.messages, x.failed, x.returned, x.rejected) as line"
        f" from stormproof.txn x where {_WITHIN} union all"
        " select x.txid, k.sink, concat_ws(' ', x.txid, k.sink, coalesce(cast(k.previous as text), '-'), k.rows, k.digest,"
        " coalesce(k.outcome, '-')) from stormproof.txn x join stormproof.txn_sink k"
        f" on k.incarnation = x.incarnation and k.txid = x.txid where {_WITHIN}"
        ') l order by txid, sink collate "C"'
    ).bindparams(*(sa.bindparam(name, type_=type_) for name, type_ in _TIMES.items()))
    number = 0
    with snapshot.connection.execution_options(stream_results=True, yield_per=10_000).execute(
        lines, dict(scope)
    ) as found:
        for part in found.scalars().partitions():
            number += len(part)
            hasher.update("".join(f"{line}\n" for line in part).encode())
    return {"sha256": hasher.hexdigest(), "lines": number, "of": DIGEST_OF}
