"""A first start that is refused leaves nothing; nothing is bound before the first batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.databases import create_database
from support.operated import Operated
from support.queues import prepared_database, put
from support.servers import sql

from stormproof import DeltaMap, DeltaSink, PostgresMap, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.base.errors import PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.core.postgres.database import Database
from stormproof.trident.driver import opening

pytestmark = pytest.mark.postgres

NAME: Final = "first"
LINES: Final = (b"a b", b"b")
OF_LIFE: Final = (
    "select table_name from information_schema.columns where table_schema = 'stormproof' and column_name = "
)


def built(
    operated: Operated, *into: str, name: str = NAME, table: str = "t", queues: Database | None = None
) -> Topology:
    """Words of lines, into sinks: ``append``, ``evolving``, ``delta``, ``map`` or ``delta-map``."""
    database, folder = operated.cell.database, operated.cell.folder
    topology = Topology(name)
    words = topology.stream("lines", PostgresQueue(operated.cell.queue, database=queues or database)).flat_map(
        str.split, "line", schema="word string"
    )
    made: dict[str, Callable[[], Any]] = {
        "append": lambda: words.into(PostgresSink(table, name="append", database=database)),
        "evolving": lambda: words.into(
            PostgresSink("wide", name="evolving", database=database, schema_contract="evolve")
        ),
        "delta": lambda: words.into(DeltaSink(folder / "delta", name="delta")),
        "map": lambda: _counted(words, PostgresMap("counts", database=database)),
        "delta-map": lambda: _counted(words, DeltaMap(folder / "counts")),
    }
    for one in into:
        made[one]()
    return topology


def _counted(words: Any, state: Any) -> None:
    words.group_by("word").persistent_aggregate(n=count(), state=state, state_name="counts")


def run(operated: Operated, *into: str, **how: Any) -> None:
    outage_s = how.pop("outage_s", 60.0)
    operated.run(built(operated, *into, **how), outage_s=outage_s)


def left(operated: Operated) -> dict[str, int]:
    """The number of rows in each table of the ledger that has a topology's own, of claims, and of columns."""
    of_life = [f"stormproof.{name}" for (name,) in operated.sql(f"{OF_LIFE}'incarnation'")]
    tables = [*of_life, "stormproof.pending_subscription"]
    if operated.sql("select to_regclass('stormproof_sink.guard')") != [(None,)]:
        tables.append("stormproof_sink.guard")
    counts = {table: operated.sql(f"select count(*) from {table}")[0][0] for table in tables}
    columns = operated.sql("select count(*) from information_schema.columns where table_schema = 'public'")[0][0]
    return {table: n for table, n in counts.items() if n} | {"columns": columns}


def in_delta(folder: Path) -> list[str]:
    return sorted(DeltaTable(folder).to_pyarrow_table()["word"].to_pylist())


def refuse_append(operated: Operated) -> Callable[[], object]:
    operated.sql("create table t (number int)")
    return lambda: operated.sql("alter table t add column word text")


def refuse_delta(operated: Operated) -> Callable[[], object]:
    folder = operated.cell.folder / "delta"
    write_deltalake(folder, pa.table({"word": pa.array([], pa.int64())}))
    return lambda: write_deltalake(
        folder, pa.table({"word": pa.array([], pa.string())}), mode="overwrite", schema_mode="overwrite"
    )


def refuse_map(operated: Operated) -> Callable[[], object]:
    operated.sql("create table counts (word text primary key, n text)")
    return lambda: operated.sql("drop table counts")


REFUSALS: Final = {"append": refuse_append, "delta": refuse_delta, "map": refuse_map}


@pytest.fixture
def wide(operated: Operated) -> Operated:
    """With a table that a sink would add a column to, and lines in the queue."""
    operated.sql("create table wide (id bigint)")
    operated.put(*LINES)
    return operated


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refused_first_start_leaves_nothing_and_the_mended_one_goes_on(wide: Operated, what: str) -> None:
    mend = REFUSALS[what](wide)
    before = left(wide)
    for _ in range(2):
        with pytest.raises(SinkRefused, match=f"topology '{NAME}' cannot start: sink '({what}|counts)'"):
            run(wide, "evolving", what)
        assert left(wide) == before
    mend()
    run(wide, "evolving", what)
    assert sorted(wide.sql("select word from wide")) == [("a",), ("b",), ("b",)]
    wide.verify()


@pytest.mark.parametrize("what", REFUSALS)
def test_control_without_looking_first_and_taking_back_it_is_left(
    wide: Operated, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    REFUSALS[what](wide)
    monkeypatch.setattr(opening, "_look_at_new_tables", lambda *_: {})
    monkeypatch.setattr(opening, "_take_back", lambda *_: None)
    with pytest.raises(SinkRefused):
        run(wide, "evolving", what)
    assert {"stormproof.topology", "stormproof_sink.guard"} <= left(wide).keys()


@pytest.mark.parametrize("what", ["append", "delta"])
def test_where_an_operator_is_asked_only_the_topology_and_its_refusal_stay(wide: Operated, what: str) -> None:
    run(wide, what, name="other")
    before = left(wide)
    with pytest.raises(PositionMismatch, match=rf"stormproof ledger adopt {NAME} other/") as refused:
        run(wide, "evolving", what)
    added = {table: n - before.get(table, 0) for table, n in left(wide).items() if n != before.get(table, 0)}
    assert added.keys() <= {f"stormproof.{of}" for of in ("topology", "event", "backend", "graph")}
    assert wide.command("status", NAME, status=1)["topologies"][0]["refused"]["reason"] == str(refused.value)
    (life,) = wide.sql("select incarnation from stormproof.topology where name = 'other'")[0]
    wide.command("ledger", "adopt", NAME, f"other/{life}")
    run(wide, "evolving", what)
    assert len(wide.sql("select word from wide")) == 3


def test_a_refused_first_start_leaves_no_subscription_in_the_queues_own_database(
    wide: Operated, database: Database
) -> None:
    REFUSALS["map"](wide)
    queues = prepared_database(create_database(database, f"queues_of_{dict(database.parameters)['dbname']}"))
    put(queues, wide.cell.queue, LINES)
    with pytest.raises(SinkRefused):
        run(wide, "evolving", "map", queues=queues)
    assert sql(queues, "select count(*) from stormproof.pending_subscription") == [(0,)]
    wide.sql("drop table counts")
    run(wide, "evolving", "map", queues=queues)
    assert len(wide.sql("select word from wide")) == 3


@pytest.mark.parametrize("point", ["start.before_epoch", "start.after_epoch", "a table", "the subscription"])
def test_a_first_start_that_is_refused_after_an_outage_in_an_earlier_one_leaves_nothing(
    wide: Operated, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as outage:
        if point.startswith("start."):
            outage.setattr(opening, "failpoint", lambda name: away() if name == point else None)
        elif point == "a table":
            outage.setattr(opening, "require_own_stores", away)
        else:
            outage.setattr(PostgresQueue, "subscribe", away)
        with pytest.raises(StoreUnavailable):
            run(wide, "map", "append", outage_s=0.01)
    found = wide.command("status")["topologies"]
    assert [(one["last_txid"], one["problems"]) for one in found] == [(None, [])] * (point != "start.before_epoch")
    wide.sql("create table if not exists counts (word text primary key, n text); alter table counts alter n type text")
    with pytest.raises(SinkRefused):
        run(wide, "evolving", "map", "append")
    assert left(wide) | {"columns": 0} == {"columns": 0}, "but for empty tables"
    wide.sql("drop table counts")
    run(wide, "evolving", "map", "append")
    wide.verify()


def test_before_the_first_batch_a_sink_may_have_another_table_and_the_old_one_is_free(operated: Operated) -> None:
    run(operated, "append", table="typo")
    operated.put(*LINES)
    run(operated, "append", table="right_one")
    assert sorted(operated.sql("select word from right_one")) == [("a",), ("b",), ("b",)]
    run(operated, "append", name="other", table="typo")
    assert len(operated.sql("select word from typo")) == 3
    operated.verify()


def test_from_the_first_batch_on_it_may_not(operated: Operated) -> None:
    operated.put(*LINES)
    run(operated, "append", table="typo")
    with pytest.raises(PositionMismatch, match="wrote to table typo"):
        run(operated, "append", table="other")
