"""Lineage of real runs: what is told agrees with the ledger, through a recovery, too."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.crashes import Cell
from support.databases import at
from support.queues import prepared_database, put
from support.topologies import messages, topology

from stormproof.core.failpoint import armed
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.settings import Settings
from stormproof.trident.openlineage.events import run_id

pytestmark = pytest.mark.postgres


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
    events: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    with at(database) as connection:
        rows = connection.execute("select incarnation, txid, state, messages from stormproof.txn").fetchall()
        sinks = connection.execute("select txid, sink, rows from stormproof.txn_sink").fetchall()
    told = Counter((e["run"]["runId"], e["eventType"]) for e in events)
    assert told == Counter(
        (run_id(incarnation, txid), kind)
        for incarnation, txid, state, _ in rows
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
    table = {sink: f"words_{sink}".replace("-", "_") for _, sink, _ in sinks}
    assert rows_told == {(txid, table[sink]): number for txid, sink, number in sinks}
    versions = [
        int(o["facets"]["version"]["datasetVersion"])
        for e in events
        for o in e["outputs"]
        if e["eventType"] == "COMPLETE" and o["name"].endswith("words_delta_append")
    ]
    assert versions == sorted(set(versions))
    assert len(versions) > 2
