"""`audit verify --deep`: changes that somebody plants in a sink's table are found, or are said not to be looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.crashes import Cell
from support.operated import Operated
from support.plants import DELTA, POSTGRES, plant
from support.topologies import source_of

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.postgres.database import Database
from stormproof.sinks.protocol import Sink

pytestmark = [pytest.mark.postgres]
NAME = "deep"
LINES = [f"{i}|k{i % 5},{i};k{i % 3},{i + 100}".encode() for i in range(12)]
SCHEMA = "k string, at bigint, made string"
UPSERT: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at"}


def rows_of(line: str) -> list[tuple[str, int, str]]:
    number, _, pieces = line.partition("|")
    return [(k, int(at), number) for k, at in (one.split(",") for one in pieces.split(";") if one)]


def sinks_of(folder: Path, database: Database) -> list[Sink]:
    lake = folder / "lake"
    return [
        DeltaSink(lake / "plain", name="delta"),
        DeltaSink(lake / "traced", name="delta-lineage", lineage=True),
        DeltaSink(lake / "newest", name="delta-upsert", **UPSERT),
        DeltaSink(lake / "newest_traced", name="delta-upsert-lineage", **UPSERT, lineage=True),
        PostgresSink("plain", name="postgres", database=database),
        PostgresSink("traced", name="postgres-lineage", database=database, lineage=True),
        PostgresSink("newest", name="postgres-upsert", database=database, **UPSERT),
        PostgresSink("newest_traced", name="postgres-upsert-lineage", database=database, **UPSERT, lineage=True),
    ]


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(*sinks_of(cell.folder, cell.database))
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=3))
    found.put(*LINES)
    found.run(build(found.cell))
    return found


TABLES = {
    "delta": "plain",
    "delta-lineage": "traced",
    "delta-upsert": "newest",
    "delta-upsert-lineage": "newest_traced",
    "postgres": "plain",
    "postgres-lineage": "traced",
    "postgres-upsert": "newest",
    "postgres-upsert-lineage": "newest_traced",
}
EVERY = frozenset(TABLES)
APPENDS = frozenset(name for name in TABLES if "upsert" not in name)
DELTAS = frozenset(name for name in TABLES if "delta" in name)
FOUND = {
    "a row is changed": APPENDS | DELTAS,
    "a row is deleted": APPENDS | DELTAS,
    "a row is added": EVERY - {"postgres-upsert"},
    "a row is doubled": APPENDS | DELTAS,
    "a row is doubled and another deleted": APPENDS - DELTAS,
    "two rows swap a value": APPENDS - DELTAS,
    "a file is replaced": APPENDS & DELTAS,
    "an OPTIMIZE changes a row": APPENDS & DELTAS,
    "an OPTIMIZE doubles a row and drops another": APPENDS & DELTAS | {"delta-upsert-lineage"},
    "an older version is restored": DELTAS,
    "an older copy is restored": APPENDS - DELTAS,
}
"""The tables in which a change is found. Where it is not, the sink says so: what it did not compare."""


def test_an_untouched_run_is_clean(run: Operated) -> None:
    report = run.command("audit", "verify", NAME, "--deep")
    assert report["violations"] == []
    assert {table["sink"]: table["rows"] for table in report["tables"]} == {
        name: 24 if name in APPENDS else 0 for name in TABLES
    }


@pytest.mark.parametrize("what", sorted(FOUND))
def test_a_planted_change_is_found_or_said_not_to_be_looked_for(run: Operated, what: str) -> None:
    planted = set[str]()
    for name, table in TABLES.items():
        store = name.partition("-")[0]
        if what not in (DELTA if store == "delta" else POSTGRES) or (
            "doubled" in what and name.startswith("postgres-up")
        ):
            continue  # its key is unique
        plant(run, store, table, what)
        planted.add(name)
    report = run.command("audit", "verify", NAME, "--deep", status=1)
    found = {violation["sink"] for violation in report["violations"]}
    assert found == FOUND[what] & planted
    left_out = {table["sink"] for table in report["tables"] if table["left_out"]}
    assert planted - found <= left_out
