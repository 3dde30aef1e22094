"""docs/postgres_queue.md: its code and its SQL run in order, its tables say what is so."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa

from stormproof import PostgresQueue
from stormproof.core.contract.payload import decoder_for
from stormproof.core.postgres.database import Database
from stormproof.errors import TopologyError
from stormproof.migrations import migrate
from stormproof.source import PendingSource

PAGE = (Path(__file__).parents[2] / "docs" / "postgres_queue.md").read_text()


@pytest.mark.postgres
def test_everything_on_the_page_puts_messages(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.sqlalchemy_url.render_as_string(hide_password=False))
    make_schema(database)
    names: dict[str, Any] = {}
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        for language, text in re.findall(r"```(python|sql)\n(.*?)```", PAGE, re.DOTALL):
            if language == "python":
                exec(text, names)  # noqa: S102 - the page's own code
            else:
                connection.execute(text)
    orders: PostgresQueue = names["orders"]
    put = [json.loads(message.payload)["order_id"] for message in orders.peek(100)]
    assert put == [0, 1, 2, 7, 8, 7, 9]
    decoded = orders.decoder.decode(pa.array([message.payload for message in orders.peek(100)], pa.binary()))
    assert not decoded.failed
    orders.close()


def make_schema(database: Database) -> None:
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    migrate(engine)
    engine.dispose()


def test_bytes_beside_other_columns_are_refused_when_the_queue_is_made() -> None:
    with pytest.raises(TopologyError, match="binary"):
        PostgresQueue("q", schema="a int, b binary")


@pytest.mark.parametrize("payload", [b'{"c": NaN}', b'{"c": Infinity}', b"[1]", b"no json", b"\xff"])
def test_what_is_not_json_fails_alone(payload: bytes) -> None:
    decoded = decoder_for("c double, d int").decode(pa.array([payload, b'{"c": 1.5}'], pa.binary()))
    assert [row for row, _ in decoded.failed] == [0]


def test_a_missing_key_in_a_column_that_is_not_null_fails() -> None:
    decoded = decoder_for("a int not null, b int").decode(pa.array([b'{"b": 1}', b'{"a": 1}'], pa.binary()))
    assert [row for row, _ in decoded.failed] == [0]


def test_the_defaults_on_the_page_are_the_codes() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d.,]+) \|", PAGE, re.MULTILINE))
    defaults = {
        name: parameter.default
        for of in (PendingSource, PostgresQueue)
        for name, parameter in signature(of).parameters.items()
    }
    assert {name: float(value.replace(",", "")) for name, value in told.items()} == {
        name: defaults[name] for name in told
    }
    assert set(told) == {"max_attempts", "backoff_base_s", "backoff_max_s", "partition_messages"}
