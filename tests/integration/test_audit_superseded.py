"""`audit verify` compares how many rows of an upsert changed nothing: by ledger, sink and prepared rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.topologies import source_of

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.base.failpoint import FAILPOINTS

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]
NAME = "newest"


def parsed(line: str) -> list[tuple[str, int]]:
    return [(word[0], int(word[1:])) for word in line.split()]


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(parsed, "line", schema="k string, v int")
    upsert: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "v"}
    rows.into(
        DeltaSink(cell.folder / "lake" / "newest", name="delta", **upsert),
        PostgresSink("newest", name="postgres", database=cell.database, **upsert),
        PostgresSink("every", name="every", database=cell.database),
    )
    return t


@pytest.fixture
def upserting(operated: Operated) -> Operated:
    operated.sql("create table newest (k text primary key, v int check (v < 90))")
    return replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=5))


def some_lines(seed: int, number: int = 30, highest: int = 95) -> list[bytes]:
    random = Random(seed)
    return [
        " ".join(f"{random.choice('abcde')}{random.randint(1, highest)}" for _ in range(random.randint(1, 4))).encode()
        for _ in range(number)
    ]


def run(upserting: Operated, lines: list[bytes]) -> None:
    upserting.put(*lines)
    upserting.run(build(upserting.cell), rejects_max_share=1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_late_rows_and_rejected_ones_is_clean(upserting: Operated, seed: int) -> None:
    """Of a rejected message's keys earlier rows take the place; the ledger and both sinks count the same."""
    run(upserting, some_lines(seed))
    counted = dict(upserting.sql("select sink, sum(superseded)::int from stormproof.txn_sink group by sink"))
    assert counted["postgres"] > 0
    assert counted["delta"] > 0
    assert upserting.sql("select count(*) > 0 from stormproof.reject") == [(True,)]
    report = upserting.verify()
    assert report["violations"] == []
    assert "superseded_not_compared" not in upserting.kinds("notices", report)


def in_ledger(upserting: Operated, more: int, sink: str) -> None:
    upserting.sql(f"update stormproof.txn_sink set superseded = superseded + {more} where txid = 3 and sink = '{sink}'")


def in_postgres(upserting: Operated, more: int) -> None:
    upserting.sql(
        "insert into stormproof_sink.superseded "
        f"select topology, incarnation, sink, txid, {more}, 0 from stormproof_sink.evidence "
        "where sink = 'postgres' and txid = 3 "
        "on conflict (topology, incarnation, sink, txid) do update set rows = stormproof_sink.superseded.rows + "
        f"{more}"
    )


def in_delta(upserting: Operated, more: int) -> None:
    """Into the log, behind delta-rs's back."""
    for path in sorted(Path(upserting.cell.folder, "lake", "newest", "_delta_log").glob("*.json")):
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for entry in entries:
            info = entry.get("commitInfo", {})
            if info.get("stormproof.txid") == "3":
                info["stormproof.superseded"] = str(int(info.get("stormproof.superseded", 0)) + more)
                path.write_text("".join(json.dumps(one) + "\n" for one in entries))
                return
    raise AssertionError("no version has txid 3")


def both(spoil: Callable[[Operated, int], None], sink: str) -> Callable[[Operated], None]:
    def spoiled(upserting: Operated) -> None:
        spoil(upserting, 1000)
        in_ledger(upserting, 1000, sink)

    return spoiled


def none_of_them(upserting: Operated) -> None:
    """As if nobody had counted: some rows of the batch were superseded before they came to the table."""
    upserting.sql("update stormproof.txn_sink set superseded = 0 where sink = 'postgres'")
    upserting.sql("delete from stormproof_sink.superseded")


SPOILED: dict[str, tuple[str, Callable[[Operated], None]]] = {
    "ledger, of delta": ("delta", lambda one: in_ledger(one, 1, "delta")),
    "ledger, of postgres": ("postgres", lambda one: in_ledger(one, 1, "postgres")),
    "ledger, of an append": ("every", lambda one: in_ledger(one, 1, "every")),
    "delta": ("delta", lambda one: in_delta(one, 1)),
    "postgres": ("postgres", lambda one: in_postgres(one, 1)),
    "delta, and the ledger alike": ("delta", both(in_delta, "delta")),
    "postgres, and the ledger alike": ("postgres", both(in_postgres, "postgres")),
    "nobody counts": ("postgres", none_of_them),
}


@pytest.mark.parametrize("what", SPOILED)
def test_control_a_wrong_number_is_found(upserting: Operated, what: str) -> None:
    run(upserting, some_lines(9, highest=80))
    upserting.verify()
    sink, spoil = SPOILED[what]
    spoil(upserting)
    report = upserting.verify(status=1)
    assert {(found["kind"], found["sink"]) for found in report["violations"]} == {("evidence_differs", sink)}
    assert all("changed nothing" in found["text"] for found in report["violations"])


POINTS = [
    "commit.after_sink",
    "delta.after_log_entry",
    "postgres.after_rejects",
    "finish.before_commit",
    "finish.after",
]


def test_a_driver_that_dies_counts_no_row_twice(upserting: Operated) -> None:
    assert set(POINTS) <= FAILPOINTS.keys()
    cell = replace(upserting.cell, rejects_max_share=1.0)
    for number, point in enumerate(POINTS):
        upserting.put(*some_lines(number, 8), b"a95")
        assert run_driver(cell, f"{point}=kill") == KILLED, point
    assert run_driver(cell) == 0
    assert upserting.verify()["violations"] == []
