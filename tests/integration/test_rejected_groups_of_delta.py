"""A group whose new total a Delta table refuses: its own messages are rejected there, every other group is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from support.crashes import KILLED, Cell, run_driver
from support.grouping import counts_of, taken
from support.operated import Operated
from support.topologies import source_of

from stormproof import DeltaSink, Topology, count, max_, sum_
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.sink import Lineage
from stormproof.sinks.delta import judge

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]

NAME = "lake-totals"
LINES = [b"a b", b"bad c", b"d", b"e bad bad f", b"a c", b"g", b"a g", b"c h", b"i", b"a"]


def place(folder: Path) -> Path:
    return folder / "lake" / "totals"


def build(cell: Cell) -> Topology:
    """The number of each word in all, and its longest line."""
    t = Topology(NAME)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    words = lines.flat_map(lambda line: [(w, len(line)) for w in line.split()], "line", schema="word string, size int")
    words.group_by("word").persistent_aggregate(n=count(), longest=max_("size")).into(
        DeltaSink(str(place(cell.folder)), name="totals")
    )
    return t


@pytest.fixture
def lake(operated: Operated) -> Operated:
    return replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=100))


def run(lake: Operated) -> Any:
    return lake.run(build(lake.cell))


def make(lake: Operated, rule: str) -> None:
    schema = pa.schema([("word", pa.string()), ("n", pa.int64()), ("longest", pa.int32())])
    DeltaTable.create(place(lake.cell.folder), Schema.from_arrow(schema)).alter.add_constraint({"few": rule})


def totals(lake: Operated) -> Counter[str]:
    rows = DeltaTable(place(lake.cell.folder)).to_pyarrow_table().to_pylist()
    return Counter({row["word"]: row["n"] for row in rows})


def rejected(lake: Operated) -> list[bytes]:
    return [bytes(payload) for (payload,) in lake.sql("select payload from stormproof.reject order by number")]


def out_of(lines: Sequence[bytes], kept: Sequence[bytes]) -> list[bytes]:
    return [line for line in lines if line not in kept]


def more_than(most: int) -> Any:
    return lambda _word, n: n > most


def require(lake: Operated, before: Sequence[bytes], lines: Sequence[bytes], kept: Sequence[bytes]) -> None:
    assert totals(lake) == counts_of(before) + counts_of(kept)
    assert rejected(lake) == out_of(lines, kept)
    assert lake.kinds("notices", lake.verify()) == ["rejected"]


def test_a_total_that_a_check_refuses_takes_its_own_messages(lake: Operated) -> None:
    make(lake, "n <= 3")
    before = [b"a", b"g b"]
    lake.put(*before)
    run(lake)
    lake.put(*LINES)
    kept = taken(LINES, more_than(3), counts_of(before))
    assert run(lake).rejected == len(LINES) - len(kept)
    require(lake, before, LINES, kept)
    ((error,), *_) = lake.sql("select error from stormproof.reject order by number")
    assert "CHECK constraint 'few' (n <= 3)" in error


def test_a_group_that_is_new_is_refused_likewise(lake: Operated) -> None:
    make(lake, "word <> 'bad'")
    lake.put(*LINES)
    run(lake)
    require(lake, [], LINES, taken(LINES, lambda word, _n: word == "bad"))


def test_a_constraint_that_came_while_a_driver_ran_is_kept(lake: Operated) -> None:
    lake.put(b"a")
    run(lake)
    DeltaTable(place(lake.cell.folder)).alter.add_constraint({"few": "n <= 2 OR longest > 100"})
    lake.put(*LINES)
    run(lake)
    require(lake, [b"a"], LINES, taken(LINES, more_than(2), counts_of([b"a"])))


def build_sums(cell: Cell, lineage: Lineage | bool = False) -> Topology:
    """The sum of the numbers behind each word."""
    t = Topology(NAME)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    pairs = lines.map(lambda line: (line.split()[0], int(line.split()[1])), "line", schema="word string, size long")
    sums = pairs.group_by("word").persistent_aggregate(n=sum_("size"))
    sums.into(DeltaSink(str(place(cell.folder)), name="totals", lineage=lineage))
    return t


@pytest.mark.parametrize("lineage", [False, Lineage(message=None)], ids=["plain", "lineage"])
def test_a_sum_that_its_column_cannot_hold_takes_its_own_messages(lake: Operated, lineage: Lineage | bool) -> None:
    half = 2**62
    build = partial(build_sums, lineage=lineage)
    lake = replace(lake, cell=replace(lake.cell, build=build))
    lake.put(f"a {half}".encode(), b"b 1")
    lake.run(build(lake.cell))
    lake.put(f"a {half}".encode(), b"b 2", b"c 3")
    assert lake.run(build(lake.cell)).rejected == 1
    assert totals(lake) == Counter(a=half, b=3, c=3)
    ((error,),) = lake.sql("select error from stormproof.reject")
    assert "the range of its column 'n'" in error
    assert lake.kinds("notices", lake.verify()) == ["rejected"]


def test_a_rule_that_is_asked_of_the_added_rows_alone_refuses_the_wrong_groups(
    lake: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the batch adds at most 3 of each word, so nothing is found, and the batch is blocked."""
    make(lake, "n <= 3")
    lake.put(b"a", b"a b")
    run(lake)
    monkeypatch.setattr(judge, "_merged", lambda *_: 'SELECT *, true AS "_stormproof_fits_n" FROM added')
    lake.put(b"a", b"a c")
    with pytest.raises(Exception, match="refuses it"):
        run(lake)
    assert totals(lake) == Counter(a=2, b=1)


POINTS = [name for name in FAILPOINTS if name.startswith(("recount.", "commit.", "delta.", "prepare."))]


@pytest.mark.timeout(600)
def test_a_driver_killed_at_each_point_rejects_the_same_messages_once(lake: Operated) -> None:
    """Each start dies at another place, behind a batch that the table holds; the last one runs to the end."""
    lake = replace(lake, cell=replace(lake.cell, rejects_max_share=1.0))
    make(lake, "n <= 3 OR word <> 'bad'")
    lines = [b"bad bad bad", b"g"]
    lake.put(*lines)
    run(lake)
    ends: dict[str, int] = {}
    refused = 0
    for number, point in enumerate(POINTS):
        lake.put(b"a%d b" % number, b"bad b", b"b c%d" % number)
        lines += [b"a%d b" % number, b"b c%d" % number]
        refused += 1
        ends[point] = run_driver(lake.cell, f"{point}=kill")
    assert set(ends.values()) <= {0, KILLED}, ends
    assert ends["recount.after"] == KILLED
    assert run_driver(lake.cell) == 0
    assert totals(lake) == counts_of(lines)
    assert [bytes(payload) for (payload,) in lake.sql("select payload from stormproof.reject")] == [b"bad b"] * refused
    assert lake.kinds("violations", lake.verify()) == []
