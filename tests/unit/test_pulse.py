"""The pulse in files: what the driver sees of tasks that run, end, fail or are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.pulses import note

from stormproof.core.errors import JobFailed, TransientError
from stormproof.core.pulse import folder as folder_module
from stormproof.core.pulse.folder import job_folder, progress, suspects, suspects_of_dead, sweep
from stormproof.core.pulse.record import SUSPECTS_MAX, Progress
from stormproof.core.pulse.task import Pulse, running


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def killed(folder: Path, task: int, *messages: int, in_hand: int) -> None:
    """A careful task over these messages whose process ends while one is in hand."""
    child = os.fork()
    if child == 0:
        pulse = Pulse(folder, 0, task, careful=True)
        pulse.at(ids(*messages))
        for message in pulse.each(messages):
            if message == in_hand:
                os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class GivesUpError(Exception):
    """What ends a task that does not come to its end."""


def failing(folder: Path, task: int, work: Callable[[Pulse], None], *, careful: bool = True) -> None:
    """A task that ends with an exception after some work."""
    with contextlib.suppress(GivesUpError), Pulse(folder, 0, task, careful=careful) as pulse:
        work(pulse)
        raise GivesUpError


def in_hand(*numbers: int) -> Callable[[Pulse], None]:
    """Work that stops with the first of these messages in hand."""

    def work(pulse: Pulse) -> None:
        pulse.at(ids(*numbers))
        next(pulse.each(numbers))

    return work


def test_each_row_taken_from_a_loop_is_a_sign_of_life(tmp_path: Path) -> None:
    with Pulse(tmp_path, 0, 0, careful=False) as pulse:
        seen = [progress(tmp_path)]
        for _ in pulse.each(["a", "b", "c"]):
            pulse.publish()
            seen.append(progress(tmp_path))
        pulse.beat(10)
        pulse.publish()
        seen.append(progress(tmp_path))
    assert [p.rows for p in seen] == [0, 1, 2, 3, 13]
    assert {(p.started, p.running) for p in seen} == {(1, 1)}
    assert progress(tmp_path) == Progress(13, 1, 0)


def test_a_loop_without_the_pulse_looks_like_a_hang(tmp_path: Path) -> None:
    """The negative control: a row that is not taken through the pulse is no sign of life."""
    with Pulse(tmp_path, 0, 0, careful=False) as pulse:
        for _ in ["a", "b", "c"]:
            pulse.publish()
            assert progress(tmp_path).rows == 0


def test_a_reset_from_inside_a_long_call_is_a_sign_of_life(tmp_path: Path) -> None:
    with Pulse(tmp_path, 0, 0, careful=False) as pulse:
        rows = pulse.each(["long", "short"])
        next(rows)
        pulse.publish()
        before = progress(tmp_path)
        pulse.reset()
        pulse.publish()
        assert progress(tmp_path) != before
        assert list(rows) == ["short"]
    assert progress(tmp_path).rows == 3


def test_a_loop_that_went_on_after_an_exception_counts_each_row_once(tmp_path: Path) -> None:
    with Pulse(tmp_path, 0, 0, careful=True) as pulse:
        pulse.at(ids(1, 2, 3))
        rows = pulse.each([1, 0, 2])
        failed = 0
        while True:
            try:
                for number in rows:
                    _ = 1 // number
                break
            except ZeroDivisionError:
                failed += 1
    assert failed == 1
    assert progress(tmp_path).rows == 3


def test_the_message_in_hand_outlives_a_killed_worker(tmp_path: Path) -> None:
    killed(tmp_path, 0, 11, -12, 13, in_hand=-12)
    assert suspects(tmp_path) == (-12,)


def test_a_task_whose_worker_died_does_not_run_any_more(tmp_path: Path) -> None:
    killed(tmp_path, 0, 1, in_hand=1)
    assert progress(tmp_path) == Progress(0, 1, 0)
    with Pulse(tmp_path, 0, 0, careful=True):
        assert progress(tmp_path).running == 1, "the task that repeats it"


def test_a_task_on_another_machine_or_without_locks_looks_as_if_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, 0, 1, in_hand=1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(folder_module, "_machine", lambda: 1)
        assert progress(tmp_path).running == 1

    def refuse(*_: object) -> None:
        raise OSError

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", refuse)
        killed(tmp_path, 1, 2, in_hand=2)
    assert progress(tmp_path) == Progress(0, 2, 1)


def test_a_stopped_worker_still_runs(tmp_path: Path) -> None:
    """It hangs, and the message in its hand is to blame: nothing else tells it from a dead one."""
    child = os.fork()
    if child == 0:
        with Pulse(tmp_path, 0, 0, careful=True):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        assert progress(tmp_path).running == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert progress(tmp_path).running == 0


def test_a_task_that_ended_well_is_no_suspect_and_one_that_failed_is(tmp_path: Path) -> None:
    with Pulse(tmp_path, 0, 0, careful=True) as pulse:
        pulse.at(ids(1, 2))
        assert list(pulse.each("ab")) == ["a", "b"]
        note(pulse, 3)
    assert suspects(tmp_path) == ()
    failing(tmp_path, 1, in_hand(4, 5))
    assert suspects(tmp_path) == (4,)
    assert progress(tmp_path).running == 0


def test_nothing_is_noted_after_the_last_row_or_where_nothing_can_be_named(tmp_path: Path) -> None:
    def to_the_end(pulse: Pulse) -> None:
        pulse.at(ids(1, 2))
        list(pulse.each("ab"))

    def nameless(pulse: Pulse) -> None:
        pulse.at(None)
        next(pulse.each("ab"))

    failing(tmp_path, 0, to_the_end)
    failing(tmp_path, 1, nameless)
    assert suspects(tmp_path) == ()


def test_without_careful_nothing_is_noted(tmp_path: Path) -> None:
    failing(tmp_path, 0, in_hand(1, 2), careful=False)
    failing(tmp_path, 1, lambda pulse: note(pulse, 3), careful=False)
    assert suspects(tmp_path) == ()


def test_the_one_noted_at_every_repetition_is_named_and_its_neighbours_are_not(tmp_path: Path) -> None:
    for _ in range(3):
        killed(tmp_path, 0, 1, 2, 3, in_hand=2)
    killed(tmp_path, 1, 4, 5, in_hand=4)
    assert suspects(tmp_path) == (2,)


def test_too_many_equal_suspects_name_nobody(tmp_path: Path) -> None:
    for number in range(SUSPECTS_MAX + 1):
        assert len(suspects(tmp_path)) == number
        failing(tmp_path, number, in_hand(number))
    assert suspects(tmp_path) == ()


def test_a_dead_drivers_suspects_are_found_by_name_and_swept(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with job_folder(tmp_path, ("life", 7, 2)) as folder:
            killed(folder, 0, 1, 2, in_hand=2)
            os._exit(9)  # the driver dies: nobody removes the folder
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert suspects_of_dead(tmp_path, "life", 7) == (2,)
    assert suspects_of_dead(tmp_path, "life", 77) == suspects_of_dead(tmp_path, "other", 7) == ()
    sweep(tmp_path, "other")
    assert suspects_of_dead(tmp_path, "life", 7) == (2,)
    sweep(tmp_path, "life")
    assert list(tmp_path.iterdir()) == []


def test_a_jobs_folder_is_there_while_it_runs_and_empty_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "life.7.1").mkdir()
    (tmp_path / "life.7.1" / "old").touch()
    with job_folder(tmp_path, ("life", 7, 1)) as folder:
        assert list(folder.iterdir()) == []
        with running(folder, 0, 0) as pulse:
            assert pulse is not None
    assert list(tmp_path.iterdir()) == []


def test_off_costs_and_makes_nothing(tmp_path: Path) -> None:
    with running(None, 0, 0) as pulse:
        assert pulse is None
    assert suspects_of_dead(None, "life", 7) == ()
    sweep(None, "life")
    assert progress(tmp_path / "missing") == Progress()
    assert suspects(tmp_path / "missing") == ()


def test_a_folder_that_a_worker_does_not_reach_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(TransientError, match="STORMPROOF_STAGING_DIR") as raised,
        running(tmp_path / "missing", 0, 0),
    ):
        pass
    assert not isinstance(raised.value, JobFailed), "which would count against the message"
