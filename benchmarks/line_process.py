"""A rival in a process of its own, which is asked by lines and answers each by one, within a bound."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

END_S = 10.0
LOG_LINES = 12


class RivalFailed(Exception):
    """The rival said that it failed, ended, or did not answer in time: there is no measurement."""


class LineProcess:
    """What is asked is written to its standard input; it answers "ok VALUE" or "failed TEXT".

    It leads a process group, by whose id it is paused and ended. Where its owner dies, it ends by the end of its input;
    paused, by the signal that the kernel sends to a stopped group that has no parent left in its session.
    What it writes to standard error is kept in `log`.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._name = command[0]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
            )
        self._unread = b""

    @property
    def pid(self) -> int:
        """The process, and its group."""
        return self._process.pid

    def ask(self, request: str, within_s: float) -> str:
        """Write a line; the value of the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(f"ended before it was asked to {request}") from None
        return self.answer(within_s, request)

    def answer(self, within_s: float, request: str = "start") -> str:
        """Wait for a line; the value in it.

        Raises:
            RivalFailed: It said so, ended instead, or took longer; with the end of its log.
        """
        kind, _, value = self._line(time.monotonic() + within_s, request).partition(" ")
        if kind != "ok":
            raise self._failed(f"answered {kind} {value!r} to {request}")
        return value

    def _line(self, deadline_s: float, request: str) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise self._failed(f"did not answer in time to {request}")
                read = os.read(self._process.stdout.fileno(), 65_536)
                if not read:
                    raise self._failed(f"ended with {self._process.wait(END_S)} instead of answering to {request}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _failed(self, what: str) -> RivalFailed:
        end = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return RivalFailed(
            "\n".join([f"{self._name}, process {self.pid}, {what}; the end of its log, {self._log}:", *end])
        )

    def pause(self) -> None:
        """Stop it where it is, so that its threads' polling costs nobody anything; it has stopped when this returns."""
        os.killpg(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def end(self, grace_s: float = END_S) -> None:
        """Close its standard input, by which it ends; kill its group where it does not."""
        if self._process.poll() is None:
            self.resume()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(END_S)


@contextmanager
def line_process(command: Sequence[str], log: Path, *, start_s: float) -> Generator[LineProcess]:
    """A started process, from its first answer on; it is ended in any case."""
    process = LineProcess(command, log)
    try:
        process.answer(start_s)
        yield process
    finally:
        process.end()
