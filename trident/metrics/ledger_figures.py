"""The ledger's own figures of every topology. They need no driver: an alert that a driver is gone must not depend on it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.metadata import version

import sqlalchemy as sa

from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.report import LastVerdict, newest_verdicts
from stormproof.trident.audit.status import DriverState, ProblemKind, TopologyStatus, status
from stormproof.trident.ledger import tables as t
from stormproof.trident.metrics import catalogue as m
from stormproof.trident.metrics.book import Sample
from stormproof.trident.terms.transaction_states import RejectState, TxnState, Verdict


def ledger_figures(ledger: AuditLedger, names: tuple[str, ...], now: datetime) -> list[Sample]:
    """The values of all `stormproof_ledger_*` metrics, of these topologies, or of all.

    Raises:
        UsageError: the ledger does not have a topology of such a name.
        StoreUnavailable: the database does not answer.
    """
    if names:
        found = [one for name in dict.fromkeys(names) for one in status(ledger, name).topologies]
    else:
        found = list(status(ledger).topologies)
    with ledger.snapshot() as snapshot:
        verdicts, last = newest_verdicts(snapshot.connection), _last_commits(snapshot.connection)
    samples = [Sample(m.BUILD_INFO, (version("stormproof"), platform.python_version()), 1.0)]
    for one in found:
        samples += _of_topology(one, now, verdicts.get(one.incarnation), last.get(one.incarnation))
    return samples


def _of_topology(
    one: TopologyStatus, now: datetime, verdict: LastVerdict | None, last_commit: datetime | None
) -> Iterator[Sample]:
    def of(metric: m.Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, (one.name, *labels), float(value))

    yield of(m.LEDGER_READ, now.timestamp())
    for driver in DriverState:
        yield of(m.LEDGER_DRIVER, one.driver is driver, driver.value)
    if one.last_sign_s is not None:
        yield of(m.LEDGER_SIGN_AGE, one.last_sign_s)
    yield of(m.LEDGER_EPOCH, one.epoch)
    yield of(m.LEDGER_PAUSED, one.asked is not None and one.asked.what == "pause")
    problems = Counter(problem.kind for problem in one.problems)
    for kind in ProblemKind:
        yield of(m.LEDGER_PROBLEMS, problems[kind], kind.value)
    for state in TxnState:
        yield of(m.LEDGER_TXNS, one.txns.get(state.value, 0), state.value)
    yield of(m.LEDGER_LAST_TXID, one.last_txid or 0)
    if last_commit is not None:
        yield of(m.LEDGER_LAST_COMMIT, last_commit.timestamp())
    oldest = min((txn.since for txn in one.unresolved), default=None)
    yield of(m.LEDGER_OLDEST, 0 if oldest is None else max(0.0, (now - oldest).total_seconds()))
    if one.backlog is not None:
        for place in m.LABEL_VALUES["place"]:
            number = getattr(one.backlog, place)
            if number is not None:
                yield of(m.LEDGER_BACKLOG, number, place)
        age_s = 0.0 if one.backlog.ready == 0 else one.backlog.oldest_ready_age_s
        if age_s is not None:
            yield of(m.LEDGER_LAG, age_s)
    for reject in RejectState:
        yield of(m.LEDGER_REJECTS, one.rejects.get(reject.value, 0), reject.value)
    for sink in one.sinks:
        yield of(m.LEDGER_SINK_TXID, sink.last_txid or 0, sink.sink)
    if verdict is not None:
        for known in Verdict:
            yield of(m.LEDGER_VERDICT, verdict.verdict == known, known.value)
        yield of(m.LEDGER_VERDICT_AT, verdict.at.timestamp())


def _last_commits(connection: sa.Connection) -> Mapping[str, datetime]:
    """When each incarnation last committed: the end of its highest committed batch."""
    c = t.txn.c
    last = (
        sa.select(c.ended_at)
        .where(c.incarnation == t.topology.c.incarnation, c.state == TxnState.COMMITTED.value)
        .order_by(c.txid.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = connection.execute(sa.select(t.topology.c.incarnation, last.label("at")))
    return {row.incarnation: row.at for row in rows if row.at is not None}
