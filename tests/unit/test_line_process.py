"""A benchmark's rival in a process of its own: what it answers, and that nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # they are run from the clone, and installed nowhere

from benchmarks import rival_storm  # noqa: E402
from benchmarks.line_process import LineProcess, RivalFailed, line_process  # noqa: E402

SECONDS = 30.0
ANSWERING = """
import sys
sys.stderr.write("what was logged\\n")
print("ok ready", flush=True)
for line in sys.stdin:
    request = line.strip()
    if request == "end":
        sys.exit(3)
    if request == "nothing":
        continue
    print("failed on purpose" if request == "fail" else f"ok {request}", flush=True)
"""
DEAF = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(f"ok {child.pid}", flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from benchmarks.line_process import LineProcess
process = LineProcess([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
process.answer(30)
process.pause()
print(process.pid, flush=True)
time.sleep(600)
"""


def test_each_request_is_answered_and_the_process_ends_with_its_input(tmp_path: Path) -> None:
    with line_process([sys.executable, "-c", ANSWERING], tmp_path / "log", start_s=SECONDS) as process:
        assert [process.ask(request, SECONDS) for request in ("run 1", "run 2")] == ["run 1", "run 2"]
    assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize(
    ("request_", "within_s", "says"),
    [
        ("fail", SECONDS, "answered failed 'on purpose' to fail"),
        ("end", SECONDS, "ended with 3 instead of answering to end"),
        ("nothing", 0.05, "did not answer in time to nothing"),
    ],
)
def test_what_is_no_measurement_is_an_error_with_the_end_of_the_log(
    tmp_path: Path, request_: str, within_s: float, says: str
) -> None:
    with (
        pytest.raises(RivalFailed, match=says) as failed,
        line_process([sys.executable, "-c", ANSWERING], tmp_path / "log", start_s=SECONDS) as process,
    ):
        process.ask(request_, within_s)
    assert str(failed.value).endswith("what was logged")
    assert not psutil.pid_exists(process.pid)


def test_a_process_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    process = LineProcess([sys.executable, "-c", DEAF], tmp_path / "log")
    child = psutil.Process(int(process.answer(SECONDS)))
    process.end(grace_s=0.05)
    assert not psutil.pid_exists(process.pid)
    psutil.wait_procs([child], SECONDS)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_paused_process_answers_when_it_is_resumed_and_ends_in_any_case(tmp_path: Path) -> None:
    with line_process([sys.executable, "-c", ANSWERING], tmp_path / "log", start_s=SECONDS) as process:
        process.pause()
        with pytest.raises(RivalFailed, match="did not answer in time"):
            process.ask("late", 0.05)
        process.resume()
        assert process.answer(SECONDS) == "late"
        process.pause()
    assert not psutil.pid_exists(process.pid)


def test_a_paused_process_does_not_outlive_its_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, ANSWERING, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            paused = psutil.Process(int(owner.stdout.readline()))
        finally:
            owner.kill()
    psutil.wait_procs([paused], SECONDS)
    assert not paused.is_running() or paused.status() == psutil.STATUS_ZOMBIE


def test_storm_is_left_out_by_name_where_there_is_no_maven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert rival_storm.missing() == "Maven (mvn)"
