"""`audit verify --deep` of folds, upserts and states: keys, numbers of rows and sums, and what somebody plants in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pytest
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.plants import delta_at, rewritten
from support.topologies import source_of

from stormproof import DeltaSink, PostgresSink, Topology, count, sum_
from stormproof.core.base.arrow import pc
from stormproof.sinks.rows.comparison import Compared
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.postgres import PostgresMap

pytestmark = [pytest.mark.postgres]
NAME = "by_key"
FOLDS: Final[Mapping[str, str]] = {
    "delta": "sums",
    "delta-parts": "parts",
    "postgres": "sums",
    "postgres-parts": "parts",
}
UPSERTS: Final[Mapping[str, str]] = {"delta-newest": "newest", "postgres-newest": "newest"}
STATES: Final[Mapping[str, str]] = {
    "delta-state": "totals",
    "delta-transactional": "kept",
    "postgres-state": "totals",
    "postgres-transactional": "kept",
}
LINES = [f"c{i % 4},{i}.{i:03d},{i * 1e17},{i % 3}".encode() for i in range(16)]
ODD = [b"c1,-99999999999999999.999,,1", b"c2,,0.1,", b"\xc3\xbc/%20,1,2,3"]


def read(line: str) -> tuple[str, Decimal | None, float | None, int | None]:
    city, amount, degrees, part = line.split(",")
    return (
        city,
        Decimal(amount) if amount else None,
        float(degrees) if degrees else None,
        int(part) if part else None,
    )


def build(cell: Cell) -> Topology:
    lake, database = cell.folder / "lake", cell.database
    t = Topology(NAME)
    schema = "city string, amount decimal(20,3), degrees double, part int"
    rows = t.stream("lines", source_of(cell.queue, database)).map(read, "line", schema=schema)
    grouped = rows.group_by("city")
    sums: dict[str, Any] = {"n": count(), "amount": sum_("amount"), "degrees": sum_("degrees"), "part": sum_("part")}
    grouped.persistent_aggregate(**sums).into(
        DeltaSink(lake / "sums", name="delta"),
        DeltaSink(lake / "parts", name="delta-parts", partition_by="city"),
        PostgresSink("sums", name="postgres", database=database),
        PostgresSink("parts", name="postgres-parts", database=database),
    )
    newest: dict[str, Any] = {"mode": "upsert", "key": "city", "order_by": "amount"}
    rows.into(
        DeltaSink(lake / "newest", name="delta-newest", partition_by="part", **newest),
        PostgresSink("newest", name="postgres-newest", database=database, **newest),
    )
    grouped.persistent_aggregate(n=count(), state=DeltaMap(lake / "totals"), state_name="delta-state")
    grouped.persistent_aggregate(n=count(), state=PostgresMap("totals", database=database), state_name="postgres-state")
    kind = "transactional"
    grouped.persistent_aggregate(n=count(), state=DeltaMap(lake / "kept", kind), state_name="delta-transactional")
    kept = PostgresMap("kept", kind, database=database)
    grouped.persistent_aggregate(n=count(), state=kept, state_name="postgres-transactional")
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=5))
    columns = "city text primary key, n bigint, amount numeric(38,3), degrees double precision, part bigint"
    found.sql(f"create table parts ({columns}) partition by hash (city)")
    for part in range(2):
        found.sql(f"create table parts{part} partition of parts for values with (modulus 2, remainder {part})")
    found.put(*LINES, *ODD)
    found.run(build(found.cell))
    return found


def verified(run: Operated, status: int) -> tuple[set[str], dict[str, list[str]]]:
    report = run.command("audit", "verify", NAME, "--deep", status=status)
    return {one["sink"] for one in report["violations"]}, {one["sink"]: one["left_out"] for one in report["tables"]}


def test_folds_and_states_are_compared_whole_and_of_upserts_is_said_what_is_not(run: Operated) -> None:
    found, left_out = verified(run, 4)
    assert found == set()
    assert {sink for sink, texts in left_out.items() if not texts} == {*FOLDS, *STATES}
    assert all("rows are overwritten by key" in "".join(left_out[sink]) for sink in UPSERTS)


def test_rows_that_were_there_before_the_first_commit_are_no_violation(operated: Operated) -> None:
    """The driver has started, and nothing has come yet."""
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=5))
    columns = "city text primary key, n bigint, amount numeric(38,3), degrees double precision, part bigint"
    for table in ("sums", "parts"):
        found.sql(f"create table {table} ({columns})")
    found.sql("create table newest (city text primary key, amount numeric(20,3), degrees double precision, part int)")
    found.sql("insert into newest values ('c1', 1, 1, 1); insert into sums values ('c1', 1, 1, 1, 1)")
    found.run(build(found.cell))
    wrong, left_out = verified(found, 4)
    assert wrong == set()
    assert {sink for sink, texts in left_out.items() if texts} == {"postgres", "postgres-newest"}


def _doubled(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, rows.slice(0, 1)])


def _doubled_in_place_of_another(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows.slice(0, rows.num_rows - 1), rows.slice(0, 1)])


def _other_sum(rows: pa.Table) -> pa.Table:
    at = rows.schema.get_field_index("n")
    return rows.set_column(at, "n", pc.add(rows.column("n"), 1))


DELTA: Final[Mapping[str, Callable[[pa.Table], pa.Table]]] = {
    "a row is doubled": _doubled,
    "a row is doubled and another is gone": _doubled_in_place_of_another,
    "a row is gone": lambda rows: rows.slice(1),
    "a sum is another": _other_sum,
}
POSTGRES: Final[Mapping[str, str]] = {
    "a row is doubled": "alter table {0} drop constraint {0}_pkey; insert into {0} select * from {0} limit 1",
    "a row is gone": "delete from {0} where city = 'c1'",
    "a sum is another": "update {0} set n = n + 1 where city = 'c1'",
}


@pytest.mark.parametrize("what", DELTA)
def test_a_change_that_no_version_says_is_found(run: Operated, what: str) -> None:
    """Each as a fault of a writer beneath us would leave it: the log says that no data was changed."""
    tables = {**FOLDS, **UPSERTS, **STATES}
    planted = {sink for sink in tables if sink.startswith("delta")}
    planted -= {"delta-parts", "delta-newest"}  # a file of ours in a partitioned table would need a partition
    for sink in planted:
        rewritten(run, tables[sink], DELTA[what])
    for sink in tables.keys() - planted:
        if sink.startswith("postgres") and what in POSTGRES and not (what == "a sum is another" and sink in UPSERTS):
            run.sql(POSTGRES[what].format(tables[sink]))
            planted.add(sink)
    assert verified(run, 1)[0] == planted


def test_with_the_comparison_taken_out_they_go_unnoticed(run: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compared, "by_key", lambda *_: None)
    run.sql(POSTGRES["a sum is another"].format("sums"))
    assert verified(run, 0)[0] == set()


ANOTHER: Final = {
    "delta-state": "previous_n",
    "delta-transactional": "life",
    "postgres-state": "n",
    "postgres-transactional": "txid",
}
"""What is made another of a row of each state."""


def test_a_state_is_compared_with_what_the_txids_put(run: Operated) -> None:
    assert ANOTHER.keys() == STATES.keys()
    for sink, column in ANOTHER.items():
        if sink.startswith("postgres"):
            run.sql(f"update {STATES[sink]} set {column} = {column} + 1 where city = 'c1'")
        else:
            rewritten(run, STATES[sink], partial(_with_another, column=column))
    assert verified(run, 1)[0] == STATES.keys()


def _with_another(rows: pa.Table, *, column: str) -> pa.Table:
    values = rows.column(column).to_pylist()
    values[0] = "another" if column == "life" else (values[0] or 0) + 1
    field = rows.schema.field(column)
    return rows.set_column(rows.schema.get_field_index(column), field, pa.array(values, field.type))


def test_states_that_go_on_and_are_taken_up_after_a_kill_stay_clean(run: Operated) -> None:
    for place in ("state.after_rows", "delta.after_log_entry"):
        run.put(*LINES)
        assert run_driver(run.cell, f"{place}=kill@1") == KILLED
        run.put(*ODD)
        run.run(build(run.cell))
        found, left_out = verified(run, 4)
        assert found == set()
        assert all(not left_out[sink] for sink in STATES)


def test_control_with_contents_not_compared_a_states_value_goes_unnoticed(
    run: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compared, "_by_content", lambda *_: None)
    run.sql(f"update {STATES['postgres-state']} set previous_n = 99 where city = 'c1'")
    assert verified(run, 0)[0] == set()


@pytest.mark.parametrize("value", [b"nan", b"inf"])
def test_a_sum_that_is_not_finite_is_said_and_no_alarm(run: Operated, value: bytes) -> None:
    run.put(b"c1,1," + value + b",1")
    run.run(build(run.cell))
    found, left_out = verified(run, 4)
    assert found == set()
    assert all("'degrees': it is not finite" in left_out[sink][0] for sink in FOLDS)


def test_rows_that_were_there_before_the_first_batch_are_no_alarm(run: Operated) -> None:
    run.sql("create table taken (city text primary key, n bigint)")
    run.sql("insert into taken values ('c1', 7), ('old', 1)")
    t = Topology("taken")
    rows = t.stream("lines", source_of("by_key", run.cell.database)).map(
        read, "line", schema="city string, a decimal(20,3), b double, c int"
    )
    rows.group_by("city").persistent_aggregate(n=count()).into(
        PostgresSink("taken", name="postgres", database=run.cell.database)
    )
    run.put(*LINES)
    run.run(t)
    report = run.command("audit", "verify", "taken", "--deep", status=4)
    assert report["violations"] == []
    assert report["tables"][0]["left_out"]
    assert delta_at(run, "sums").version() > 0
