"""A child process that a test talks to by lines, and that never outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self


class Child:
    """A process in a session of its own; reading waits for its next line, so nothing has to sleep."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The child's next line; fails where it ended instead."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text, f"the child ended with {self._process.wait()} instead of printing a line"
        return text.strip()

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def kill(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self.wait()

    def wait(self) -> int:
        return self._process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
