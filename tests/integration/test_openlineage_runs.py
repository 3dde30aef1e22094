"""Lineage of real runs: what is told agrees with the ledger, through a recovery, too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.crashes import Cell
from support.databases import at
from support.metered import differences, figures_of, figures_of_ledger, metrics_in
from support.once_runs import run_keys
from support.queues import prepared_database, put
from support.streams import ArrowFrames, Form, StandInQuery, StreamCell, function_of, put_file
from support.topologies import messages, topology

from stormproof.core.base.failpoint import armed
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.lineage import run_id

pytestmark = pytest.mark.postgres


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_told_as_recorded(events: list[dict[str, Any]], database: Database, prefix: str) -> None:
    """Each batch began and ended once, and its rows for each sink are the ledger's; tables have the sinks' names."""
    with at(database) as connection:
        rows = connection.execute("select incarnation, txid, state from stormproof.txn").fetchall()
        sinks = connection.execute("select txid, sink, rows from stormproof.txn_sink").fetchall()
    assert sinks
    told = Counter((e["run"]["runId"], e["eventType"]) for e in events)
    assert told == Counter(
        (run_id(incarnation, txid), kind)
        for incarnation, txid, state in rows
        for kind in ("START", {"committed": "COMPLETE"}.get(state, "ABORT"))
    )
    rows_told = {
        (e["run"]["facets"]["stormproof"]["txid"], Path(o["name"].replace(".", "/")).name): o["outputFacets"][
            "outputStatistics"
        ]["rowCount"]
        for e in events
        if e["eventType"] == "COMPLETE"
        for o in e["outputs"]
    }
    table = {sink: f"{prefix}_{sink}".replace("-", "_") for _, sink, _ in sinks}
    assert rows_told == {(txid, table[sink]): number for txid, sink, number in sinks}


def test_lineage_agrees_with_the_ledger_through_a_recovery(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    cell = Cell("words", None, Guarantee.EXACTLY_ONCE, tmp_path, database, "lines")
    put(database, cell.queue, messages(12))
    settings = Settings(
        database_url=database.sqlalchemy_url.render_as_string(hide_password=False),
        home=tmp_path / "home",
        batch_messages=3,
        lineage_file=tmp_path / "events",
        lineage_interval_s=0,
    )
    built = topology(cell.name, cell.mode, cell.folder, database, cell.queue)
    with armed("commit.after_sink=raise@2"):
        statistics = built.run(settings=settings, engine="inline", until_idle=True)
    assert [report.rolled_forward for report in statistics.recoveries if report.rolled_forward]
    events = events_in(tmp_path / "events")
    require_told_as_recorded(events, database, "words")
    versions = [
        int(o["facets"]["version"]["datasetVersion"])
        for e in events
        for o in e["outputs"]
        if e["eventType"] == "COMPLETE" and o["name"].endswith("words_delta_append")
    ]
    assert versions == sorted(set(versions))
    assert len(versions) > 2


def _jobs(cell: StreamCell) -> None:
    run_keys(cell, ["monday", "tuesday"])


def _stream(cell: StreamCell) -> None:
    for lines in (["a b", "bb"], ["cc", "d"]):
        put_file(cell.folder, lines)
    with function_of(cell, ArrowFrames()) as function:
        for batch, frame in StandInQuery(cell.folder, cell.checkpoint).batches():
            function(frame, batch)


@pytest.mark.parametrize(
    ("form", "run"),
    [(Form.SINKS, _stream), (Form.TOPOLOGY, _stream), (Form.SINKS, _jobs)],
    ids=["sinks", "feed", "jobs"],
)
def test_micro_batches_and_jobs_tell_of_their_batches_and_count_them(
    form: Form, run: Callable[[StreamCell], None], database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_database(database)
    monkeypatch.setenv("STORMPROOF_LINEAGE_FILE", str(tmp_path / "events"))
    monkeypatch.setenv("STORMPROOF_LINEAGE_INTERVAL_S", "0")
    monkeypatch.setenv("STORMPROOF_METRICS_PORT", "0")
    with metrics_in(tmp_path / "metrics"), armed("commit.after_sink=raise@2"):
        run(StreamCell("lines", form, tmp_path, database))
    events = events_in(tmp_path / "events")
    require_told_as_recorded(events, database, "lines")
    assert {e["job"]["facets"]["jobType"]["processingType"] for e in events} == {
        "BATCH" if run is _jobs else "STREAMING"
    }
    recorded = figures_of_ledger(database)
    assert recorded[(m.ENDED.name, "committed", "")] >= 2
    assert differences(figures_of([tmp_path / "metrics"]), recorded) == {}
