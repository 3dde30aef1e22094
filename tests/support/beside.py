"""Deep verifications beside a driver that commits, is killed and comes again: none may say that something is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count as numbers
from typing import Any, Final

import sqlalchemy as sa

from stormproof import DeltaSink, Lineage, PostgresSink, Topology, count, sum_
from stormproof.core.failpoint import ENV
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.trident.audit import AuditLedger, opener_for, verify
from stormproof.trident.audit.verify_rows import Deep
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.postgres import PostgresMap
from support.crashes import DRIVER_TIMEOUT_S, KILLED, Cell, ended, start
from support.queues import put
from support.rounds import stand_on
from support.topologies import source_of
from support.verdicts import is_known

PLACES: Final = (
    *("", "", "delta.after_log_entry", "postgres.after_commit", "state.after_rows"),
    *("commit.before_sink", "finish.before_commit", "open.before"),
)
"""Where a driver is killed, once it has passed some times; the empty ones: nowhere."""
TXIDS_MAX: Final = 300
"""A topology that lives for ever would be checked at ever greater cost."""


def read(line: str) -> tuple[str, int, str]:
    key, at = line.split(",")
    return key, int(at), line


def build(cell: Cell) -> Topology:
    """Each kind of sink that a deep verification compares."""
    lake, database, t = cell.folder / "lake", cell.database, Topology(cell.name)
    lines = t.stream("lines", source_of(cell.queue, database))
    rows = lines.map(read, "line", schema="k string, at bigint, made string")
    upsert: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at", "lineage": True}
    rows.into(
        DeltaSink(lake / "appended", name="delta-append", content_digests=True),
        DeltaSink(lake / "newest", name="delta-upsert", **upsert),
        PostgresSink("appended", name="postgres-append", database=database, lineage=True),
        PostgresSink("newest", name="postgres-upsert", database=database, **upsert),
    )
    grouped, folded = rows.group_by("k"), Lineage(message=None)
    grouped.persistent_aggregate(n=count(), total=sum_("at")).into(
        DeltaSink(lake / "folded", name="delta-fold", lineage=folded),
        PostgresSink("folded", name="postgres-fold", database=database, lineage=folded),
    )
    grouped.persistent_aggregate(n=count(), state=DeltaMap(lake / "totals"), state_name="delta-state")
    grouped.persistent_aggregate(n=count(), state=PostgresMap("totals", database=database), state_name="postgres-state")
    return t


def beside(server: EmbeddedPostgres, seed: int, number: int) -> Iterator[str]:
    """So many verifications, in topology after topology; a line for each driver, and one for all.

    Raises:
        AssertionError: one of them says that something is wrong, cannot be told or was not compared.
    """
    rng, done, told = random.Random(seed), 0, Counter[str]()
    for life in numbers(1):
        with stand_on(server, f"beside_{life}", proxied=False) as stand:
            cell = replace(stand.cell, build=build, batch_messages=rng.choice([3, 10]), in_flight=rng.choice([1, 4]))
            engine, newest, driver = sa.create_engine(stand.database.sqlalchemy_url), 0, None
            try:
                while newest < TXIDS_MAX and done < number:
                    lines = [
                        b"k%d,%d" % (rng.randrange(40), rng.randrange(10**6)) for _ in range(rng.randrange(20, 200))
                    ]
                    put(stand.database, cell.queue, lines)
                    place = rng.choice(PLACES)
                    driver = start(cell, {ENV: f"{place}=kill@{rng.randrange(1, 12)}" if place else ""})
                    beside_it = 0
                    while driver.exitcode is None and done < number and beside_it < 50 * DRIVER_TIMEOUT_S:
                        if not is_known(cell.name, stand.database):
                            continue
                        report = verify(AuditLedger(engine), cell.name, opener_for(stand.database), deep=Deep())
                        wrong = [*report.violations, *report.unknowns]
                        assert not wrong, f"life {life}: {wrong}"
                        assert not report.not_compared, f"life {life}: {report.tables}, {report.kept}"
                        done, beside_it, newest = done + 1, beside_it + 1, report.last or 0
                    code = ended(driver, f"life {life}")
                    assert code in (0, KILLED), f"life {life}: a driver ended with {code}"
                    told["drivers that were killed" if code else "drivers that came to their end"] += 1
                    yield f"{done}/{number} verifications, {beside_it} beside a driver{place and f' killed at {place}'}"
            finally:
                if driver is not None:
                    driver.kill()
                    driver.join()
                engine.dispose()
        if done >= number:
            break
    yield f"{done} verifications without an alarm; {', '.join(f'{n} {what}' for what, n in sorted(told.items()))}"
