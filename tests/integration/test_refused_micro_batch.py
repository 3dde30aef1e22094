"""A row that a table refuses in a job or a micro-batch, which is one message: the whole of it is blocked, by a refusal that
names row, sink, SQLSTATE and the ways on; nothing is half-written.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, Schema
from support.command_line import CommandLine
from support.queues import prepared_database
from support.streams import SCHEMA, ArrowFrames, Form, StreamCell, handout
from support.verdicts import verified

from stormproof import DeltaSink, PostgresSink, exactly_once
from stormproof.core.postgres.database import Database, connect
from stormproof.errors import SinkRefused
from stormproof.topology import ExactlyOnce, StreamOutcome
from stormproof.trident.streaming.sinks import OneMessageSteps

pytestmark = pytest.mark.postgres

ROWS = handout("q", "ok", "bad", "fine")
HINT = r"stormproof retry daily 1; or .*stormproof ledger skip daily 1 strict \(with --rows"


@pytest.fixture
def cell(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamCell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return StreamCell("daily", Form.SINKS, tmp_path, prepared_database(database))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def writer(cell: StreamCell) -> ExactlyOnce:
    sinks = [PostgresSink(name, name=name, database=cell.database) for name in ("plain", "strict")]
    return exactly_once(*sinks, name=cell.name, settings=cell.settings(), frames=ArrowFrames())


def sql(cell: StreamCell, statement: str) -> list[tuple[Any, ...]]:
    with connect(cell.database, application_name="test", autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return [] if cursor.description is None else cursor.fetchall()


def values(cell: StreamCell, table: str) -> Counter[str]:
    return Counter(value for (value,) in sql(cell, f"select value from {table}"))


def strict(cell: StreamCell) -> None:
    sql(
        cell,
        "create table strict (value text, id text); alter table strict add constraint rule check (value <> 'bad')",
    )


def take(write: ExactlyOnce, form: str) -> None:
    if form == "job":
        write.once(ROWS, "a")
    else:
        write(ROWS, 0)


def refused(cell: StreamCell, form: str) -> SinkRefused:
    with writer(cell) as write, pytest.raises(SinkRefused) as caught:
        take(write, form)
    return caught.value


@pytest.mark.parametrize("form", ["job", "micro-batch"])
def test_the_refusal_names_the_row_and_the_next_call_completes_the_batch(
    cell: StreamCell, command: CommandLine, form: str
) -> None:
    strict(cell)
    error = refused(cell, form)
    assert error.details["sqlstate"] == "23514"
    assert '"value": "bad"' in str(error.details["row"])
    assert (error.details["sink"], error.details["txid"]) == ("strict", 1)
    assert re.search(rf"sink 'strict'.*SQLSTATE 23514.*\"rule\".*\"value\": \"bad\".*{HINT}", str(error))
    assert (values(cell, "strict"), values(cell, "plain")) == (Counter(), Counter(["ok", "bad", "fine"]))
    assert re.search(HINT, str(refused(cell, form)))  # until somebody decides
    sql(cell, "alter table strict drop constraint rule")
    command("retry", cell.name, "1")
    with writer(cell) as write:
        take(write, form)
    assert sql(cell, "select txid, state, attempt from stormproof.txn") == [(1, "committed", 1)]
    assert values(cell, "strict") == values(cell, "plain") == Counter(["ok", "bad", "fine"])
    assert verified(cell.name, cell.database).clean


def test_the_refused_rows_alone_are_given_up_on_record(cell: StreamCell, command: CommandLine) -> None:
    strict(cell)
    refused(cell, "job")
    command("ledger", "skip", cell.name, "1", "strict", "--rows", "--by", "Ada", "--why", "known")
    with writer(cell) as write:
        assert write.once(ROWS, "a").outcome is not StreamOutcome.COMMITTED
    assert values(cell, "strict") == Counter(["ok", "fine"])
    assert values(cell, "plain") == Counter(["ok", "bad", "fine"])
    assert sql(cell, "select message, sqlstate, row like '%bad%' from stormproof.reject") == [(None, "23514", True)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_delta_table_names_the_row(cell: StreamCell, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "strict"
    DeltaTable.create(path, Schema.from_arrow(SCHEMA)).alter.add_constraint({"rule": "value <> 'bad'"})
    sink = (
        DeltaSink(path, name="strict")
        if mode == "append"
        else DeltaSink(path, name="strict", mode="upsert", key="id", order_by="any")
    )
    with (
        exactly_once(sink, name=cell.name, settings=cell.settings(), frames=ArrowFrames()) as write,
        pytest.raises(SinkRefused, match=r"sink 'strict'.*'rule' \(value != 'bad'\).*bad.*stormproof retry daily 1"),
    ):
        write.once(ROWS, "a")
    assert DeltaTable(path).to_pyarrow_table().num_rows == 0


def test_control_a_sink_that_does_not_look_for_the_row_does_not_name_it(
    cell: StreamCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneMessageSteps, "rejects_max", lambda *_: None)
    sql(
        cell,
        "create table strict (value text, id text);"
        "create function no() returns trigger language plpgsql as"
        " 'begin if new.value = ''bad'' then raise exception ''not this''; end if; return new; end';"
        "create trigger t before insert on strict for each row execute function no()",
    )
    assert "bad" not in str(refused(cell, "job"))
