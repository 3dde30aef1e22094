"""The commands of dead letters over a queue: what they show, what they choose, and that an edit is applied exactly once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.terminal import Terminal
from support.topologies import POISON, SinkMode, expected, source_of

from stormproof import PostgresSink, Topology
from stormproof.core.base.failpoint import ENV, FAILPOINTS

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME = "letters"
WORDS = "letters_postgres_append"
DRIVERS_POINTS = [p.name for p in FAILPOINTS.values() if p.scope in ("every", "postgres")]


@pytest.fixture
def dead(operated: Operated) -> Operated:
    """As many poisons as there are places to die at are dead letters."""
    operated = replace(operated, cell=replace(operated.cell, mode=SinkMode.POSTGRES_APPEND, batch_messages=50))
    operated.put(b"good one", *[POISON] * len(DRIVERS_POINTS))
    operated.run()
    return operated


def ids(dead: Operated, *filters: str) -> list[str]:
    found: list[str] = [d["id"] for d in dead.command("dead-letters", "list", NAME, *filters)["dead_letters"]]
    return found


def edit(dead: Operated, message: str, payload: bytes, *more: str) -> None:
    file = dead.cell.folder / "payload"
    file.write_bytes(payload + b"\n")  # as editors and `echo` end it
    done = dead.command("dead-letters", "edit", NAME, message, "--payload", str(file), "--by", "ann", *more)
    assert (done["edited"], done["new_payload_sha256"]) == (message, hashlib.sha256(payload).hexdigest())


def words(dead: Operated) -> Counter[str]:
    return Counter(word for (word,) in dead.sql(f"select word from {WORDS}"))


def test_an_edited_message_is_applied_once_wherever_a_driver_dies(dead: Operated) -> None:
    """One edit before each start; each start dies at another place; the last one runs to the end."""
    payloads = [b"good one"]
    for number, (point, message) in enumerate(zip(DRIVERS_POINTS, ids(dead), strict=True)):
        payloads.append(f"edited{number} twice{number} twice{number}".encode())
        edit(dead, message, payloads[-1])
        assert run_driver(dead.cell, f"{point}=kill") == KILLED, point
    assert run_driver(dead.cell) == 0
    assert words(dead) == expected(payloads)
    assert dead.verify()["violations"] == []
    assert ids(dead) == []


def test_an_edit_that_is_killed_was_made_or_was_not(dead: Operated) -> None:
    message = ids(dead)[0]
    (dead.cell.folder / "payload").write_bytes(b"mended")
    command = [sys.executable, "-m", "stormproof", "dead-letters", "edit", NAME, message, "--payload", "payload"]
    for point, is_made in (("dead_letter.in_transaction", False), ("dead_letter.after", True)):
        environment = {**os.environ, ENV: f"{point}=kill"}
        done = subprocess.run(command, env=environment, cwd=dead.cell.folder, capture_output=True, check=False)
        assert done.returncode == KILLED, done.stderr
        assert (message in ids(dead)) is not is_made
    (waiting,) = dead.sql("select payload, times_failed from stormproof.pending_retry")
    assert (bytes(waiting[0]), waiting[1]) == (b"mended", 0)
    dead.command("dead-letters", "edit", NAME, message, "--payload", str(dead.cell.folder / "payload"), status=2)
    dead.run()
    assert words(dead) == expected([b"good one", b"mended"])


def test_an_edit_is_on_record(dead: Operated) -> None:
    message = ids(dead)[0]
    edit(dead, message, b"mended", "--why", "a typo")
    dead.run()
    old, new = (hashlib.sha256(payload).hexdigest() for payload in (POISON, b"mended"))
    found = dead.command("audit", "message", NAME, message)
    assert found["end"]["kind"] == "committed"
    (action,) = found["operator"]
    assert (action["action"], action["by"], action["why"]) == ("edit", "ann", "a typo")
    assert (action["payload_sha256"], action["new_payload_sha256"]) == (old, new)
    shown = dead.command("dead-letters", "show", NAME, message)
    assert (shown["state"], shown["payload_sha256"], shown["new_payload_sha256"]) == ("edited", old, new)
    assert [entry["reason"] for entry in shown["history"]] == ["error", "error"]
    assert [entry["txid"] for entry in shown["history"]] == [1, 2]
    assert [opening["txid"] for opening in shown["openings"]][-1] == 3
    text = dead.text("audit", "message", NAME, message)
    assert f"edit by ann: a typo; payload {old[:12]} replaced by {new[:12]}" in text


FILTERS = [
    (("--error-class", "ValueError"), 2),
    (("--reason", "bad_message"), 1),
    (("--component", "check"), 3),
    (("--component", "check", "--match", "red"), 1),
    (("--source", NAME), 4),
    (("--source", "other"), 0),
    (("--since", "1h"), 4),
    (("--until", "1h"), 0),
    (("--since", "2001-01-01", "--until", "2001-01-02T03:00"), 0),
    (("--limit", "3"), 3),
]
REFUSED = [
    (("list", NAME, "--since", "yesterday"), "'yesterday' is no time"),
    (("list", "leters"), "knows no topology 'leters'; known: letters"),
    (("show", NAME, "1-1"), "is no dead letter. See: stormproof dead-letters list letters"),
    (("drop", NAME), "name the messages' ids, or --all, or a filter"),
    (("drop", NAME, "1-1", "--all"), "only one of these"),
    (("drop", NAME, "--reason", "error"), "the filter chooses 3 dead letters of letters"),
    (("edit", NAME, "1-1", "--payload", "nowhere"), "is no dead letter"),
]


# -- what is shown and chosen --------------------------------------------------------------------------------------------


def check(line: str) -> str:
    if line.startswith("value"):
        raise ValueError(f"no such value: {line}")
    if line.startswith("key"):
        raise KeyError(line)
    return line


def of_classes(cell: Cell) -> Topology:
    t = Topology(NAME)
    sink = PostgresSink("checked", name="checked", database=cell.database)
    t.stream("lines", source_of(NAME, cell.database)).map(check, "line", schema="word string").into(sink)
    return t


@pytest.fixture
def classes(operated: Operated) -> Operated:
    operated.put(b"value 1", b"value \x1b[31mred", b"key 1", b"\xff\xfe", b"fine")
    operated.run(of_classes(operated.cell))
    return operated


def test_dead_letters_are_counted_and_chosen_by_what_they_died_of(classes: Operated) -> None:
    found = classes.command("dead-letters", "list", NAME, "--count")["classes"]
    assert [(c["error_class"], c["reason"], c["component"], c["undecided"]) for c in found] == [
        ("ValueError", "error", "check", 2),
        ("KeyError", "error", "check", 1),
        ("bad_message", "bad_message", "lines", 1),
    ]
    text = classes.text("dead-letters", "list", NAME)
    assert "4 dead letters, 4 undecided" in text
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "\\xff\\xfe" in text
    for filters, number in FILTERS:
        assert len(ids(classes, *filters)) == number, filters
    for arguments, refused in REFUSED:
        assert refused in classes.command("dead-letters", *arguments, status=2)["error"]["message"], arguments
    assert len(ids(classes)) == 4
    found = classes.command("dead-letters", "list", "--error-class", "KeyError")["dead_letters"]
    assert [letter["topology"] for letter in found] == [NAME]


def test_a_person_says_yes_and_edits(classes: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, classes.capture)
    chosen = ("dead-letters", "requeue", NAME, "--error-class", "ValueError")
    status, _, err = terminal.ended(*chosen, typed="n\n")
    assert (status, "requeue 2 dead letters of letters? [y/N]" in err) == (1, True)
    assert len(ids(classes)) == 4
    status, out, _ = terminal.ended(*chosen, typed="y\n")
    assert (status, "2 dead letters requeued by" in out) == (0, True)
    assert len(ids(classes)) == 2
    done = classes.command("dead-letters", "drop", NAME, "--reason", "bad_message", "--yes")
    assert len(done["dropped"]) == 1
    message = ids(classes, "--match", "key")[0]
    edit = ("dead-letters", "edit", NAME, message)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    assert "neither VISUAL nor EDITOR is set" in terminal.ended(*edit)[2]
    monkeypatch.setenv("EDITOR", "true")
    status, _, err = terminal.ended(*edit)
    assert (status, "the payload is the old one" in err) == (2, True)
    monkeypatch.setenv("EDITOR", "false")
    assert "ended with status 1; nothing was done" in terminal.ended(*edit)[2]
    monkeypatch.setenv("EDITOR", "sed -i s/key/good/")
    assert terminal.ended(*edit)[0] == 0
    edited = classes.sql("select new_payload from stormproof.dead_letter where disposal = 'edit'")
    assert [bytes(payload) for (payload,) in edited] == [b"good 1"]


def test_messages_that_wait_for_a_retry_are_handed_out_now(operated: Operated) -> None:
    """Those that failed while the database's clock was a day ahead; each has it in its history."""
    operated.put(b"good one", POISON)
    operated.run()
    (message,) = ids(operated)
    operated.command("dead-letters", "requeue", NAME, message, "--by", "ann")
    operated.sql("update stormproof.pending_retry set not_before = now() + interval '1 day' returning 1")
    done = operated.command("dead-letters", "retry", NAME, "--by", "ann", "--why", "the clock was set")
    assert (done["retried"], done["by"]) == (1, "ann")
    assert operated.command("dead-letters", "retry", NAME)["retried"] == 0
    operated.run()
    letter = operated.command("dead-letters", "show", NAME, message)
    assert [entry["reason"] for entry in letter["history"]].count("retry_now") == 1
