"""Every command, called by name: JSON where that is asked for, and a screen of 80 columns without a broken word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from support.command_line import CommandLine, command_line_in
from support.registry import commands
from support.terminal import Terminal, broken_words

from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

NAME: Final = "orders-of-every-shop"
FILE: Final = """
from stormproof import PostgresQueue, PostgresSink, Topology

def require_a_number_of_the_right_kind(line: str) -> int:
    if line == "refused":
        return -1
    return int(line)

def topology() -> Topology:
    t = Topology("orders-of-every-shop")
    source = PostgresQueue("orders", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    numbers = t.stream("lines", source).map(require_a_number_of_the_right_kind, "line", schema="n int")
    numbers.into(PostgresSink("numbers_of_every_order"))
    return t
"""
TARGET: Final = "orders.py:topology"
LETTER: Final = "LETTER"
CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "audit aborted": (NAME,),
    "audit actions": (NAME,),
    "audit attempts": (NAME,),
    "audit behind": (NAME,),
    "audit components": (NAME,),
    "audit dead-letters": (NAME,),
    "audit duplicates": (NAME,),
    "audit message": (NAME, LETTER),
    "audit pending": (NAME,),
    "audit recovered": (NAME,),
    "audit replays": (NAME,),
    "audit report": (NAME, "--out", "orders.py"),
    "audit txn": (NAME, "1"),
    "audit verdicts": (NAME,),
    "audit verify": (NAME,),
    "compact": (NAME,),
    "dead-letters drop": (NAME, "1-1"),
    "dead-letters edit": (NAME, LETTER, "--payload", "nowhere"),
    "dead-letters list": (),
    "dead-letters requeue": (NAME, "--match", "no such text", "--yes"),
    "dead-letters retry": (NAME,),
    "dead-letters show": (NAME, LETTER),
    "doctor": ("--no-spark",),
    "drain": (NAME,),
    "explain": (TARGET,),
    "forget": (NAME, "--by", "ann", "--dry-run"),
    "ledger accept-change": (NAME, "0123456789ab"),
    "ledger accept-loss": (NAME,),
    "ledger adopt": (NAME, "0123456789ab"),
    "ledger adopt-table": (NAME, "no-such-sink"),
    "ledger migrate": (),
    "ledger prune": (NAME, "--dry-run"),
    "ledger skip": (NAME, "1", "no-such-sink"),
    "ledger sql": (),
    "metrics": (NAME,),
    "pause": (NAME,),
    "queue create": ("orders", "--schema", "line string"),
    "queue import": ("other", "orders.py:nowhere"),
    "queue list": (),
    "queue peek": ("orders",),
    "queue put": ("orders", "--lines", "no-such-file-of-lines.txt"),
    "queue unsubscribe": ("orders", "no-such-reader", "--by", "ann"),
    "repair": (NAME, "--dry-run"),
    "resume": (NAME,),
    "retry": (NAME, "1"),
    "run": (TARGET, "--engine", "inline", "--until-idle"),
    "status": (NAME,),
    "stop": (NAME,),
    "vacuum": (NAME, "--dry-run"),
}
ELSEWHERE: Final = {"psql", "queue adopt", "jars", "pack", "init", "ledger release-table", "web"}
"""Commands with tests of their own screens; called here where they need no more than a database."""

CHANGES: Final = {"run", "queue list", "status", "doctor", "metrics"}
"""What a second call shows has other numbers in it."""

PLAIN: Final = {"ledger sql", "metrics"}
"""What is printed for another program, exactly as it is."""


@pytest.fixture
def ran(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """A topology that has run, with dead letters whose payloads and errors are longer than a line."""
    command = command_line_in(tmp_path, database, "orders.py", FILE, monkeypatch, capsys)
    lines = [
        *map(str, range(6)),
        "not a number, and a text that goes on for a good deal longer than a line is wide",
        "x",
    ]
    (tmp_path / "lines").write_text("\n".join(lines))
    command("queue", "put", "orders", "--lines", "lines")
    command("run", TARGET, "--engine", "inline", "--until-idle", "--max-messages", "4")
    return command


def test_every_command_prints_json_and_fits_a_screen(
    ran: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {path for path, _ in commands()}
    assert known - CALLS.keys() <= ELSEWHERE, "a command that is called nowhere: add it to CALLS"
    (letter, *_) = (d["id"] for d in ran("dead-letters", "list", NAME)["dead_letters"])
    narrow, wide = (Terminal(monkeypatch, capsys, columns) for columns in (80, 1_000))
    wrong: list[object] = []
    for path, arguments in CALLS.items():
        call = (*path.split(), *(letter if one == LETTER else one for one in arguments))
        status, out, _ = ran.ended(*call, "--json")
        if not isinstance(json.loads(out), dict) or (status == 2) != isinstance(json.loads(out).get("error"), dict):
            wrong.append((call, status, out))
        shown = narrow.ended(*call)
        if shown[0] != status:
            wrong.append((call, status, shown))
        for screen in shown[1:]:
            if max(map(len, screen.splitlines()), default=0) > 80 and path not in PLAIN:
                wrong.append((call, "wider than 80", screen))
            if "Traceback" in screen or "unexpected error" in screen:
                wrong.append((call, screen))
        if path not in CHANGES:
            roomy = wide.ended(*call)
            broken = broken_words("".join(shown[1:]), "".join(roomy[1:]))
            if broken:
                wrong.append((call, broken, shown, roomy))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_blocked_topology_is_a_problem_that_monitoring_sees(
    ran: CommandLine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    found = ran("status", NAME)["topologies"][0]
    assert (found["problems"], [d["number"] for d in found["dead_letters"]]) == ([], [2])
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("alter table numbers_of_every_order add check (n >= 0)")
    (tmp_path / "more").write_text("refused")
    ran("queue", "put", "orders", "--lines", "more")
    assert ran("status", NAME)["topologies"][0]["backlog"]["oldest_ready_age_s"] > 0
    ran("run", TARGET, "--engine", "inline", "--until-idle", status=1)
    (problem,) = ran("status", NAME, status=1)["topologies"][0]["problems"]
    assert (problem["kind"], problem["command"]) == ("blocked", f"stormproof retry {NAME} {problem['text'].split()[1]}")
    text = ran.text("status", NAME, status=1)
    assert text.startswith("PROBLEM blocked: txid ")
    assert f"stormproof retry {NAME}" in text
    assert "2 ValueError (error)" in text
    assert ran("status")["topologies"][0]["problems"] == [problem]  # status 0: of all topologies it only tells
    error = ran("status", "order", status=2)["error"]
    assert error["message"] == f"the ledger knows no topology 'order'; known: {NAME}"
