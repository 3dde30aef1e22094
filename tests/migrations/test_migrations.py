"""The migrations as a product: they make what the code's tables say, from nothing, twice, and at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from support.command_line import command_line_in
from support.queues import prepared_database

from stormproof import migrations
from stormproof.core.errors import SettingsError
from stormproof.core.pending.tables import metadata as pending_tables
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.files.tables import metadata as file_tables
from stormproof.core.source.postgres_queue.tables import metadata as queue_tables
from stormproof.migrations import SCHEMA, migrate, revisions, sql, state
from stormproof.trident.ledger.control import metadata as control_tables
from stormproof.trident.ledger.database import require_schema
from stormproof.trident.ledger.job_keys import metadata as job_tables
from stormproof.trident.ledger.streams import metadata as stream_tables
from stormproof.trident.ledger.tables import metadata as ledger_tables

pytestmark = pytest.mark.postgres


def require_what_the_code_says(engine: sa.Engine) -> None:
    """The database's tables must be those that the code declares."""
    with engine.connect() as connection:
        options = {
            "version_table_schema": SCHEMA,
            "include_schemas": True,
            "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
            "compare_server_default": True,
        }
        context = MigrationContext.configure(connection, opts=options)
        both = sa.MetaData(schema=SCHEMA)
        for tables in (
            ledger_tables,
            pending_tables,
            queue_tables,
            file_tables,
            stream_tables,
            job_tables,
            control_tables,
        ):
            for table in tables.sorted_tables:
                table.to_metadata(both)
        assert compare_metadata(context, both) == []


def test_the_migrations_make_what_the_code_says(database: Database) -> None:
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    assert state(engine).current is None
    assert migrate(engine).up_to_date
    require_what_the_code_says(engine)
    engine.dispose()


def test_pages_of_a_journal_have_room_for_what_changes_and_no_index_has_it(database: Database) -> None:
    """What the comparison with the code does not see: a table's storage parameters, and the columns of a predicate."""
    prepared_database(database)
    with connect(database, application_name="tests") as connection:
        asked = "select reloptions from pg_class where oid = 'stormproof.pending_message'::regclass"
        assert connection.execute(asked).fetchone() == (["fillfactor=50"],)
        asked = "select indexdef from pg_indexes where schemaname = 'stormproof' and tablename = 'pending_message'"
        indexes = [str(text) for (text,) in connection.execute(asked)]
    assert len(indexes) == 4
    assert not [text for text in indexes if "owed" in text or "resolved_at" in text]


def test_the_revisions_are_those_that_alembic_finds() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    scripts = list(ScriptDirectory.from_config(config).walk_revisions())
    assert revisions() == tuple(script.revision for script in reversed(scripts))


def test_two_migrations_at_once_and_a_repeat(database: Database) -> None:
    engines = [sa.create_engine(database.sqlalchemy_url) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert all(found.up_to_date for found in pool.map(migrate, engines))
    assert migrate(engines[0]).up_to_date
    for engine in engines:
        engine.dispose()


def test_the_printed_sql_makes_the_same(database: Database) -> None:
    printed: list[str] = []
    sql(printed.append)
    assert "%%" not in "\n".join(printed)  # as a driver wants it, and psql does not
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("\n".join(printed).encode())  # without parameters: as psql runs it
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    assert state(engine).up_to_date
    require_what_the_code_says(engine)
    engine.dispose()


def test_a_schema_of_a_newer_version_is_named_as_such(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_database(database)
    command = command_line_in(tmp_path, database, "none.py", "", monkeypatch, capsys)
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("update stormproof.alembic_version set version_num = 'later'"))
    assert not state(engine).is_known
    for own in (False, True):
        with pytest.raises(SettingsError, match=r"revision later.* newer Stormproof made it.* install"):
            require_schema(engine, database, own=own)
    for arguments in (["status"], ["ledger", "migrate"]):
        code, _, said = command.ended(*arguments)
        assert (code, "newer Stormproof" in said, "run: stormproof ledger migrate" in said) == (2, True, False)
    for arguments in (["doctor", "--no-spark"], ["ledger", "check"]):
        code, said, _ = command.ended(*arguments)
        said = " ".join(said.split())
        assert (code, "newer Stormproof" in said, "run: stormproof ledger migrate" in said) == (1, True, False)
    engine.dispose()
