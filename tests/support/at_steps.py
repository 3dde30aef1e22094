"""Interrupts, kills and errors at any step of what a test runs: at a line of some modules, or at a call to the system."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import pytest

STEPS, MANY = 20, 100
"""Of some hundred to five hundred; the second with `--all`."""
CALLS: Final = ("fsync", "link", "write", "rename", "open", "close")


@contextmanager
def at_line(number: int, act: Callable[[], None], modules: tuple[str, ...]) -> Generator[list[int]]:
    """Act before the line of this number that these modules run; how many were run."""
    seen, loaded = [0], [str(getattr(module, "__dict__", {}).get("__file__")) for module in [*sys.modules.values()]]
    assert all(any(file.endswith(name) for file in loaded) for name in modules), "a module has another name now"

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                act()
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(modules) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield seen
    finally:
        sys.settrace(before)


def interrupt() -> None:
    """As Ctrl-C."""
    raise KeyboardInterrupt


def interrupted_at(run: Callable[[], object], number: int, modules: tuple[str, ...]) -> None:
    """Run it with an interrupt before that line.

    In a thread of its own: an exception that was handled at that line stays the one that the thread handles, for good
    (CPython 3.11), and would be the context of all that is raised later.

    Raises:
        KeyboardInterrupt: that line was reached, and the interrupt went through.
    """

    def traced() -> None:
        with at_line(number, interrupt, modules):
            run()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(traced).result()


@contextmanager
def failing(number: int, code: int, *, after: bool) -> Generator[list[str]]:
    """Have the call of this number to the system fail, before or after it was carried out; the names of all calls."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) != number:
                return real(*args, **kwargs)
            # A close that fails has closed the descriptor all the same: Linux releases it first.
            if name == "close" or (after and name != "open"):
                real(*args, **kwargs)
            raise OSError(code, os.strerror(code))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield calls


def steps(number: int, seed: int, config: pytest.Config) -> list[int]:
    """Some of so many, in order."""
    chosen = min(MANY if config.getoption("--all") else STEPS, number)
    return sorted(random.Random(seed).sample(range(1, number + 1), chosen))
