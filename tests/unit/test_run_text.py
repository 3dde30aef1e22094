"""What a run says to a person: short lines with the right words, and JSON lines where nobody looks."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from support.memory_run import World
from support.terminal import Screen

from stormproof.trident.cli.logs import JsonLines, TextLines, logging_to_stderr
from stormproof.trident.cli.run_text import Progress, job_text, log_line, run_text
from stormproof.trident.statistics import BatchResult, RunStatistics
from stormproof.trident.watched_job import JobProgress


def split(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never works")
    return line.split()


def told(world: World, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log of a run says in words, without the times that it took."""
    with caplog.at_level(logging.INFO, "stormproof.txn"):
        world.run()
    lines = [TextLines().format(record) for record in caplog.records if record.name == "stormproof.txn"]
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
    total = Progress("words")
    assert total.text == "words: 0 messages committed in 0 batches"
    total = total.after(BatchResult(1, "committed", 5, 2, False, 1, 5, dead_letters=1))
    assert total.text == "words: 3 messages committed in 1 batch, 1 to be retried, 1 dead letter"


@pytest.mark.parametrize("stopped", ["idle", "limit", "signal", "stop", "drain"])
def test_the_last_lines_say_why_it_ended_and_the_next_command(stopped: str) -> None:
    text = run_text(RunStatistics("words", "exactly-once", 2, batches=1, messages=1, dead_letters=2, stopped=stopped))
    assert text.startswith("words (exactly-once, epoch 2): 1 batch, 1 message committed, 0 failures, 2 dead letters,")
    ended, see = text.split("\n")[1:]
    assert ended.startswith("ended: ")
    assert stopped == "idle" or "the next run goes on from here" in ended
    assert see == "see the dead letters: stormproof dead-letters list words"


@pytest.mark.parametrize(
    ("form", "is_terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("text", False, False), ("json", True, True)],
)
def test_the_log_is_text_on_a_terminal_and_json_elsewhere(
    form: str, is_terminal: bool, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    facts = {"epoch": 2, "rolled_forward": [7], "suppressed": [[7, "counts"]], "files_swept": 1, "took_over_from": None}
    with logging_to_stderr("info", form):  # type: ignore[arg-type]
        logging.getLogger("stormproof.txn").info("recovered %s", json.dumps(facts))
    line = next(line for line in screen.getvalue().splitlines() if "recovered" in line)
    if is_json:
        assert json.loads(line)["recovered"] == facts
    else:
        assert "recovered: committed txid 7; suppressed a duplicate of txid 7 at" in line


def test_nothing_is_drawn_before_there_is_something_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with logging_to_stderr("info", "auto") as progress:
        assert screen.getvalue() == ""
        progress("waiting")
        assert screen.getvalue() != ""


def test_a_job_is_told_of_in_one_line() -> None:
    job = JobProgress(5, 1, 600, 214, 10.2)
    assert job_text(job) == "txid 5: 600 messages, 214 rows in all steps, 21 a second, 10 s"
    assert job_text(JobProgress(5, 2, None, 1, 0.3)) == "txid 5 (attempt 2): 1 row in all steps, 0 s"
