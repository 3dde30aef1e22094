"""Every topology in a line: driver, what is pending, what failed, the last commit, the last verdict, what is wrong.

It is read with the same few statements however many topologies there are, so that a page may ask every few seconds.
What waits in a source and was never opened is not in it: that may be much to count; see `backlogs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import StormproofError
from stormproof.core.contract.source import Backlog
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.report import LastVerdict, newest_verdicts
from stormproof.trident.audit.source import open_losses, stored_source
from stormproof.trident.audit.status import LAST_BATCHES, DriverState, Problem, RefusedStart, driver_state, problems_of
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.control import JobProgress, SignOfLife, signs_of_life
from stormproof.trident.ledger.tables import Txn, record_of, to_txn
from stormproof.trident.terms.transaction_states import EventKind, TxnState


@dataclass(frozen=True, slots=True)
class Recent:
    """The last committed batches, at most `LAST_BATCHES` of them."""

    batches: int
    messages: int
    failed: int
    first_opened_at: datetime
    last_ended_at: datetime
    latency_ms: float
    """Mean, from open to committed."""

    @property
    def messages_per_s(self) -> float:
        """Messages a second, over the whole time that these batches took."""
        seconds = (self.last_ended_at - self.first_opened_at).total_seconds()
        return self.messages / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """One topology. `sign_age_s`: of its driver's newest sign of life; None: it gives none. Counts are as of now."""

    name: str
    guarantee: str
    source: str
    epoch: int
    driver: DriverState
    doing: str | None
    sign_age_s: float | None
    asked: str | None
    """What an operator asked for and still holds: ``pause``, ``drain`` or ``stop``."""
    in_flight: int
    pending: int
    """Messages that were opened and are not resolved: leased, given back, or waiting for a retry."""
    oldest_opened_at: datetime | None
    """When the oldest batch that has not ended was opened."""
    dead_letters: int
    """Those about which nobody has decided."""
    rejects: int
    """Likewise."""
    recent: Recent | None
    verdict: LastVerdict | None
    problems: tuple[Problem, ...]
    job: JobProgress | None = None
    """How far the job of the lowest batch in flight is; None: none runs, or it began just now."""

    @property
    def is_alive(self) -> bool:
        """Whether a driver runs and answers, as far as can be seen from here."""
        silent = any(problem.kind.value == "driver_silent" for problem in self.problems)
        return self.driver is DriverState.RUNNING and not silent


_RECENT: Final = sa.text(
    """
    select t.incarnation, count(*) as batches, cast(sum(b.messages) as bigint) as messages,
      cast(sum(b.failed) as bigint) as failed, min(b.opened_at) as first_opened_at, max(b.ended_at) as last_ended_at,
      cast(avg(extract(epoch from b.ended_at - b.opened_at)) * 1000 as double precision) as latency_ms
    from stormproof.topology t
    cross join lateral (
      select x.messages, x.failed, x.opened_at, x.ended_at from stormproof.txn x
      where x.incarnation = t.incarnation and x.state = 'committed' order by x.txid desc limit :last
    ) b
    group by t.incarnation
    """
)
_PENDING: Final = sa.text(
    "select topology, sum(leased + given_back + waiting) as pending, sum(undecided_dead_letters) as dead"
    " from stormproof.audit_pending group by topology"
)
_REFUSED: Final = sa.text(
    """
    select t.incarnation, e.at, e.sink, e.error
    from stormproof.topology t
    cross join lateral (
      select at, sink, error, detail from stormproof.event
      where incarnation = t.incarnation and kind = :kind order by id desc limit 1
    ) e
    where cast(e.detail ->> 'epoch' as bigint) = t.epoch
    """
)
_REJECTS: Final = sa.text(
    "select incarnation, count(*) as number from stormproof.reject where state = 'open' group by 1"
)
_FORGOT: Final = sa.text(
    "select distinct t.incarnation from stormproof.topology t join stormproof.pending_subscription s on"
    " (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))"
    " where jsonb_exists(s.position, 'breaks')"
)
"""Topologies of whose servers it is on record that they removed messages, or may have."""
_ASKED: Final = sa.text("select incarnation, paused, ending, ending_epoch from stormproof.control")


def overview(ledger: AuditLedger) -> tuple[Health, ...]:
    """Every topology, by name, from one instant of a ledger in Postgres.

    Raises:
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        connection = snapshot.connection
        rows = snapshot.topologies()
        signs = signs_of_life(connection)
        recent = {row.incarnation: row for row in connection.execute(_RECENT, {"last": LAST_BATCHES})}
        pending = {row.topology: row for row in connection.execute(_PENDING)}
        verdicts = newest_verdicts(connection)
        refused = {
            row.incarnation: row for row in connection.execute(_REFUSED, {"kind": EventKind.START_REFUSED.value})
        }
        rejects = {row.incarnation: int(row.number) for row in connection.execute(_REJECTS)}
        asked = {row.incarnation: row for row in connection.execute(_ASKED)}
        unresolved = _unresolved(snapshot)
        forgot = {*connection.execute(_FORGOT).scalars()}
        losses = {
            row.incarnation: open_losses(snapshot, row, stored_source(snapshot, row))
            for row in rows
            if row.incarnation in forgot
        }
    found: list[Health] = []
    for row in rows:
        sign = signs.get(row.incarnation)
        counts, last = pending.get(row.name), recent.get(row.incarnation)
        found.append(
            _health(
                *(row, sign, unresolved.get(row.incarnation, ()), refused.get(row.incarnation), losses),
                asked=_asked(asked.get(row.incarnation), row.epoch),
                pending=0 if counts is None else int(counts.pending),
                dead_letters=0 if counts is None else int(counts.dead),
                rejects=rejects.get(row.incarnation, 0),
                recent=None if last is None else record_of(Recent, last),
                verdict=verdicts.get(row.incarnation),
            )
        )
    return tuple(found)


def _health(
    row: TopologyRow,
    sign: SignOfLife | None,
    unresolved: Sequence[Txn],
    refused: Any,
    losses: Mapping[str, Sequence[str]],
    **counted: Any,
) -> Health:
    sign = sign if sign is not None and sign.epoch == row.epoch else None
    driver = driver_state(row, sign)
    runs = driver in (DriverState.RUNNING, DriverState.UNKNOWN)
    start = None if refused is None else RefusedStart(refused.at, refused.sink, refused.error or "")
    return record_of(
        Health,
        row,
        driver=driver,
        doing=sign.doing if runs and sign is not None else None,
        sign_age_s=sign.age_s if runs and sign is not None else None,
        in_flight=sum(txn.state in (TxnState.OPEN, TxnState.PREPARED) for txn in unresolved) if runs else 0,
        oldest_opened_at=min((txn.opened_at for txn in unresolved), default=None),
        problems=tuple(problems_of(row, driver, sign, unresolved, start, losses.get(row.incarnation, ()))),
        **counted,
        job=sign.job if driver is DriverState.RUNNING and sign is not None and sign.is_fresh else None,
    )


def _asked(row: Any, epoch: int) -> str | None:
    if row is None:
        return None
    return row.ending if row.ending is not None and row.ending_epoch == epoch else "pause" if row.paused else None


def _unresolved(snapshot: LedgerSnapshot) -> Mapping[str, list[Txn]]:
    found: dict[str, list[Txn]] = {}
    query = sa.select(t.txn).where(t.txn.c.ended_at.is_(None)).order_by(t.txn.c.incarnation, t.txn.c.txid)
    for row in snapshot.connection.execute(query):
        found.setdefault(row.incarnation, []).append(to_txn(row))
    return found


def backlogs(ledger: AuditLedger) -> dict[str, Backlog | None]:
    """What waits in each topology's source, by the topologies' names; None where only the source's server can tell.

    It may be much to count. A source that cannot be read counts as one that cannot tell.
    """
    found: dict[str, Backlog | None] = {}
    with ledger.snapshot() as snapshot:
        rows = snapshot.topologies()
    for row in rows:
        try:
            with ledger.snapshot() as snapshot:
                evidence = stored_source(snapshot, row)
                found[row.name] = None if evidence is None else evidence.backlog()
        except StormproofError:
            found[row.name] = None
    return found
