"""Names of functions: several in one query, one that was renamed, one that joins late; and each way out that is named."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.command_line import CommandLine
from support.crashes import KILLED
from support.queues import prepared_database
from support.stream_chain import require_exact
from support.streams import (
    ArrowFrames,
    Form,
    Handout,
    Opener,
    StandInQuery,
    StreamCell,
    handout,
    put_file,
    run_stream_driver,
)
from support.verdicts import is_known, verified

from stormproof import PostgresSink, exactly_once
from stormproof.core.base.failpoint import armed
from stormproof.core.postgres.database import Database
from stormproof.errors import Fenced, PositionMismatch, StoreUnavailable, UsageError
from stormproof.topology import ExactlyOnce
from stormproof.trident.ledger import ledger as ledger_module
from stormproof.trident.streaming.foreach_batch import StreamOutcome, StreamResult

pytestmark = pytest.mark.postgres
forms = pytest.mark.parametrize("form", Form)
QUERY = str(uuid.UUID(int=7))


@pytest.fixture
def cell(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamCell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return StreamCell("orders", Form.SINKS, tmp_path, prepared_database(database))


def sql(cell: StreamCell, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(cell.database.conninfo, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), values)
        return [] if cursor.description is None else cursor.fetchall()


def incarnation(cell: StreamCell) -> str:
    ((found,),) = sql(cell, "select incarnation from stormproof.topology where name = %s", cell.name)
    return str(found)


def epoch(cell: StreamCell) -> int:
    ((found,),) = sql(cell, "select epoch from stormproof.topology where name = %s", cell.name)
    return int(found)


def notices(name: str, cell: StreamCell) -> list[str]:
    report = verified(name, cell.database)
    assert report.clean, (report.violations, report.unknowns)
    return [n.text for n in report.notices if n.kind == "began_late"]


# -- several functions in one query ----------------------------------------------------------------------------------


@forms
def test_two_functions_of_one_query_each_take_every_batch(cell: StreamCell, opened: Opener, form: Form) -> None:
    one, two = cell, replace(cell, name="late-orders", form=form)
    results: list[StreamResult] = []

    def run(batch: int, *values: str) -> None:
        for function in functions:
            function(handout(QUERY, *values), batch)

    functions = [opened(one, None, results.append), opened(two, None, results.append)]
    run(0, "a", "b")
    functions[0](handout(QUERY, "c"), 1)  # the driver ends between the two
    for function in functions:
        function.close()
    functions = [opened(one, None, results.append), opened(two, None, results.append)]
    run(1, "c")
    run(2, "d")
    assert [r.outcome for r in results] == [StreamOutcome.COMMITTED] * 3 + [
        StreamOutcome.SUPPRESSED,
        *[StreamOutcome.COMMITTED] * 3,
    ]
    for each in (one, two):
        require_exact(each, ["a", "b", "c", "d"])
        assert notices(each.name, cell) == []
    assert incarnation(one) == QUERY
    assert re.fullmatch(rf"{QUERY}-[0-9a-f]{{8}}", incarnation(two))


@pytest.mark.parametrize("place", ["open.after", "prepare.after", "postgres.after_commit", "finish.before_commit"])
def test_each_of_two_functions_outlives_a_lost_answer(cell: StreamCell, opened: Opener, place: str) -> None:
    cells = [cell, replace(cell, name="late-orders")]
    functions = [opened(each) for each in cells]
    for batch, values in enumerate((["a"], ["b", "c"])):
        for function in functions:
            with armed(f"{place}=raise"):
                function(handout(QUERY, *values), batch)
    for each in cells:
        require_exact(each, ["a", "b", "c"])
        assert notices(each.name, cell) == []


def test_two_functions_of_one_name_fence_each_other(cell: StreamCell, opened: Opener) -> None:
    """The control of the two before: it is the name that makes them two."""
    one, two = opened(cell), opened(cell)
    one(handout(QUERY, "a"), 0)
    two(handout(QUERY, "a"), 0)
    with pytest.raises(Fenced):
        one(handout(QUERY, "b"), 1)
    require_exact(cell, ["a"])


def test_a_life_that_another_function_takes_at_the_same_instant_is_not_waited_for(
    cell: StreamCell, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(cell)(handout(QUERY, "a"), 0)
    look = ledger_module.life_of
    looks: list[str] = []

    def too_early(connection: sa.Connection, topology: str, new_incarnation: Callable[[], str]) -> str:
        looks.append(topology)
        return QUERY if len(looks) == 1 else look(connection, topology, new_incarnation)

    monkeypatch.setattr(ledger_module, "life_of", too_early)
    other = replace(cell, name="late-orders")
    opened(other)(handout(QUERY, "a"), 0)
    assert looks == ["late-orders"] * 2
    assert incarnation(other).startswith(f"{QUERY}-")
    require_exact(other, ["a"])


def test_a_function_that_was_refused_before_it_took_anything_leaves_its_query_to_others(
    cell: StreamCell, opened: Opener
) -> None:
    def into(table: str, name: str, query: str) -> None:
        sink = PostgresSink(table, name="pg", database=cell.database)
        function = exactly_once(sink, name=name, settings=cell.settings(), frames=ArrowFrames())
        try:
            function(handout(query, "a"), 0)
        finally:
            function.close()

    into("taken", "first", QUERY)
    other = str(uuid.UUID(int=8))
    with pytest.raises(PositionMismatch, match="Use another table or the old name"):
        into("taken", "second", other)
    with pytest.raises(PositionMismatch, match="Use another table or the old name"):
        into("taken", "third", other)
    into("free", "fourth", other)
    assert sql(cell, "select value from free") == [("a",)]


# -- a function that was renamed, or joins late ----------------------------------------------------------------------


@forms
def test_a_renamed_function_is_refused_at_once_by_both_names(cell: StreamCell, opened: Opener, form: Form) -> None:
    cell = replace(cell, form=form)
    renamed = replace(cell, name="renamed")
    function = opened(cell)
    function(handout(QUERY, "a"), 0)
    function(handout(QUERY, "b"), 1)
    function.close()
    before, frames = epoch(cell), ArrowFrames()
    with pytest.raises(PositionMismatch, match=r"'orders' was renamed to 'renamed'.*Nothing was written") as refused:
        opened(renamed, frames)(handout(QUERY, "c"), 2)
    assert refused.value.details == {
        "known_as": ["orders"],
        "ledger_query": QUERY,
        "ledger_batch": 1,
        "query": QUERY,
        "batch": 2,
        "adopt": f"{QUERY}:1",
    }
    for part in (
        "batch 2",
        "stands at batch 1",
        "Keep the name 'orders'",
        "a new checkpoint, another name and other tables",
    ):
        assert part in str(refused.value)
    assert frames.computed == 0
    assert epoch(cell) == before
    assert not is_known("renamed", cell.database)
    # The ways out. The name is kept:
    function = opened(cell)
    function(handout(QUERY, "c"), 2)
    function.close()
    require_exact(cell, ["a", "b", "c"])
    # A new checkpoint, another name and other tables:
    fresh, again = str(uuid.UUID(int=9)), opened(replace(cell, name="anew"))
    for batch, value in enumerate("abc"):
        again(handout(fresh, value), batch)
    require_exact(replace(cell, name="anew"), ["a", "b", "c"])
    assert notices("anew", cell) == []
    # The place is adopted:
    adopting = replace(renamed, adopt=f"{QUERY}:2")
    function = opened(adopting)
    function(handout(QUERY, "d"), 3)
    function(handout(QUERY, "e"), 4)
    function.close()
    require_exact(renamed, ["d", "e"])
    assert notices("renamed", cell) == [
        f"renamed begins at batch 3 of streaming query {QUERY}; batches 0 to 2 are not in its sinks"
    ]
    ((detail,),) = sql(cell, "select detail from stormproof.event where kind = 'operator'")
    assert (detail["from"], detail["query"], detail["batch"]) == (f"{QUERY}:2", QUERY, 3)
    with pytest.raises(PositionMismatch, match="'renamed' stands at batch 4 of it, 'orders' stands at batch 2"):
        opened(replace(adopting, name="third"))(handout(QUERY, "f"), 5)  # left in the code, it opens no second door


@forms
@pytest.mark.parametrize("place", ["prepare.after", "stream.after_register"])
def test_a_function_that_is_renamed_in_the_middle_of_its_first_batch_is_refused(
    cell: StreamCell, opened: Opener, form: Form, place: str
) -> None:
    """Else the same rows would come twice, once the old name is run again."""
    if form is Form.SINKS and place.startswith("stream."):
        pytest.skip("no message is registered there")
    cell = replace(cell, form=form)
    put_file(cell.folder, ["a", "b"])
    assert run_stream_driver(cell, f"{place}=kill") == KILLED
    batch, first = next(StandInQuery(cell.folder, cell.checkpoint).batches())
    with pytest.raises(PositionMismatch, match="what 'orders' left may be on its way") as refused:
        opened(replace(cell, name="renamed"))(first, batch)
    assert refused.value.details["adopt"] == f"{first.query}:0"
    function = opened(cell)
    function(first, batch)
    require_exact(cell, ["a", "b"])
    # Beside it, in its own process, a second one may begin: what the first one took is done.
    second = replace(cell, name="second")
    opened(second)(first, batch)
    require_exact(second, ["a", "b"])


def test_while_a_first_batch_is_computed_another_name_cannot_take_it_into_the_same_table(cell: StreamCell) -> None:
    """Nothing of the first one is on record yet, but that it writes to this table."""

    def function(name: str) -> ExactlyOnce:
        sink = PostgresSink("shared", name="pg", database=cell.database)
        return exactly_once(sink, name=name, settings=cell.settings(), frames=ArrowFrames())

    def computed() -> pa.Table:
        with function("renamed") as other, pytest.raises(PositionMismatch, match="was claimed by topology 'orders'"):
            other(handout(QUERY, "a"), 0)
        return pa.table({"value": ["a"], "id": ["1"]})

    with function("orders") as first:
        first(Handout(QUERY, computed), 0)
    assert sql(cell, "select value from shared") == [("a",)]


def test_a_renamed_function_goes_on_in_the_same_table_by_the_two_ways_out_that_it_is_told(
    cell: StreamCell, command: CommandLine
) -> None:
    def take(name: str, batch: int, value: str, adopt: str | None = None) -> None:
        sink = PostgresSink("shared", name="pg", database=cell.database)
        function = exactly_once(sink, name=name, adopt=adopt, settings=cell.settings(), frames=ArrowFrames())
        try:
            function(handout(QUERY, value), batch)
        finally:
            function.close()

    take("orders", 0, "a")
    with pytest.raises(PositionMismatch) as refused:
        take("renamed", 1, "b")
    adopt = str(refused.value.details["adopt"])
    with pytest.raises(PositionMismatch, match="this topology is that one under a new name") as refused:
        take("renamed", 1, "b", adopt)
    told = re.search(r"stormproof (ledger adopt renamed \S+)", str(refused.value))
    assert told is not None
    command(*told[1].split())
    take("renamed", 1, "b", adopt)
    take("renamed", 2, "c")
    assert sorted(sql(cell, "select value from shared")) == [("a",), ("b",), ("c",)]
    assert len(notices("renamed", cell)) == 1


def test_a_second_function_that_joins_a_running_query_has_to_say_so(cell: StreamCell, opened: Opener) -> None:
    one, two = cell, replace(cell, name="late-orders")
    first = opened(one)
    first(handout(QUERY, "a"), 0)
    first(handout(QUERY, "b"), 1)
    with pytest.raises(
        PositionMismatch, match="added to a query that had begun without it; batch 0 is not in its sinks"
    ):
        opened(two)(handout(QUERY, "b"), 1)
    second = opened(replace(two, adopt=f"{QUERY}:1"))
    second(handout(QUERY, "b"), 1)
    for batch, value in ((2, "c"), (3, "d")):
        first(handout(QUERY, value), batch)
        second(handout(QUERY, value), batch)
    require_exact(one, ["a", "b", "c", "d"])
    require_exact(two, ["b", "c", "d"])


@forms
@pytest.mark.parametrize(("batch", "lacks"), [(0, None), (1, "batch 0 is"), (7, "batches 0 to 6 are")])
def test_what_came_before_the_first_batch_is_said_and_stands_on_record(
    cell: StreamCell,
    opened: Opener,
    command: CommandLine,
    caplog: pytest.LogCaptureFixture,
    form: Form,
    batch: int,
    lacks: str | None,
) -> None:
    cell = replace(cell, form=form)
    function = opened(cell)
    with caplog.at_level(logging.WARNING, "stormproof.txn"):
        function(handout(QUERY, "a"), batch)
        function(handout(QUERY, "b"), batch + 1)
    function.close()
    text = f"begins at batch {batch} of streaming query {QUERY}; {lacks} not in its sinks"
    assert [r.message for r in caplog.records] == ([] if lacks is None else [f"stream orders: {text}"])
    assert notices("orders", cell) == ([] if lacks is None else [f"orders {text}"])
    status = command.text("status")
    assert f"orders: streaming query {QUERY} stands at batch {batch + 1}" in status
    assert (f"orders: {text}" in status) == (lacks is not None)
    assert "fed by a streaming query" in command("pause", "orders", status=2)["error"]["message"]
    (found,) = command("status")["topologies"]
    assert found["stream"] == {"query": QUERY, "batch": batch + 1, "began_query": QUERY, "began_batch": batch}


# -- the other ways out that an error names --------------------------------------------------------------------------


@pytest.mark.parametrize(("query", "batch"), [("other", 0), (QUERY, 0), (QUERY, 5)])
def test_where_a_place_does_not_fit_a_new_checkpoint_with_other_name_and_tables_does(
    cell: StreamCell, opened: Opener, query: str, batch: int
) -> None:
    function = opened(cell)
    function(handout(QUERY, "a"), 0)
    function(handout(QUERY, "b"), 1)
    function.close()
    with pytest.raises(PositionMismatch, match="another name and other tables"):
        opened(cell)(handout(query, "x"), batch)
    fresh = query if query != QUERY else str(uuid.UUID(int=9))
    anew = replace(cell, name="anew")
    opened(anew)(handout(fresh, "x"), 0)
    require_exact(anew, ["x"])
    require_exact(cell, ["a", "b"])


def test_each_query_gets_a_function_with_name_and_tables_of_its_own(cell: StreamCell, opened: Opener) -> None:
    shared = opened(cell)
    shared(handout(QUERY, "a"), 0)
    other = str(uuid.UUID(int=8))
    with pytest.raises(UsageError, match="a function of its own, with a name and tables of its own"):
        shared(handout(other, "x"), 0)
    own = replace(cell, name="own")
    opened(own)(handout(other, "x"), 0)
    opened(cell)(handout(QUERY, "b"), 1)
    require_exact(cell, ["a", "b"])
    require_exact(own, ["x"])


# -- negative control ------------------------------------------------------------------------------------------------


def test_control_with_the_querys_id_alone_as_life_a_second_function_cannot_begin(
    cell: StreamCell, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "life_of", lambda *_: QUERY)
    opened(cell)(handout(QUERY, "a"), 0)
    two = replace(cell, name="late-orders")
    sink = PostgresSink("second", database=cell.database)
    settings = cell.settings().model_copy(update={"outage_s": 0.0})
    function = exactly_once(sink, name=two.name, settings=settings, frames=ArrowFrames())
    with pytest.raises(StoreUnavailable):
        function(handout(QUERY, "a"), 0)
