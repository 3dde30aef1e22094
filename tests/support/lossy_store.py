"""A proxy before a server of S3 that loses answers, requests, conditions, or holds one back until it is told to send it."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Loss(StrEnum):
    """What becomes of a request."""

    ANSWER = "answer"
    """The server has it, and the client hears nothing."""
    REQUEST = "request"
    """The server never gets it."""
    LATE = "late"
    """The client hears nothing; the server gets it when the proxy is told so."""


@dataclass(slots=True)
class LossyStore:
    """Passes HTTP on, one request a connection. `lose` says of which requests something is lost, and how often; `lose_some`
    has it drawn.

    `unconditional`: the server behind it is one that does not know `If-None-Match`; requests must not be signed.
    """

    server_port: int
    unconditional: bool = False
    lost: int = 0
    late_answers: list[str] = field(default_factory=list[str])
    _rule: tuple[Loss, int, str, re.Pattern[str]] | None = None
    _drawn: tuple[random.Random, float] | None = None
    _late: list[bytes] = field(default_factory=list[bytes])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listener: socket.socket = field(default_factory=socket.socket)

    def __enter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def port(self) -> int:
        """Where clients find it."""
        return int(self._listener.getsockname()[1])

    def lose(self, loss: Loss, times: int, method: str, path: str) -> None:
        """Of the next so many requests with this method whose path matches; in place of what was said before."""
        with self._lock:
            self._rule = (loss, times, method, re.compile(path))

    def lose_some(self, rng: random.Random, share: float) -> None:
        """From now on of this share of all PUTs either the request or the answer."""
        with self._lock:
            self._drawn = (rng, share)

    def send_late(self) -> None:
        """Send what was held back, and keep the first line of each answer."""
        with self._lock:
            late, self._late = self._late, []
        for request in late:
            self.late_answers.append(self._forward(request).split(b"\r\n", 1)[0].decode())

    def _accept(self) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._guarded, args=(self._serve, client), daemon=True).start()

    def _guarded(self, serve: Callable[[socket.socket], None], client: socket.socket) -> None:
        with client, suppress(OSError):  # one end is gone: so is the other
            serve(client)

    def _serve(self, client: socket.socket) -> None:
        with client.makefile("rb") as lines:
            first = lines.readline()
            if not first:
                return
            headers: list[bytes] = []
            while (line := lines.readline()) not in (b"\r\n", b"\n", b""):
                headers.append(line)
            named = {n.strip().lower(): v.strip() for n, _, v in (h.decode().partition(":") for h in headers)}
            if named.get("expect", "").lower() == "100-continue":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = lines.read(int(named.get("content-length", 0)))
        dropped = (b"connection:", b"expect:", *((b"if-none-match:",) if self.unconditional else ()))
        kept = [h for h in headers if not h.lower().startswith(dropped)]
        request = b"".join([first, *kept, b"Connection: close\r\n\r\n", body])
        method, path, _ = first.decode().split(" ", 2)
        loss = self._taken(method, path)
        if loss is Loss.LATE:
            with self._lock:
                self._late.append(request)
        if loss in (Loss.REQUEST, Loss.LATE):
            return
        answer = self._forward(request)
        if loss is None:
            client.sendall(answer)

    def _taken(self, method: str, path: str) -> Loss | None:
        with self._lock:
            if self._drawn is not None and method == "PUT":
                rng, share = self._drawn
                if rng.random() < share:
                    self.lost += 1
                    return rng.choice([Loss.REQUEST, Loss.ANSWER])
            if self._rule is None:
                return None
            loss, times, of, matching = self._rule
            if times == 0 or method != of or matching.search(path) is None:
                return None
            self._rule = (loss, times - 1, of, matching)
            self.lost += 1
            return loss

    def _forward(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.server_port)) as server:
            server.sendall(request)
            parts: list[bytes] = []
            while part := server.recv(65536):
                parts.append(part)
        return b"".join(parts)


@contextmanager
def unconditional(server_port: int) -> Generator[int]:
    """The port of a proxy that makes its server one that does not know `If-None-Match`.

    It is a process of its own: delta-rs waits for some answers without letting other threads of its process run.
    """
    command = [sys.executable, __file__, str(server_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        yield int(proxy.stdout.readline())
        proxy.stdin.close()  # which ends it


if __name__ == "__main__":
    with LossyStore(int(sys.argv[1]), unconditional=True) as of_process:
        print(of_process.port, flush=True)
        sys.stdin.read()
