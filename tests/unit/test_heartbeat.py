"""The heartbeat: what the driver sees of tasks below it that run, end, fail or are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.heartbeats import hearing, listening, note, published, until

from stormproof.core.heartbeat.listener import JobSigns, suspects_of_dead, sweep
from stormproof.core.heartbeat.task import (
    BEFORE,
    DONE,
    PASSAGE,
    PASSED,
    STAGE,
    STATE,
    STEP,
    SUSPECTS_MAX,
    TOTAL,
    Heartbeat,
    ProgressMark,
    Record,
    running,
)


@pytest.fixture
def heard() -> Iterator[JobSigns]:
    with hearing() as made:
        yield made


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def killed(heard: JobSigns, task: int, *messages: int, in_hand: int) -> None:
    """A careful task over these messages whose process ends while one is in hand."""
    child = os.fork()
    if child == 0:
        heartbeat = Heartbeat(heard.place, 0, task, careful=True)
        heartbeat.at(ids(*messages))
        for message in heartbeat.each(messages):
            if message == in_hand:
                os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class GivesUpError(Exception):
    """What ends a task that does not come to its end."""


def failing(heard: JobSigns, task: int, work: Callable[[Heartbeat], None], *, careful: bool = True) -> None:
    """A task that ends with an exception after some work."""
    with contextlib.suppress(GivesUpError), Heartbeat(heard.place, 0, task, careful=careful) as heartbeat:
        work(heartbeat)
        raise GivesUpError


def in_hand(*numbers: int) -> Callable[[Heartbeat], None]:
    """Work that stops with the first of these messages in hand."""

    def work(heartbeat: Heartbeat) -> None:
        heartbeat.at(ids(*numbers))
        next(heartbeat.each(numbers))

    return work


def test_each_row_taken_from_a_loop_is_a_sign_of_life(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        seen = [heard.progress()]
        for _ in heartbeat.each(["a", "b", "c"]):
            published(heartbeat)
            seen.append(heard.progress())
        heartbeat.beat(10)
        published(heartbeat)
        seen.append(heard.progress())
    assert [p.rows for p in seen] == [0, 1, 2, 3, 13]
    assert {(p.started, p.running) for p in seen} == {(1, 1)}
    assert heard.progress() == ProgressMark(13, 1, 0)


def test_tasks_that_one_process_runs_in_turn_are_one_task_and_each_begin_is_a_sign_of_life(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        heartbeat.take(0, {"split": 1})
        heartbeat.begin(10)
        heartbeat.enter("split", 10)
        heartbeat.take(1, {"count": 1})
        heartbeat.expect(7)
        published(heartbeat)
        (record,) = heard.progress().tasks
        assert (record[STAGE], record[STEP], record[TOTAL], record[PASSAGE]) == (1, 0, 7, 0)
        assert heard.progress() == ProgressMark(12, 1, 1)
    assert heard.progress() == ProgressMark(12, 1, 0)


def test_rows_that_are_through_a_step_are_told_apart_from_the_one_in_hand(heard: JobSigns) -> None:
    """A step may get more rows than its passage has, or fewer; a call that resets its time is none."""

    def told(heartbeat: Heartbeat) -> Record:
        published(heartbeat)
        (task,) = heard.progress().tasks
        return task[STEP : STAGE + 1]

    with Heartbeat(heard.place, 2, 0, careful=False, steps={"split": 1, "count": 2}) as heartbeat:
        heartbeat.expect(6)
        heartbeat.begin(4)
        assert told(heartbeat) == (0, 6, 0, 4, 0, 2)
        heartbeat.enter("split", 8)
        words = heartbeat.each(range(8))
        assert [told(heartbeat)[PASSED - 1] for _ in words] == [0, 0, 1, 1, 2, 2, 3, 3], "half a message each"
        heartbeat.enter("count", 2)
        assert told(heartbeat) == (2, 6, 0, 4, 0, 2)
        heartbeat.beat()
        heartbeat.reset()
        assert told(heartbeat) == (2, 6, 0, 4, 2, 2)
        heartbeat.begin(2)
        assert told(heartbeat) == (0, 6, 4, 2, 0, 2)
    (task,) = heard.progress().tasks
    assert (task[STATE], task[BEFORE] + task[PASSAGE]) == (DONE, 6)


def test_a_loop_without_the_heartbeat_looks_like_a_hang(heard: JobSigns) -> None:
    """The negative control: a row that is not taken through the heartbeat is no sign of life."""
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        for _ in ["a", "b", "c"]:
            published(heartbeat)
            assert heard.progress().rows == 0


def test_a_reset_from_inside_a_long_call_is_a_sign_of_life(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        rows = heartbeat.each(["long", "short"])
        next(rows)
        published(heartbeat)
        before = heard.progress()
        heartbeat.reset()
        published(heartbeat)
        assert heard.progress() != before
        assert list(rows) == ["short"]
    assert heard.progress().rows == 3


def test_a_loop_that_went_on_after_an_exception_counts_each_row_once(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=True) as heartbeat:
        heartbeat.at(ids(1, 2, 3))
        rows = heartbeat.each([1, 0, 2])
        failed = 0
        while True:
            try:
                for number in rows:
                    _ = 1 // number
                break
            except ZeroDivisionError:
                failed += 1
    assert failed == 1
    assert heard.progress().rows == 3


def test_the_message_in_hand_outlives_a_killed_worker(heard: JobSigns) -> None:
    killed(heard, 0, 11, -12, 13, in_hand=-12)
    assert heard.suspects() == (-12,)


def test_a_task_whose_worker_died_does_not_run_any_more(heard: JobSigns) -> None:
    killed(heard, 0, 1, in_hand=1)
    until(lambda: heard.progress() == ProgressMark(0, 1, 0))
    with Heartbeat(heard.place, 0, 0, careful=True):
        assert heard.progress().running == 1, "the task that repeats it"


def test_a_stopped_worker_still_runs(heard: JobSigns) -> None:
    """It hangs, and the message in its hand is to blame: nothing else tells it from a dead one."""
    child = os.fork()
    if child == 0:
        with Heartbeat(heard.place, 0, 0, careful=True):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        assert heard.progress().running == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    until(lambda: heard.progress().running == 0)


def test_a_task_that_ended_well_is_no_suspect_and_one_that_failed_is(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=True) as heartbeat:
        heartbeat.at(ids(1, 2))
        assert list(heartbeat.each("ab")) == ["a", "b"]
        note(heartbeat, 3)
    assert heard.suspects() == ()
    failing(heard, 1, in_hand(4, 5))
    assert heard.suspects() == (4,)
    assert heard.progress().running == 0


def test_nothing_is_noted_after_the_last_row_or_where_nothing_can_be_named(heard: JobSigns) -> None:
    def to_the_end(heartbeat: Heartbeat) -> None:
        heartbeat.at(ids(1, 2))
        list(heartbeat.each("ab"))

    def nameless(heartbeat: Heartbeat) -> None:
        heartbeat.at(None)
        next(heartbeat.each("ab"))

    failing(heard, 0, to_the_end)
    failing(heard, 1, nameless)
    assert heard.suspects() == ()


def test_without_careful_nothing_is_noted(heard: JobSigns) -> None:
    failing(heard, 0, in_hand(1, 2), careful=False)
    failing(heard, 1, lambda heartbeat: note(heartbeat, 3), careful=False)
    assert heard.suspects() == ()


def test_the_one_noted_at_every_repetition_is_named_and_its_neighbours_are_not(heard: JobSigns) -> None:
    for _ in range(3):
        killed(heard, 0, 1, 2, 3, in_hand=2)
    killed(heard, 1, 4, 5, in_hand=4)
    assert heard.suspects() == (2,)


def test_too_many_equal_suspects_name_nobody(heard: JobSigns) -> None:
    for number in range(SUSPECTS_MAX + 1):
        assert len(heard.suspects()) == number
        failing(heard, number, in_hand(number))
    assert heard.suspects() == ()


def test_a_note_outlives_the_driver_that_dies_with_its_task(tmp_path: Path) -> None:
    """The function ends the process that it shares with the driver: no thread of it runs any more."""
    child = os.fork()
    if child == 0:
        with listening(tmp_path) as listener, listener.of_job(("life", 7, 2)) as heard:
            heartbeat = Heartbeat(heard.place, 0, 0, careful=True)
            heartbeat.at(ids(1, 2, 3))
            for message in heartbeat.each((1, 2, 3)):
                if message == 2:
                    os._exit(9)  # nobody removes the folder
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
    with listening(tmp_path) as listener, listener.of_job(("life", 7, 1)) as heard:
        assert list((tmp_path / "life.7.1").iterdir()) == []
        with running(heard.place, 0, 0) as heartbeat:
            assert heartbeat is not None
    assert list(tmp_path.iterdir()) == []


def test_off_costs_and_makes_nothing() -> None:
    with running(None, 0, 0) as heartbeat:
        assert heartbeat is None
    assert suspects_of_dead(None, "life", 7) == ()
    sweep(None, "life")
