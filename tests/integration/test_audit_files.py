"""The command line over a topology that reads files: audit, dead letters, and what it finds where rows were lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command_line import CommandLine, command_line_in

from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

FILE = """
from stormproof import FileSource, PostgresSink, Topology, count

def check(word: str, n: int) -> str:
    if word == "poison":
        raise ValueError("never works")
    return f"{word}{n}"

def topology(folder: str) -> Topology:
    t = Topology("files")
    rows = FileSource(f"{folder}/*.parquet", "parquet", schema="word string, n int not null", name="rows",
                      max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001, look_interval_s=0)
    lines = FileSource(f"{folder}/*.jsonl", "jsonl", schema="word string, n int not null", name="lines",
                       max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001, look_interval_s=0)
    for name, source in (("rows", rows), ("lines", lines)):
        (t.stream(name, source).map(check, "word", "n", schema="word string", name=f"check-{name}")
          .group_by("word").persistent_aggregate(n=count()).into(PostgresSink(f"{name}_sink")))
    return t

def rows_only(folder: str) -> Topology:
    t = Topology("files-alone")
    source = FileSource(f"{folder}/*.parquet", schema="word string, n int not null", name="rows", max_attempts=2,
                        backoff_base_s=0.001, backoff_max_s=0.001, look_interval_s=0)
    (t.stream("rows", source).map(check, "word", "n", schema="word string")
      .group_by("word").persistent_aggregate(n=count()).into(PostgresSink("alone_sink")))
    return t
"""


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return command_line_in(tmp_path, database, "file_topologies.py", FILE, monkeypatch, capsys)


def run_topology(command: CommandLine, folder: Path, name: str) -> None:
    target = f"{folder / 'file_topologies.py'}:{name}"
    command("run", target, "--param", f"folder={folder}", "--engine", "inline", "--until-idle", "--max-messages", "7")


def write(folder: Path, name: str, words: Sequence[str | None], start: int = 0) -> None:
    numbers = range(start, start + len(words))
    if name.endswith("jsonl"):
        lines = [json.dumps({"word": w, "n": n}) for w, n in zip(words, numbers, strict=True)]
        (folder / name).write_text("\n".join(lines))
    else:
        pq.write_table(pa.table({"n": numbers, "word": words}), folder / name, row_group_size=5)


def rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def done(command: CommandLine, tmp_path: Path) -> CommandLine:
    command("ledger", "migrate")
    write(tmp_path, "a.parquet", ["w"] * 12 + ["poison"])
    run_topology(command, tmp_path, "rows_only")
    write(tmp_path, "b.parquet", ["w"] * 4, start=100)
    run_topology(command, tmp_path, "rows_only")
    return command


def test_every_row_is_applied_once_or_dead_and_the_audit_is_clean(done: CommandLine, database: Database) -> None:
    applied = {word for (word,) in rows(database, "select word from alone_sink where n = 1")}
    assert applied == {f"w{n}" for n in [*range(12), *range(100, 104)]}
    report = done("audit", "verify", "files-alone")
    assert report["violations"] == report["unknowns"] == []
    (topology,) = done("status")["topologies"]
    assert (topology["backlog"]["ready"], topology["backlog"]["dead"]) == (0, 1)
    found = done("audit", "message", "files-alone", "2-14")
    assert found["end"]["kind"] == "committed"
    done("audit", "message", "files-alone", "1-14", status=2)  # message 14 is not the first file's


def test_dead_letters_are_listed_dropped_and_requeued(done: CommandLine, database: Database) -> None:
    (letter,) = done("dead-letters", "list", "files-alone")["dead_letters"]
    assert (letter["id"], letter["reason"]) == ("1-12", "error")
    assert letter["text"] == '{"word": "poison", "n": 12}'
    found = done("audit", "message", "files-alone", "1-12")
    assert found["end"]["kind"] == "dead_letter"
    assert done("dead-letters", "requeue", "files-alone", "1-12", "--why", "repaired")["requeued"] == ["1-12"]
    done("dead-letters", "drop", "files-alone", "1-12", "--why", "no", status=1)
    assert rows(database, "select id from stormproof.pending_retry") == [(12,)]


def test_a_row_of_a_parquet_file_is_edited_as_json_by_column(done: CommandLine, database: Database) -> None:
    edit = ("dead-letters", "edit", "files-alone", "1-12", "--payload")
    folder = Path.cwd()
    for given, named in (
        ('{"wrd": "x"}', "it has word, n"),
        ('{"n": "many"}', "column 'n'"),
        ("[]", "as a JSON object"),
    ):
        (folder / "payload").write_text(given)
        _, out, _ = done.ended(*edit, "payload", "--json")
        assert named in json.loads(out)["error"]["message"]
    (folder / "payload").write_text('{"word": "mended"}\n')
    assert done(*edit, "payload", "--by", "ann")["edited"] == "1-12"
    run_topology(done, folder, "rows_only")
    assert rows(database, "select n from alone_sink where word = 'mended12'") == [(1,)]
    assert done("audit", "verify", "files-alone")["violations"] == []


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (
            "update stormproof.pending_subscription"
            " set position = jsonb_set(position, '{next}', to_jsonb((position ->> 'next')::int + 3))",
            "were handed out to no batch",
        ),
        (
            "insert into stormproof.pending_slice (subscription, at, messages, bytes, state, epoch)"
            """ select id, '{"range": [2, 4]}', 2, 0, 'returned', 1 from stormproof.pending_subscription""",
            "holds messages that another batch holds",
        ),
        (
            "insert into stormproof.pending_retry (subscription, id, origin, payload, times_opened, times_failed,"
            " not_before, reason, history, slice) select id, 1, 1, '', 1, 1, now(), 'error', '[]', 99"
            " from stormproof.pending_subscription",
            "belong to slice 99, which is not there",
        ),
    ],
)
def test_the_audit_finds_what_was_lost_or_doubled(done: CommandLine, database: Database, harm: str, text: str) -> None:
    rows(database, harm)
    report = done("audit", "verify", "files-alone", status=1)
    assert any(text in json.dumps(violation) for violation in report["violations"])


def test_two_kinds_of_files_as_two_spouts(command: CommandLine, database: Database, tmp_path: Path) -> None:
    command("ledger", "migrate")
    write(tmp_path, "a.parquet", ["w", None, "w"])
    write(tmp_path, "b.jsonl", ["w", "w"])
    (tmp_path / "c.jsonl").write_text('{"word": "half\n{"word": "w", "n": 9}\n')
    run_topology(command, tmp_path, "topology")
    assert rows(database, "select count(*) from rows_sink") == [(3,)]
    assert rows(database, "select word from lines_sink order by 1") == [("w0",), ("w1",), ("w9",)]
    report = command("audit", "verify", "files")
    assert report["violations"] == report["unknowns"] == []
    (letter,) = command("dead-letters", "list", "files")["dead_letters"]
    assert (letter["id"], letter["reason"], letter["text"]) == ("lines:2-2", "bad_message", '{"word": "half')
