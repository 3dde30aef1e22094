"""Metrics beside a real ledger: they agree with it after kills, and tell of drivers that are gone."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from support.crashes import KILLED, Cell
from support.metered import differences, fed_twice, figures_of, figures_of_ledger, run_metered
from support.queues import prepared_database, put
from support.shapes import SINKS
from support.topologies import SinkMode, messages

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.exposition import ledger_figures

pytestmark = pytest.mark.postgres

KILLS: Final = 50


@pytest.fixture
def cell(database: Database, tmp_path: Path) -> Cell:
    prepared_database(database)
    return Cell("words", SinkMode.POSTGRES_APPEND, Guarantee.EXACTLY_ONCE, tmp_path, database, "lines", 3)


def _killed(cell: Cell, rng: random.Random, kills: int) -> list[Path]:
    """Drivers, each with further messages; so many of them killed at random places, the last one not."""
    points = [p for p in SINKS.points() if p.name.partition(".")[0] not in ("delta", "state")]
    files: list[Path] = []
    killed = 0
    while killed < kills:
        put(cell.database, cell.queue, messages(8, f"s{len(files)}w"))
        files.append(cell.folder / f"life{len(files)}.prom")
        armed = f"{rng.choice(points).name}=kill@{rng.randint(1, 3)}"
        killed += run_metered(cell, files[-1], armed) == KILLED
    files.append(cell.folder / "last.prom")
    assert run_metered(cell, files[-1]) == 0
    return [file for file in files if file.exists()]  # a driver that died before its metrics began told nothing


@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_metrics_agree_with_the_ledger_after_random_kills(cell: Cell, in_flight: int, seed: int) -> None:
    files = _killed(replace(cell, in_flight=in_flight), random.Random(seed), KILLS // 2)
    recorded = figures_of_ledger(cell.database)
    assert recorded[(m.ENDED.name, "committed", "")] > KILLS // 2
    assert recorded[(m.ENDED.name, "aborted", "driver_ended")] > 0
    assert recorded[(m.DEAD_LETTERS.name,)] > 0
    assert differences(figures_of(files), recorded) == {}


@pytest.mark.parametrize("method", ["committed", "opened", "given_up"])
def test_a_metric_that_is_fed_twice_does_not_agree(cell: Cell, method: str, seed: int) -> None:
    """Negative control."""
    files = _killed(replace(cell, sabotage=fed_twice(method)), random.Random(seed), 2)
    assert differences(figures_of(files), figures_of_ledger(cell.database)) != {}


def test_a_life_whose_file_is_lost_does_not_agree(cell: Cell, seed: int) -> None:
    """Negative control."""
    files = _killed(cell, random.Random(seed), 2)
    assert differences(figures_of(files[:-1]), figures_of_ledger(cell.database)) != {}


def _exported(database: Database) -> dict[tuple[str, ...], float]:
    engine = ledger_engine(database)
    try:
        samples = ledger_figures(AuditLedger(engine), (), datetime.now(UTC))
    finally:
        engine.dispose()
    return {(sample.metric.name, *sample.labels): sample.value for sample in samples if isinstance(sample.value, float)}


def test_the_ledgers_own_figures_tell_of_a_driver_that_is_gone(cell: Cell) -> None:
    put(cell.database, cell.queue, messages(8))
    assert run_metered(cell, cell.folder / "life.prom", "finish.after=kill@2") == KILLED
    gone = _exported(cell.database)
    assert gone[(m.LEDGER_DRIVER.name, "words", "dead")] == 1
    assert gone[(m.LEDGER_PROBLEMS.name, "words", "driver_dead")] == 1
    assert gone[(m.LEDGER_TXNS.name, "words", "committed")] == 2
    assert gone[(m.LEDGER_LAST_COMMIT.name, "words")] > 0
    assert run_metered(cell, cell.folder / "last.prom") == 0
    there = _exported(cell.database)
    assert there[(m.LEDGER_DRIVER.name, "words", "stopped")] == 1
    assert there[(m.LEDGER_PROBLEMS.name, "words", "driver_dead")] == 0
    assert there[(m.LEDGER_BACKLOG.name, "words", "dead")] == 1
    assert there[(m.LEDGER_BACKLOG.name, "words", "ready")] == 0
    recorded = figures_of_ledger(cell.database)
    assert there[(m.LEDGER_TXNS.name, "words", "committed")] == recorded[(m.ENDED.name, "committed", "")]
