"""A database of the version before is migrated in the middle of its batches, and goes on exactly once.

`before_pending` is what that version left at revision 0009: nine lines, in a queue and in a file, read by a topology for
each state that a message can be in. Each topology's driver was killed (SIGKILL at a failpoint) where its state was reached;
an operator then decided about dead letters. The numbers, digests and staged files are those that it wrote.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import alembic.command
import psycopg
import pytest
import sqlalchemy as sa
from alembic.config import Config
from support.verdicts import verified

from stormproof import FileSource, PostgresQueue, PostgresSink, Settings, Topology, migrations
from stormproof.core.pending.source import PendingSource
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.migrations import migrate

pytestmark = pytest.mark.postgres

BEFORE = Path(__file__).parent / "before_pending"
LINES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WRITTEN_NS = 1_795_348_743_761_047_224
"""When the file of the lines was written."""

NEWEST_XID = 2_000
"""Above every transaction number in the rows: they were taken on a server that was further than one just made."""

KINDS = ("queue", "files")
STATES = {
    "open": [("open", 4)],
    "prepared": [("held", 4)],
    "committed": [("held", 4)],
    "returned": [("returned", 4)],
    "waiting": [],
    "retrying": [("open", 2)],
    "retry-prepared": [("held", 2)],
    "dead": [],
    "halves": [("open", 2), ("returned", 2)],
}
"""What each topology's slices hold: the lease's state and the number of messages. "committed": the sink has them, too."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The migrated database, and the folder that has its file and staged rows."""

    database: Database
    folder: Path

    def rows(self, statement: str, *parameters: object) -> list[tuple[object, ...]]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def slices(self, name: str) -> list[tuple[object, ...]]:
        return self.rows(
            "select state, messages from stormproof.pending_slice s join stormproof.pending_subscription p"
            " on p.id = s.subscription join stormproof.topology t on t.incarnation = p.subscription"
            " where t.name = %s order by 1, 2",
            name,
        )

    def run(self, name: str) -> None:
        """Run the topology until nothing is left, with every retry due."""
        self.rows("update stormproof.pending_retry set not_before = clock_timestamp()")
        url = self.database.sqlalchemy_url.render_as_string(hide_password=False)
        settings = Settings(database_url=url, home=self.folder / "home", batch_messages=4)
        topology(name, self.folder).run("exactly-once", engine="inline", settings=settings, until_idle=True)

    def content(self, name: str) -> Counter[str]:
        return Counter(str(word) for (word,) in self.rows(f"select word from {name.replace('-', '_')}"))

    def source(self, name: str) -> PendingSource:
        """The topology's source, acting for its subscription as an operator does."""
        made = source(name.partition("-")[0], self.folder)
        made.bind(self.database)
        ((incarnation,),) = self.rows("select incarnation from stormproof.topology where name = %s", name)
        made.look_at(str(incarnation))
        return made


def source(kind: str, folder: Path) -> PostgresQueue | FileSource:
    if kind == "queue":
        return PostgresQueue("lines", schema="line string")
    return FileSource(folder / "lines.txt", "text", schema="line string", name="lines")


def upper(line: str) -> str:
    return line.upper()


def topology(name: str, folder: Path) -> Topology:
    """As it was, but for a function that was mended: no line fails any more."""
    t = Topology(name)
    lines = t.stream("lines", source(name.partition("-")[0], folder))
    lines.map(upper, "line", schema="word string", name="check").into(PostgresSink(name.replace("-", "_")))
    return t


def expected(state: str) -> Counter[str]:
    """From the lines alone, and from what the operator decided."""
    words = Counter(line.upper() for line in LINES)
    if state == "dead":  # "four" was requeued
        words -= Counter({"TWO": 1, "THREE": 1, "SEVEN": 1})  # undecided, dropped, edited
        words += Counter({"MENDED": 1})
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that was read, and the staged rows of prepared batches."""
    made = tmp_path_factory.mktemp("before")
    lines = made / "lines.txt"
    lines.write_text("".join(f"{line}\n" for line in LINES))
    os.utime(lines, ns=(WRITTEN_NS, WRITTEN_NS))
    for name, content in json.loads((BEFORE / "staged.json").read_text()).items():
        path = made / "home" / "staging" / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(bytes.fromhex(content))
    return made


@pytest.fixture(scope="module")
def template(postgres: EmbeddedPostgres, folder: Path) -> Iterator[str]:
    """A database with the rows of the version before, migrated."""
    name = "test_pending_moved"
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(f"create database {name} template template0".encode())
        while xid_of(connection) < NEWEST_XID:
            pass
        (server,) = connection.execute("select system_identifier::text from pg_control_system()").fetchone() or ("",)
    engine = sa.create_engine(postgres.database.with_name(name).sqlalchemy_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("create schema stormproof"))
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0009")
        rows = (BEFORE / "rows.sql").read_text()
        for place, value in (("folder", folder), ("staging", folder / "home" / "staging"), ("server", server)):
            rows = rows.replace(f"{{{place}}}", str(value))
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        driver.execute(rows.encode())
        driver.execute("set search_path = default")
    migrate(engine)
    engine.dispose()
    yield name
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)".encode())


def xid_of(connection: psycopg.Connection) -> int:
    """A transaction number of the server's, which is used up with it."""
    row = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def copied(postgres: EmbeddedPostgres, template: str, name: str, folder: Path) -> Generator[Moved]:
    """A copy of the migrated database, whose sinks' tables are known as those that were written to."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(f"create database {name} template {template}".encode())
    found = Moved(postgres.database.with_name(name), folder)
    here = (
        "(select system_identifier from pg_control_system()) || '/' || (select oid from pg_database where datname ="
        " current_database()) || '/' || to_regclass(split_part(sink, '.', 2))::oid"
    )
    for table in ("stormproof_sink.guard", "stormproof.topology_sink"):
        found.rows(f"update {table} set table_id = {here}")
    yield found
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)".encode())


@pytest.fixture(scope="module")
def moved(postgres: EmbeddedPostgres, template: str, folder: Path) -> Iterator[Moved]:
    """For all cases that run a topology as it was left: each has one of its own."""
    with copied(postgres, template, f"{template}_run", folder) as found:
        yield found


@pytest.fixture(scope="module")
def changed(postgres: EmbeddedPostgres, template: str, folder: Path) -> Iterator[Moved]:
    """For all cases that change what was left, before they run a topology: each has one of its own."""
    with copied(postgres, template, f"{template}_changed", folder) as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_it_goes_on_exactly_once_from_each_state(moved: Moved, kind: str, state: str) -> None:
    name = f"{kind}-{state}"
    assert moved.slices(name) == STATES[state]
    moved.run(name)
    assert moved.slices(name) == []
    assert moved.content(name) == expected(state)
    report = verified(name, moved.database)
    assert report.clean, report
    moved.run(name)
    assert moved.content(name) == expected(state)


@pytest.mark.parametrize("kind", KINDS)
def test_dead_letters_are_there_with_what_was_decided(changed: Moved, kind: str) -> None:
    name = f"{kind}-dead"
    with closing(changed.source(name)) as operated:
        letters = {letter.payload: letter for letter in operated.dead_letters()}
        decisions = {payload: letter.disposal and str(letter.disposal) for payload, letter in letters.items()}
        assert decisions == {b"two": None, b"three": "drop", b"four": "requeue", b"seven": "edit"}
        assert letters[b"seven"].new_payload == b"mended"
        two = letters[b"two"]
        assert (two.reason, two.times_failed, two.history[0]["component"]) == ("error", 1, "check")
        assert operated.requeue([two.shown_id], by="ann", why="mended") == (two.shown_id,)
    changed.run(name)
    assert changed.content(name) == expected("dead") + Counter({"TWO": 1})
    assert verified(name, changed.database).clean


MINE = (
    "state = 'returned' and subscription in (select p.id from stormproof.pending_subscription p"
    " join stormproof.topology t on t.incarnation = p.subscription where t.name = %s)"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("state", "harm", "change"),
    [
        ("returned", f"delete from stormproof.pending_slice where {MINE}", -1),
        (
            "halves",
            "insert into stormproof.pending_slice (subscription, at, messages, bytes, state, epoch)"
            f" select subscription, at, messages, bytes, state, epoch from stormproof.pending_slice where {MINE}",
            1,
        ),
    ],
    ids=["lost", "doubled"],
)
def test_control_a_migration_that_loses_or_doubles_a_slice_is_caught(
    changed: Moved, kind: str, state: str, harm: str, change: int
) -> None:
    name = f"{kind}-{state}"
    changed.rows(harm, name)
    assert verified(name, changed.database).violations
    changed.run(name)
    counts = [changed.content(name)[line.upper()] - 1 for line in LINES]
    assert set(counts) == {0, change}
    assert verified(name, changed.database).violations
