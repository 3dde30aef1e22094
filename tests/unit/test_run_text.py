"""What a run says to a person: short lines with the right words, and JSON lines where nobody looks."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.memory_run import World
from support.terminal import Screen

from stormproof.trident.cli.logs import JsonLines, RunProgress, TextLines, log_line, logging_to_stderr, run_text
from stormproof.trident.cli.run import Live
from stormproof.trident.driver import control_line
from stormproof.trident.driver.control_line import Stopping
from stormproof.trident.ledger.control import JobProgress
from stormproof.trident.terms.observers import BatchResult, RunStatistics


def split(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never works")
    return line.split()


def told(world: World, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log of a run says in words, without the times that it took."""
    with caplog.at_level(logging.INFO, "stormproof.txn"):
        world.run()
    lines = [TextLines(is_kept=False).format(record) for record in caplog.records if record.name == "stormproof.txn"]
    return [line[9:].rpartition(", ")[0] for line in lines]


def test_a_line_says_what_was_committed_retried_and_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = told(World([b"a x", b"poison", b"b"], tmp_path, split=split), caplog)
    assert lines[0] == "txid 1: 2 messages committed, 1 to be retried (1 error)"
    assert lines[1:] == ["txid 2 (retry): nothing committed, 1 dead letter (1 error)"]
    assert not any("aborted" in line or "{" in line for line in lines)
    facts = [json.loads(JsonLines().format(r))["txn"] for r in caplog.records if r.getMessage().startswith("txn ")]
    assert [f["outcome"] for f in facts][:2] == ["committed", "failed"]
    assert [f["dead_letters"] for f in facts][-1] == 1


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (BatchResult(1, "aborted", 4, 0, False, 1, 0, reason="halved after unverified"), "txid 1: 4 messages split,"),
        (BatchResult(1, "abandoned", 1, 0, False, 1, 0), "txid 1: 1 message abandoned"),
        (
            BatchResult(7, "committed", 9, 2, True, 1, 9, returned=1, reasons={"error": 2}, dead_letters=1),
            "txid 7 (retry): 6 messages committed, 1 to be retried, 1 dead letter (2 error), 1 returned with them",
        ),
    ],
)
def test_each_end_of_a_batch_has_its_words(result: BatchResult, text: str) -> None:
    facts = {f: getattr(result, f) for f in BatchResult.__slots__} | {"outcome": result.outcome}
    line = log_line("txn", facts)
    assert line is not None
    assert line.startswith(text)
    assert line.endswith(result.reason)


def test_the_running_total_counts_retries_and_dead_letters() -> None:
    total = RunProgress(RunStatistics("words", "exactly-once", 1))
    assert total.text == "words: 0 messages committed in 0 batches"
    total = total.after(BatchResult(1, "committed", 5, 2, False, 1, 5, dead_letters=1))
    assert total.text == "words: 3 messages committed in 1 batch, 1 to be retried, 1 dead letter"


@pytest.mark.parametrize(
    ("state", "failed", "returned", "left"),
    [("committed", 0, 0, 1), ("aborted", 2, 0, 3), ("aborted", 0, 0, 3), ("committed", 1, 1, 3)],
)
def test_what_waits_for_a_retry_is_taken_back_once_it_was_retried(
    state: str, failed: int, returned: int, left: int
) -> None:
    total = RunProgress(RunStatistics("words", "exactly-once", 1)).after(BatchResult(1, "committed", 5, 3, False, 1, 5))
    total = total.after(BatchResult(2, state, 2, failed, True, 1, 2, returned=returned))
    assert f", {left} to be retried" in total.text


@pytest.mark.parametrize("stopped", ["idle", "limit", "signal", "stop", "drain"])
def test_the_last_lines_say_why_it_ended_and_the_next_command(stopped: str) -> None:
    text = run_text(RunStatistics("words", "exactly-once", 2, batches=1, messages=1, dead_letters=2, stopped=stopped))
    assert text.startswith("words (exactly-once, epoch 2): 1 batch, 1 message committed, 0 failures, 2 dead letters,")
    ended, see = text.split("\n")[1:]
    assert ended.startswith("ended: ")
    assert stopped == "idle" or "the next run goes on from here" in ended
    assert see == "see the dead letters: stormproof dead-letters list words"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_is_text_with_the_date_where_it_is_kept_or_json(
    form: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    facts = {"epoch": 2, "rolled_forward": [7], "suppressed": [[7, "counts"]], "files_swept": 1, "took_over_from": None}
    with logging_to_stderr("info", form):  # type: ignore[arg-type]
        logging.getLogger("stormproof.txn").info("recovered %s", json.dumps(facts))
    line = next(line for line in screen.getvalue().splitlines() if "recovered" in line)
    if form == "json":
        assert json.loads(line)["recovered"] == facts
    else:
        assert bool(re.match(r"\d{4}-\d\d-\d\d ", line)) is not is_terminal
        assert "recovered: committed txid 7; suppressed a duplicate of txid 7 at" in line


def test_nothing_is_drawn_before_there_is_something_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with logging_to_stderr("info", "text") as progress:
        assert screen.getvalue() == ""
        progress("waiting")
        assert screen.getvalue() != ""


def test_the_line_of_progress_is_one_row_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    with logging_to_stderr("info", "text") as progress:
        progress("[###-------] 30% txid 1: 91 of 300 messages through lookup; words: 0 messages committed")
    (row,) = (line for line in screen.getvalue().splitlines() if "###" in line)
    assert (
        re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", row.rpartition("\r")[2])[1:]
        == " [###-------] 30% txid 1: 91 of 300 me…"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_of_in_one_row_in_place_of_the_line_of_progress(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, terminal = os.openpty()
    monkeypatch.setattr(control_line, "_STDERR", terminal)
    monkeypatch.setenv("TERM", "xterm")
    before = signal.signal(number, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT
    with open(ours, "rb") as shown:
        with Stopping() as stopping:
            os.kill(os.getpid(), number)
            row = shown.readline().decode()
            assert stopping.asked
        os.close(terminal)
    signal.signal(number, before)
    clear, show_cursor = "\r\x1b[2K", "\x1b[?25h"
    assert row.startswith(
        f"{clear}{show_cursor}stormproof: {signal.Signals(number).name}: stopping once all has started"
    )
    assert len(row.rpartition("\x1b[?25h")[2].rstrip()) < 80


def test_the_live_line_has_the_job_that_commits_next_and_drops_it_when_its_batch_has_ended() -> None:
    shown: list[str] = []
    live = Live("words", shown.append)
    first, second = (JobProgress(txid, 1, "lookup", txid, 4, "messages", 1.0) for txid in (1, 2))
    live.on_progress(second)
    live.on_progress(first)
    live.on_progress(second)
    live.on_batch(BatchResult(1, "aborted", 4, 4, False, 2, 0))
    live.on_progress(second)
    jobs = [line.partition(";")[0] for line in shown]
    assert jobs[1] == jobs[2] == "[##--------] 25% txid 1: 1 of 4 messages through lookup, 1/s, 1 s"
    assert jobs[3] == shown[3] == "words: 0 messages committed in 1 batch, 4 to be retried"
    assert jobs[4] == jobs[0] == "[#####-----] 50% txid 2: 2 of 4 messages through lookup, 2/s, 1 s"
