"""Verifications beside a driver that commits, is killed, fails messages, compacts: none may say that something is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count as numbers
from typing import Any, Final

import sqlalchemy as sa

from stormproof import DeltaSink, PostgresSink, Topology, count, sum_
from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sink import Lineage
from stormproof.state import StateFactory
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.report import Deep, keep
from stormproof.trident.audit.verify import LAST, Since, verify
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.postgres import PostgresMap
from support.blows import Stand
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
TXIDS_MAX: Final = 100
"""A topology that lives for ever would be checked at ever greater cost."""
ROWS: Final = ("delta-append", "delta-upsert", "postgres-append", "postgres-upsert")
FOLDS: Final = ("delta-fold", "postgres-fold")
STATES: Final = ("delta-state", "postgres-state")
OUTPUTS: Final = (*ROWS, *FOLDS, *STATES)
"""Each kind that a deep verification compares."""
OUTPUTS_MAX: Final = 3
"""Of one topology: the fewer there are, the more verifications come beside each commit."""


def read(line: str) -> tuple[str, int, str]:
    key, at = line.split(",")
    return key, int(at), line


def build(outputs: tuple[str, ...], compact_every: int | None, cell: Cell) -> Topology:
    """One of these outputs each; a line without a comma fails at each attempt."""
    lake, database, t = cell.folder / "lake", cell.database, Topology(cell.name)
    rows = t.stream("lines", source_of(cell.queue, database)).map(
        read, "line", schema="k string, at bigint, made string"
    )
    upsert: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at", "lineage": True}
    options: dict[str, dict[str, Any]] = {
        "delta-append": {"content_digests": True},
        "postgres-append": {"lineage": True},
        **dict.fromkeys(["delta-upsert", "postgres-upsert"], upsert),
        **{output: {"lineage": Lineage(message=None)} for output in FOLDS},
    }

    def sink(output: str) -> DeltaSink | PostgresSink:
        store, _, table = output.partition("-")
        if store == "delta":
            return DeltaSink(lake / table, name=output, compact_every=compact_every, **options[output])
        return PostgresSink(table, name=output, database=database, **options[output])

    if plain := [sink(output) for output in outputs if output in ROWS]:
        rows.into(*plain)
    grouped = rows.group_by("k")
    if folded := [sink(output) for output in outputs if output in FOLDS]:
        grouped.persistent_aggregate(n=count(), total=sum_("at")).into(*folded)
    maps: dict[str, StateFactory] = {
        "delta-state": DeltaMap(lake / "totals"),
        "postgres-state": PostgresMap("totals", database=database),
    }
    for output in outputs:
        if output in maps:
            grouped.persistent_aggregate(n=count(), state=maps[output], state_name=output)
    return t


@dataclass
class Life:
    """One topology, with drivers one behind the other, and verifications beside them."""

    stand: Stand
    rng: random.Random
    name: str
    told: Counter[str] = field(default_factory=Counter[str])
    newest: int = 0

    def put(self) -> None:
        """Some messages; now and then one that fails."""
        lines = [
            b"k%d,%d" % (self.rng.randrange(40), self.rng.randrange(10**6)) for _ in range(self.rng.randint(5, 30))
        ]
        if self.rng.random() < 0.2:
            lines.append(b"not a line")
        put(self.stand.database, self.stand.cell.queue, lines)

    def verify(self, engine: sa.Engine) -> None:
        """Once: of all or of what came since, deep or not.

        Raises:
            AssertionError: it says that something is wrong, cannot be told or, where it is of all, was not compared.
        """
        ledger = AuditLedger(engine)
        deep = Deep() if self.rng.random() < 0.6 else None
        since: Since | None = self.rng.choice([None, LAST, max(1, self.newest - 5)])
        report = verify(ledger, self.stand.cell.name, opener_for(self.stand.database), deep=deep, since=since)
        assert keep(engine, report, at=datetime.now(UTC), by="tests", took_ms=0).recorded
        wrong = [*report.violations, *report.unknowns]
        assert not wrong, f"{self.name}: {wrong}"
        # A file may have rows of txids before the range, with which compaction moved those of the range.
        reaches = since is not None or not report.not_compared
        assert reaches, f"{self.name}: {report.tables}, {report.kept}"
        self.newest = report.last or 0
        self.told["deep" if deep else "not deep"] += 1
        self.told["since the last verdict"] += report.chain.basis is not None

    def run(self, verifications: int) -> Iterator[int]:
        """At most so many; how many came beside each driver."""
        engine, driver, done = sa.create_engine(self.stand.database.sqlalchemy_url), None, 0
        known = False
        try:
            while self.newest < TXIDS_MAX and done < verifications:
                self.put()
                place = self.rng.choice(PLACES)
                driver = start(self.stand.cell, {ENV: f"{place}=kill@{self.rng.randrange(1, 12)}" if place else ""})
                beside_it = 0
                while driver.exitcode is None and done < verifications and beside_it < 50 * DRIVER_TIMEOUT_S:
                    known = known or is_known(self.stand.cell.name, self.stand.database)
                    if not known:
                        continue
                    if self.newest < TXIDS_MAX:
                        self.put()
                    self.verify(engine)
                    done, beside_it = done + 1, beside_it + 1
                code = ended(driver, self.name)
                assert code in (0, KILLED), f"{self.name}: a driver ended with {code}"
                self.told["drivers that were killed" if code else "drivers that came to their end"] += 1
                yield beside_it
        finally:
            if driver is not None:
                driver.kill()
                driver.join()
            engine.dispose()


def beside(server: EmbeddedPostgres, seed: int, number: int) -> Iterator[str]:
    """So many verifications, in topology after topology; a line for each topology, and one for all.

    Raises:
        AssertionError: one of them raises an alarm.
    """
    rng, done, told = random.Random(seed), 0, Counter[str]()
    for life in numbers(1):
        outputs = tuple(rng.sample(OUTPUTS, rng.randint(1, OUTPUTS_MAX)))
        compact_every = rng.choice([None, 3])
        what = f"life {life}, {', '.join(outputs)}{', compacted' if compact_every else ''}"
        with stand_on(server, f"beside_{life}", proxied=False) as stand:
            made = partial(build, outputs, compact_every)
            stand.cell = replace(
                stand.cell, build=made, batch_messages=rng.choice([3, 10]), in_flight=rng.choice([1, 4])
            )
            one = Life(stand, rng, what, told)
            before = done
            done += sum(one.run(number - done))
        yield f"{done}/{number} verifications, {done - before} beside {what}"
        if done >= number:
            break
    yield f"{done} verifications without an alarm; {', '.join(f'{n} {what}' for what, n in sorted(told.items()))}"
