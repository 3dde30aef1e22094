"""Functions that do not survive one message, each in its own way."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from stormproof.core.base.failpoint import ENV_DRIVER_PID

POISON: Final = "poison in here"
EXIT_STATUS: Final = 13


class Poisoning(StrEnum):
    """What the function does with the poison."""

    EXIT = "exit"
    """Ends its process, without a word."""
    ALLOCATE = "allocate"
    """Allocates without end."""
    HANG = "hang"
    """Waits for what never comes."""
    SPIN = "spin"
    """Spins in C code that never gives other threads a turn."""
    DRIVER = "driver"
    """Kills the driver, and waits to be killed with it."""


@dataclass(frozen=True)
class Split:
    """Splits lines into words; poisoned by one line. Where it took hold is written down: the pid, a line a time."""

    poisoning: Poisoning
    pids: Path
    words: Callable[[str], list[str]] = field(default=str.split)

    def __call__(self, line: str) -> list[str]:
        if line == POISON:
            with self.pids.open("a") as file:
                file.write(f"{os.getpid()}\n")
            self._take_hold()
        return self.words(line)

    def _take_hold(self) -> None:
        match self.poisoning:
            case Poisoning.EXIT:
                os._exit(EXIT_STATUS)
            case Poisoning.ALLOCATE:
                hoard = list[bytes]()
                while True:
                    hoard.append(bytes(range(256)) * 40_000)
            case Poisoning.HANG:
                threading.Event().wait()
            case Poisoning.SPIN:
                re.match("(a+)+$", "a" * 60 + "b")
            case Poisoning.DRIVER:
                driver = int(os.environ.get(ENV_DRIVER_PID) or os.getpid())
                os.kill(driver, signal.SIGKILL)
                threading.Event().wait()


@dataclass(frozen=True)
class Slow:
    """Splits lines into words, and takes its time for each."""

    each_s: float

    def __call__(self, line: str) -> list[str]:
        time.sleep(self.each_s)
        return line.split()


def pids_in(path: Path) -> list[int]:
    """Where the poison took hold, in order."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []
