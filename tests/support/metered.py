"""Drivers whose metrics are compared with the ledger: each life writes a file, up to date at the instant of its death."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

from prometheus_client.parser import text_string_to_metric_families

from stormproof.core.base import failpoint
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver import coordinator as coordinators
from stormproof.trident.driver.jobs import JobsInTurn
from stormproof.trident.driver.run import driver, options_of
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry import exposition
from stormproof.trident.telemetry.catalogue import Book
from stormproof.trident.telemetry.exposition import registry_of, replace_text, text_of
from support.crashes import Cell, child_of, ended
from support.databases import at
from support.topologies import topology

Figures = Counter[tuple[str, ...]]
"""Counters by name and the values of their labels but the topology."""

EXACT: Final = tuple(metric for metric in m.METRICS if metric.exact)


def run_metered(cell: Cell, file: Path, armed: str = "") -> int:
    """Run a driver whose metrics go to a file; its exit status, or the negative number of the signal that killed it."""
    return ended(child_of(_drive, (cell, file, armed)), f"{cell.name} (armed: {armed!r})")


@contextmanager
def metrics_in(file: Path) -> Generator[Callable[[str], None]]:
    """The metrics of a run go to a file, at its start and its end, in place of a port; yields what writes them now."""
    books: list[Book] = []
    registry = registry_of(lambda: tuple(books))

    def write(_: str = "") -> None:
        if books:
            replace_text(file, text_of(registry))

    def served(_host: str, _port: int, book: Book) -> tuple[str, Callable[[], None]]:
        books.append(book)
        write()
        return "nowhere", write

    with patch.object(exposition, "serve", served):
        yield write


@contextmanager
def written_at_each_failpoint(file: Path) -> Generator[None]:
    """The file is written at every failpoint, before that one kills: so what it says is what the driver knew."""
    with metrics_in(file) as write, failpoint.watched(write):
        yield


def _drive(cell: Cell, file: Path, armed: str) -> None:
    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    settings = Settings(
        database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=cell.folder / "home",
        batch_messages=cell.batch_messages,
        metrics_port=0,
    )
    if armed:
        os.environ[failpoint.ENV] = armed
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    if cell.sabotage is not None:
        cell.sabotage()
    built = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue)
    options = replace(options_of(settings, cell.guarantee), max_batches_in_flight=cell.in_flight)
    rng = random.Random(1)
    with (
        # A kill on one thread may fall between a commit to the ledger and the metric that tells of it on another.
        patch.object(coordinators, "JobsOnThreads", lambda _: JobsInTurn(rng)),
        written_at_each_failpoint(file),
        driver(
            built,
            cell.guarantee,
            settings=settings,
            engine="inline",
            options=options,
            until_idle=True,
            rng=rng,
        ) as coordinator,
    ):
        coordinator.run()


def figures_of(files: Iterable[Path]) -> Figures:
    """The sums, over these files, of the counters that are to agree with the ledger."""
    names = {metric.exported: metric for metric in EXACT}
    found: Figures = Counter()
    for file in files:
        for family in text_string_to_metric_families(file.read_text()):
            for sample in family.samples:
                metric = names.get(sample.name)
                if metric is not None:
                    found[(metric.name, *(sample.labels[label] for label in metric.labels))] += int(sample.value)
    return +found


_QUERIES: Final[Mapping[m.Metric, str]] = {
    m.OPENED: "select count(*) from stormproof.txn",
    m.ENDED: "select state, coalesce(cause, ''), count(*) from stormproof.txn where ended_at is not null group by 1, 2",
    m.BLOCKED: "select sink, 'other', count(*) from stormproof.event where kind = 'blocked' group by 1, 2",
    m.SUPPRESSED: "select sink, count(*) from stormproof.event where kind = 'suppressed' and sink is not null group by 1",
    m.ATTEMPTS_FAILED: "select outcome, count(*) from stormproof.attempt"
    " where outcome in ('job_failed', 'unverified', 'moot') and (incarnation, txid, attempt + 1) in"
    " (select incarnation, txid, attempt from stormproof.attempt) group by 1",
    m.MESSAGES_OPENED: "select sum(messages)::bigint from stormproof.txn",
    m.MESSAGES_COMMITTED: "select sum(messages - failed - returned - rejected)::bigint from stormproof.txn"
    " where state = 'committed'",
    m.MESSAGES_FAILED: "select e.reason, count(*) from stormproof.event e join stormproof.txn using (incarnation, txid)"
    " where kind = 'failure' and ended_at is not null group by 1",
    m.MESSAGES_RETURNED: "select count(*) from stormproof.event where kind = 'returned'",
    m.MESSAGES_REPLAYED: "select count(*) from stormproof.event where kind = 'replay'",
    m.DEAD_LETTERS: "select count(*) from stormproof.event where kind = 'dead_letter'",
    m.REJECTS: "select sink, count(*) from stormproof.reject group by 1",
    m.SINK_ROWS: "select sink, sum(rows)::bigint from stormproof.txn_sink join stormproof.txn using (incarnation, txid)"
    " where state = 'committed' group by 1",
    m.SINK_BYTES: "select sink, sum(s.bytes)::bigint from stormproof.txn_sink s join stormproof.txn"
    " using (incarnation, txid) where state = 'committed' group by 1",
}


def figures_of_ledger(database: Database) -> Figures:
    """The same figures, counted in the ledger's tables."""
    assert set(_QUERIES) == set(EXACT), "a metric that is to agree with the ledger has no query"
    found: Figures = Counter()
    with at(database) as connection:
        for metric, query in _QUERIES.items():
            for row in connection.execute(query.encode()):
                found[(metric.name, *map(str, row[:-1]))] += int(row[-1] or 0)
    return +found


def differences(told: Figures, recorded: Figures) -> dict[tuple[str, ...], tuple[int, int]]:
    """Where the two disagree: what the metrics say, and what the ledger says."""
    return {key: (told[key], recorded[key]) for key in {*told, *recorded} if told[key] != recorded[key]}


def fed_twice(name: str) -> Callable[[], None]:
    """A sabotage: one method of the recorder is called twice each time."""
    return _Twice(name)


class _Twice:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> None:
        from stormproof.trident.telemetry.recorder import Recorder

        told = getattr(Recorder, self._name)

        def twice(*arguments: object) -> None:
            told(*arguments)
            with suppress(KeyError):
                told(*arguments)

        setattr(Recorder, self._name, twice)
