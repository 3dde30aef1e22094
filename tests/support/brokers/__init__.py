"""Real message servers for tests: started on loopback, killed, started again; or left out, saying what to install.

Each module has a `Broker`, and a fixture of a running one for the session, which begins with `with running(...)`. Tests
whose server cannot be started here are skipped with `LEFT_OUT` and what to install, and the run's last lines repeat it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import pytest

LEFT_OUT: Final = "left out: "
WAIT_S: Final = 60.0


class Broker(ABC):
    """One server as a direct child of this process, with its files in a folder. The port stays through a restart."""

    NAME: ClassVar[str]
    INSTALL: ClassVar[str]
    """The command that installs what is missing."""
    START_S: ClassVar[float] = WAIT_S
    """How long a start may take."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What is not installed here; None: it can be started."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command that runs the server in the foreground, on `port`, with its files in `folder`."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether a client is served now; called until it is."""

    def environment(self) -> Mapping[str, str]:
        """Variables of the server, in addition to this process's."""
        return {}

    def prepare(self) -> None:
        """What is done once before the first start, such as formatting a folder; by default nothing."""
        return

    def leave(self) -> None:
        """End what outlives the server; by default nothing does."""
        return

    @property
    def log(self) -> Path:
        """What the server wrote to its standard output and error."""
        return self.folder / "log"

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )
        until(self._serves, f"{self.NAME} does not answer; its log: {self.log}", self.START_S)

    def _serves(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            print(self.log.read_text(errors="replace")[-2_000:], file=sys.stderr)  # not again in the list of failures
            raise AssertionError(f"{self.NAME} ended; its log: {self.log}")
        return self.answers()

    def kill(self) -> None:
        """As a power failure of the process: SIGKILL to it and to what it started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As an operator does."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill it, and start it with what it had on disk."""
        self.kill()
        self.start()

    def save(self, name: str) -> None:
        """Stop it, copy what it has on disk, and start it again."""
        self.stop()
        shutil.copytree(self.folder, self._copy(name), symlinks=True)
        self.start()

    def set_back(self, name: str, only: str = "") -> None:
        """Kill it, and start it with a copy of all, or of one folder, as after a power loss. The copy stays."""
        self.kill()
        shutil.rmtree(self.folder / only)
        shutil.copytree(self._copy(name) / only, self.folder / only, symlinks=True)
        self.start()

    def _copy(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{name}")

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, how)
        if self.process is not None:
            self.process.wait(WAIT_S)
            self.process = None


Kind = TypeVar("Kind", bound=Broker)


def skip_where_missing(kind: type[Broker]) -> None:
    """Skip the test where such a server cannot be started here, and say what to install."""
    missing = kind.missing()
    if missing is not None:
        pytest.skip(f"{LEFT_OUT}{kind.NAME}: {missing} is not installed; install it with: {kind.INSTALL}")


@contextmanager
def running(kind: type[Kind], tmp_path_factory: pytest.TempPathFactory, **options: Any) -> Generator[Kind]:
    """A server of this kind for as long as the block lasts; skips the test where it cannot be started here."""
    skip_where_missing(kind)
    with started(kind, tmp_path_factory.mktemp(kind.NAME.lower().replace(" ", "-")), **options) as broker:
        yield broker


@contextmanager
def started(kind: type[Kind], folder: Path, **options: Any) -> Generator[Kind]:
    """A server of this kind, with its files in this folder, for as long as the block lasts."""
    folder.mkdir(exist_ok=True)
    broker = kind(folder, **options)
    broker.prepare()
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()
        broker.leave()


def left_out(reasons: Sequence[str]) -> list[str]:
    """Of what tests were skipped for: each server that was left out, once."""
    return sorted({text.removeprefix("Skipped: ") for text in reasons if LEFT_OUT in text})


PORTS: Final = range(10_000, 20_000)
"""The ports of tests' servers. Linux gives clients those from 32768 on, unless it is told otherwise."""


def free_port() -> int:
    """A TCP port of loopback that nobody listens on, for this process alone for as long as it lives.

    It is none that the system gives to clients, any of which may be gone before a server of ours is up, or while it is
    down; and it is given once, whatever number of workers ask.
    """
    first = os.getpid() * 37  # workers do not try the same ones
    for number in range(first, first + len(PORTS)):
        port = PORTS[number % len(PORTS)]
        if keep_port(port):
            return port
    raise AssertionError(f"no port of {PORTS} is free")


def keep_port(port: int) -> bool:
    """Keep a port to this process; whether it could be had: no process of the tests has it, and nobody listens on it."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0stormproof-tests-{port}")  # an abstract name of Linux's: it goes with the process
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    return True


_marks: Final[list[socket.socket]] = []


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Any, what: str, seconds: float = WAIT_S) -> None:
    """Wait until `holds()`; fails with `what` after some time."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
