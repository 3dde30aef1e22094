"""The lock of a folder ends with its context, also where an interrupt cuts the way out of it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.at_steps import at_line, interrupt, interrupted_at

from stormproof.core.storage.files import LocalFiles

MODULES = ("storage/files.py",)


def lock_once(folder: Path) -> None:
    with LocalFiles().locked(str(folder)):
        pass


def is_free(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what is closed already
def test_an_interrupt_at_any_line_leaves_the_lock_free(tmp_path: Path) -> None:
    with at_line(0, interrupt, MODULES) as lines:
        lock_once(tmp_path)
    assert lines[0] > 3
    for step in range(1, lines[0] + 1):
        with suppress(KeyboardInterrupt):
            interrupted_at(lambda: lock_once(tmp_path), step, MODULES)
        assert is_free(tmp_path), f"step {step}"


def test_control_a_lock_that_is_held_is_seen(tmp_path: Path) -> None:
    with LocalFiles().locked(str(tmp_path)):
        assert not is_free(tmp_path)
