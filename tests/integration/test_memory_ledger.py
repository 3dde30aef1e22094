"""A topology whose messages and rows are all in memory leaves nothing in a ledger, so that tests do not fill it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database
from support.untouched import everything

from stormproof import MemorySink, MemorySource, PostgresSink, Topology
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings

pytestmark = pytest.mark.postgres

FILE = """
from stormproof import MemorySink, MemorySource, Topology

t = Topology("words")
t.stream("lines", MemorySource("lines", [b"a", b"b"])).into(MemorySink("kept"))
"""


@pytest.fixture
def settings(database: Database) -> Settings:
    return Settings(database_url=prepared_database(database).adbc_uri)


def topology(*sources: MemorySource, sink: MemorySink | PostgresSink, word: str = "line") -> Topology:
    t = Topology("words")
    for number, source in enumerate(sources):
        lines = t.stream(f"from_{source.name}", source).map(str, "line", schema=f"{word} string")
        lines.into(MemorySink(f"kept_{number}") if number else sink)
    return t


def run(t: Topology, settings: Settings) -> None:
    t.run(settings=settings, engine="inline", until_idle=True)


def rows(sink: MemorySink, word: str = "line") -> Counter[str]:
    return Counter(str(row[word]) for row in sink.rows())


def test_the_ledger_is_as_it_was(settings: Settings, database: Database, tmp_path: Path) -> None:
    before = everything(tmp_path / "none", database)
    source, sink = MemorySource("lines", [b"a", b"b", b"\xff"], max_attempts=1), MemorySink("kept")
    run(topology(source, sink=sink), settings)
    assert rows(sink) == Counter("ab")
    assert [letter.payload for letter in source.dead_letters()] == [b"\xff"]
    assert everything(tmp_path / "none", database) == before


def test_what_is_put_later_is_read_by_the_next_run_alone(settings: Settings) -> None:
    source, sink = MemorySource("lines", [b"a"]), MemorySink("kept")
    for word in "bc":
        run(topology(source, sink=sink), settings)
        source.put([word.encode()])
    run(topology(source, sink=sink), settings)
    assert rows(sink) == Counter("abc")


def test_a_changed_topology_over_other_objects_needs_no_word(settings: Settings) -> None:
    for word in ("line", "other"):
        sink = MemorySink("kept")
        run(topology(MemorySource("one", [b"a"]), MemorySource("two", [b"b"]), sink=sink, word=word), settings)
        assert rows(sink, word) == Counter("a")


def test_control_a_table_has_a_ledger(settings: Settings, database: Database, tmp_path: Path) -> None:
    before = everything(tmp_path, database)
    run(topology(MemorySource("lines", [b"a"]), sink=PostgresSink("kept")), settings)
    now = everything(tmp_path, database)
    assert now["stormproof.topology: rows"] != before["stormproof.topology: rows"]


def test_the_command_leaves_a_database_empty(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command: CommandLine = command_line_in(tmp_path, database, "app.py", FILE, monkeypatch, capsys)
    folder = tmp_path / "none"
    before = everything(folder, database)
    assert command("run", "app.py:t", "--engine", "inline", "--until-idle")["messages"] == 2
    assert everything(folder, database) == before
