"""The schema as a product: it is what the code's tables say, it is made once, and another one is refused by name."""

from __future__ import annotations

import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from support.command_line import command_line_in
from support.queues import prepared_database

from stormproof.core.base.errors import SettingsError
from stormproof.core.postgres.database import Database, connect
from stormproof.migrations import migrate, revision, state
from stormproof.trident.ledger.database import require_schema

ROOT = Path(__file__).parents[2]


def made_from_the_code() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "schema_sql.py"))


def test_the_tables_are_those_that_the_code_declares() -> None:
    made = made_from_the_code()["text"]()
    assert (ROOT / "migrations" / "tables.sql").read_text() == made, "run: .venv/bin/python tools/schema_sql.py"


@pytest.mark.postgres
def test_the_schema_is_made_once_by_one_of_two_at_the_same_time(database: Database) -> None:
    engines = [sa.create_engine(database.sqlalchemy_url) for _ in range(2)]
    assert state(engines[0]).current is None
    with ThreadPoolExecutor(2) as pool:
        assert all(found.up_to_date for found in pool.map(migrate, engines))
    assert migrate(engines[0]).up_to_date
    for engine in engines:
        engine.dispose()


@pytest.mark.postgres
def test_the_printed_sql_makes_the_schema(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_line_in(tmp_path, database, "none.py", "", monkeypatch, capsys)
    printed = command.text("ledger", "sql")
    assert "%%" not in printed  # as a driver wants it, and psql does not
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute(printed.encode())  # without parameters: as psql runs it
    assert command("status") == {"topologies": []}


@pytest.mark.postgres
def test_pages_of_a_journal_have_room_for_what_changes_and_no_index_has_it(database: Database) -> None:
    prepared_database(database)
    with connect(database, application_name="tests") as connection:
        asked = "select reloptions from pg_class where oid = 'stormproof.pending_message'::regclass"
        assert connection.execute(asked).fetchone() == (["fillfactor=50"],)
        asked = "select indexdef from pg_indexes where schemaname = 'stormproof' and tablename = 'pending_message'"
        indexes = [str(text) for (text,) in connection.execute(asked)]
    assert len(indexes) == 4
    assert not [text for text in indexes if "owed" in text or "resolved_at" in text]


@pytest.mark.postgres
def test_a_schema_of_another_version_is_refused_by_name_and_nothing_of_it_is_changed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_database(database)
    command = command_line_in(tmp_path, database, "none.py", "", monkeypatch, capsys)
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("update stormproof.alembic_version set version_num = '0029'"))
    named = re.compile(
        rf"revision 0029.* needs {revision()}.* go on with that version, or begin anew.* DROP SCHEMA stormproof, "
    )
    for own in (False, True):
        with pytest.raises(SettingsError, match=named):
            require_schema(engine, database, own=own)
    for arguments in (["status"], ["ledger", "migrate"]):
        code, _, said = command.ended(*arguments)
        assert (code, bool(named.search(" ".join(said.split()))), "run: stormproof" in said) == (2, True, False)
    code, said, _ = command.ended("doctor", "--no-spark")
    said = " ".join(said.split())
    assert (code, bool(named.search(said)), "ledger migrate" in said) == (1, True, False)
    assert state(engine).current == "0029"
    engine.dispose()


REFUSED = {
    "an end of a batch that has not ended": "update stormproof.txn set ended_at = now() where txid = 1",
    "content that was never fixed": "update stormproof.txn set state = 'prepared' where txid = 1",
    "no reason": "update stormproof.txn set state = 'aborted', ended_at = now() where txid = 1",
    "fewer failures than none": "update stormproof.txn set failed = -1 where txid = 1",
    "more failures and returns than messages": "update stormproof.txn set failed = 2, returned = 2 where txid = 1",
    "more rejects than messages": "update stormproof.txn set rejected = 4 where txid = 1",
    "an epoch before the first": "update stormproof.txn set epoch = 0 where txid = 1",
    "an attempt at no batch": "update stormproof.attempt set txid = 2",
    "a batch of no topology": "update stormproof.txn set incarnation = 'another'",
    "an outcome that nobody knows": "update stormproof.attempt set outcome = 'perhaps'",
    "a topology that goes and leaves its batches": "delete from stormproof.topology",
}


@pytest.mark.postgres
def test_the_database_refuses_records_that_contradict_themselves(database: Database) -> None:
    prepared_database(database)
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute(
            "insert into stormproof.topology values ('t', 'life', 1, 'f', 'exactly-once', 'q', now(), now(), 'h', 1, 1);"
            "insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position, messages,"
            " bytes, retry, opened_at) values ('life', 1, 'open', 'exactly-once', 1, 1, 'q', '{}', 3, 9, false, now());"
            "insert into stormproof.attempt values ('life', 1, 1, 1, 7, '[]', 3, 5, now(), 'running')"
        )
        taken = []
        for what, statement in REFUSED.items():
            try:
                connection.execute(statement.encode())
                taken.append(what)
            except psycopg.errors.IntegrityError:
                pass
        assert taken == []
        connection.execute("update stormproof.txn set failed = 2, returned = 1 where txid = 1")  # this is none


@pytest.mark.postgres
def test_every_table_view_and_column_says_what_it_is(database: Database) -> None:
    prepared_database(database)
    silent = """
        select c.relname || coalesce('.' || a.attname, '') from pg_class c
        left join lateral (
          select attname, attnum from pg_attribute where attrelid = c.oid and attnum > 0 union all select null, 0
        ) a on true
        where c.relnamespace = 'stormproof'::regnamespace and c.relkind in ('r', 'v') and c.relname <> 'alembic_version'
          and col_description(c.oid, a.attnum) is null and (a.attnum > 0 or obj_description(c.oid) is null)
    """
    with connect(database, application_name="tests") as connection:
        assert connection.execute(silent.encode()).fetchall() == []
