"""The demo's drivers: `stormproof run` as a child process that is killed at a failpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import psutil

DRIVER_TIMEOUT_S: Final = 180.0
LINGER_S: Final = 10.0
"""A killed driver's JVM ends by itself in some 2 s; after this time it is killed."""
READ_S: Final = 1.0
KILLED: Final = -int(signal.SIGKILL)

OnFact = Callable[[str, dict[str, Any]], None]
"""Called with `txn` or `recovered`, and the facts of the log line."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A failpoint at which a driver is to die, the `at`-th time that it reaches it."""

    failpoint: str
    at: int = 1

    @property
    def armed(self) -> str:
        """The value of the environment variable STORMPROOF_FAILPOINT."""
        return f"{self.failpoint}=kill@{self.at}"


class Drivers:
    """Starts drivers one after the other, each in a session of its own, and ends every process that they leave."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._folder = folder
        self._sessions: list[int] = []
        self.starts = 0

    def run(self, kill: Kill | None, on_fact: OnFact) -> int:
        """Run one driver to its end; returns its exit status, `KILLED` where a SIGKILL ended it.

        Raises:
            TimeoutError: it did not end within `DRIVER_TIMEOUT_S`.
        """
        self.starts += 1
        environment = {**self._environment, **({"STORMPROOF_FAILPOINT": kill.armed} if kill else {})}
        with self.log_path.open("wb") as log:
            child = subprocess.Popen(
                self._command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._remember(child.pid)
            assert child.stderr is not None
            # The JVM of a killed driver holds the pipe open for a while: the end of the file is not waited for.
            reader = threading.Thread(target=_read, args=(child.stderr, self.log_path, on_fact), daemon=True)
            reader.start()
            try:
                status = child.wait(DRIVER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"a driver did not end within {DRIVER_TIMEOUT_S:.0f} s; see {self.log_path}"
                ) from None
            reader.join(READ_S)
            return status

    @property
    def log_path(self) -> Path:
        """The log of the newest driver."""
        return self._folder / f"driver-{self.starts}.log"

    def close(self) -> None:
        """Wait for the processes of all drivers to end, and kill those that do not."""
        left = [process for session in self._sessions for process in members(session)]
        for process in left:
            if process.pid in self._sessions:
                _kill(process)  # a driver itself
        _, still = psutil.wait_procs(left, timeout=LINGER_S)
        for process in still:
            _kill(process)
        psutil.wait_procs(still, timeout=LINGER_S)
        self._sessions_path(self._folder).unlink(missing_ok=True)

    def _remember(self, pid: int) -> None:
        self._sessions.append(pid)
        known = [[session, boot_time()] for session in self._sessions]
        self._sessions_path(self._folder).write_text(json.dumps(known))

    @staticmethod
    def _sessions_path(folder: Path) -> Path:
        return folder / "drivers.json"

    @classmethod
    def end_left_overs(cls, folder: Path) -> None:
        """End what an earlier demo, which was killed itself, left in this folder."""
        path = cls._sessions_path(folder)
        if not path.exists():
            return
        for session, booted in json.loads(path.read_text()):
            if booted != boot_time():
                continue
            for process in members(session):
                if _works_in(process, folder):
                    _kill(process)


def boot_time() -> int:
    """When this machine was started; process ids from before mean nothing."""
    return int(psutil.boot_time())


def members(session: int) -> list[psutil.Process]:
    """The living processes of a session: a driver, its JVM and its Python workers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return found


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _read(stream: IO[bytes], log_path: Path, on_fact: OnFact) -> None:
    """Copy a driver's log to a file, and report each txid and recovery in it."""
    with stream, log_path.open("ab") as log:
        for line in stream:
            log.write(line)
            log.flush()
            if not line.startswith(b"{"):
                continue
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by the kill
            for word in ("txn", "recovered"):
                if word in facts:
                    on_fact(word, facts[word])
