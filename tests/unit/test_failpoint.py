"""Failpoints: off by default, named, counted, logged; and a mistyped one is an error."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from stormproof.core.base.errors import TransientError
from stormproof.core.base.failpoint import ENV, ENV_DRIVER_PID, ENV_LOG, FAILPOINTS, FailpointReached, failpoint, parse

PLACE = "prepare.after"


def test_it_does_nothing_unless_armed() -> None:
    failpoint(PLACE)


def test_names_are_unique_and_say_where_they_are() -> None:
    for name, point in FAILPOINTS.items():
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name), name
        assert point.name == name
        assert point.about
    assert len({point.about for point in FAILPOINTS.values()}) == len(FAILPOINTS)


def test_it_reads_several_with_counts() -> None:
    assert parse(f"{PLACE}=kill; open.after=raise@3 ;") == {PLACE: ("kill", 1), "open.after": ("raise", 3)}
    assert parse("") == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prepare.aftr=kill", r"no failpoint 'prepare\.aftr'; known: .*prepare\.after"),
        (f"{PLACE}=explode", r"no action 'explode' for prepare\.after; known: kill, worker, pause, raise"),
        (f"{PLACE}=raise@x", "'x'"),
        (PLACE, "no action ''"),
    ],
)
def test_what_is_mistyped_is_an_error(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(text)


def test_an_unknown_place_in_the_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, f"{PLACE}=raise")
    with pytest.raises(KeyError):
        failpoint("prepare.aftr")


def test_raise_is_a_transient_error_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, f"{PLACE}=raise")
    with pytest.raises(FailpointReached, match=PLACE) as caught:
        failpoint(PLACE)
    assert isinstance(caught.value, TransientError)
    assert caught.value.details == {"failpoint": PLACE}
    failpoint(PLACE)  # once only


def test_it_waits_for_the_kth_time_and_counts_anew_when_armed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, f"{PLACE}=raise@3")
    for _ in range(2):
        failpoint(PLACE)
        failpoint("open.after")
    with pytest.raises(FailpointReached):
        failpoint(PLACE)
    monkeypatch.setenv(ENV, f"{PLACE}=raise")
    with pytest.raises(FailpointReached):
        failpoint(PLACE)


def test_each_place_that_is_reached_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(ENV_LOG, str(log))
    for place in (PLACE, "open.after", PLACE):
        failpoint(place)
    assert log.read_text().split() == [PLACE, "open.after", PLACE]


@pytest.mark.parametrize(
    ("action", "driver", "killed"), [("kill", False, True), ("kill", True, False), ("worker", True, True)]
)
def test_kill_strikes_the_driver_and_worker_strikes_oneself(
    monkeypatch: pytest.MonkeyPatch, action: str, driver: bool, killed: bool
) -> None:
    """In a fork: `kill` goes to the driver where one is named (here a second fork), `worker` to the very process."""
    monkeypatch.delenv(ENV_DRIVER_PID, raising=False)
    read, write = os.pipe()
    victim = os.fork()
    if victim == 0:
        os.close(write)
        os.read(read, 1)  # lives until it is killed, or the test has closed the pipe
        os._exit(7)
    monkeypatch.setenv(ENV, f"{PLACE}={action}")
    if driver:
        monkeypatch.setenv(ENV_DRIVER_PID, str(victim))
    reacher = os.fork()
    if reacher == 0:
        failpoint(PLACE)
        os._exit(0)
    _, status = os.waitpid(reacher, 0)
    os.close(read)
    os.close(write)
    _, victim_status = os.waitpid(victim, 0)
    assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL) == killed
    assert (os.WIFSIGNALED(victim_status) and os.WTERMSIG(victim_status) == signal.SIGKILL) == (driver and not killed)


def test_pause_stops_until_somebody_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, f"{PLACE}=pause")
    child = os.fork()
    if child == 0:
        failpoint(PLACE)
        os._exit(5)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
