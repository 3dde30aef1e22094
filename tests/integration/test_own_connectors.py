"""A source and a sink that live outside the library, in `examples/`: the command line knows both."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine, command_line_in

from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = """
from sqlite_sink import SqliteSink
from sqlite_source import SqliteSource
from stormproof import Topology

def split(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never works")
    return line.split()

def topology(folder: str) -> Topology:
    t = Topology("own")
    source = SqliteSource(f"{folder}/lines.db", "lines", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    t.stream("lines", source).flat_map(split, "line", schema="word string").into(
        SqliteSink(f"{folder}/words.db", "words"))
    return t
"""


def execute(file: Path, statement: str, rows: Iterable[Any] = ()) -> list[Any]:
    with closing(sqlite3.connect(file)) as connection, connection:
        many = list(rows)
        return connection.executemany(statement, many).fetchall() if many else connection.execute(statement).fetchall()


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    monkeypatch.setenv("STORMPROOF_PLUGINS", f"{EXAMPLES}/sqlite_source.py,{EXAMPLES}/sqlite_sink.py")
    return command_line_in(tmp_path, database, "own.py", FILE, monkeypatch, capsys)


@pytest.fixture
def done(command: CommandLine, tmp_path: Path) -> CommandLine:
    command("ledger", "migrate")
    execute(tmp_path / "lines.db", "create table lines (id integer primary key autoincrement, payload blob)")
    execute(tmp_path / "lines.db", "insert into lines (payload) values (?)", [(f"to be {i}",) for i in range(20)])
    execute(tmp_path / "lines.db", "insert into lines (payload) values ('poison')")
    run(command, tmp_path)
    return command


def run(command: CommandLine, folder: Path) -> None:
    target = f"{folder / 'own.py'}:topology"
    command("run", target, "--param", f"folder={folder}", "--engine", "inline", "--until-idle", "--max-messages", "7")


def written(folder: Path) -> Counter[str]:
    return Counter(word for (word,) in execute(folder / "words.db", "select word from words"))


def test_status_verify_and_doctor_know_both(done: CommandLine, tmp_path: Path) -> None:
    assert written(tmp_path) == Counter({"to": 20, "be": 20, **{str(i): 1 for i in range(20)}})
    (topology,) = done("status")["topologies"]
    assert (topology["source"], topology["backlog"]["dead"], topology["backlog"]["pending"]) == ("lines", 1, 0)
    assert [sink["sink"] for sink in topology["sinks"]] == ["words"]
    report = done("audit", "verify", "own")
    assert report["violations"] == report["unknowns"] == []
    doctor = done.ended("doctor", "--for", f"{tmp_path / 'own.py'}:topology", "--param", f"folder={tmp_path}")
    assert "Traceback" not in "".join(map(str, doctor))


def test_a_dead_letter_is_edited_and_comes_again(done: CommandLine, tmp_path: Path) -> None:
    (letter,) = done("dead-letters", "list", "own")["dead_letters"]
    assert (letter["id"], letter["source"], letter["text"]) == ("0-21", "lines", "poison")
    (tmp_path / "payload").write_bytes(b"mended")
    done("dead-letters", "edit", "own", letter["id"], "--payload", str(tmp_path / "payload"), "--why", "typo")
    run(done, tmp_path)
    assert written(tmp_path)["mended"] == 1
    assert done("audit", "verify", "own")["violations"] == []
    assert done("audit", "message", "own", letter["id"])["end"]["kind"] == "committed"


def test_the_audit_names_what_is_wrong_with_either(done: CommandLine, tmp_path: Path) -> None:
    execute(tmp_path / "words.db", "delete from words where word = '3'")
    report = done("audit", "verify", "own", status=4)
    assert [unknown["sink"] for unknown in report["unknowns"]] == ["words"]
    execute(tmp_path / "words.db", "insert into words values ('3')")
    done("audit", "verify", "own")
    execute(tmp_path / "words.db", "delete from stormproof_evidence where txid = 2")
    assert done("audit", "verify", "own", status=1)["violations"]


def test_without_the_plugin_the_sinks_evidence_is_said_to_be_out_of_reach(
    done: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it is the registration that makes the sink known."""
    from stormproof.sinks.contract import registry

    monkeypatch.delenv("STORMPROOF_PLUGINS")
    monkeypatch.delitem(registry._KINDS, "SqliteSink")  # pyright: ignore[reportPrivateUsage]
    report = done("audit", "verify", "own", status=4)
    assert report["violations"] == []
    assert any("words" in unknown["text"] for unknown in report["unknowns"])
