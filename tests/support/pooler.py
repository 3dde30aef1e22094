"""A stand-in for pgbouncer before a Postgres: it pools sessions or transactions, and makes up its clients' backends."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from stormproof.core.postgres.database import Database

FORBIDDEN = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"


class Pooler:
    """Serves clients of `database` on a socket in a folder of its own. Knows no COPY. Takes no `options`.

    With `transaction`, idle backends are given to whoever speaks next, the newest first.
    """

    def __init__(self, server: Database, mode: Literal["session", "transaction"]) -> None:
        parameters = dict(server.parameters)
        name = f".s.PGSQL.{parameters['port']}"
        self._server = str(Path(parameters["host"]) / name)
        self._mode = mode
        self._folder = tempfile.mkdtemp(prefix="pooler-")  # short: a socket's path may have 107 bytes
        self.database = Database.of({**parameters, "host": self._folder})
        self._idle = list[socket.socket]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder) / name))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):  # the client went without a word
            size = _exactly(client, 4)
            start = size + _exactly(client, int.from_bytes(size) - 4)
            if b"\0options\0" in start:
                client.sendall(_message(b"E", FORBIDDEN))
                return
            backend: socket.socket | None = socket.socket(socket.AF_UNIX)
            assert backend is not None
            backend.connect(self._server)
            backend.sendall(start)
            self._answer(backend, client)
            if self._mode == "transaction":
                self._idle.append(backend)
                backend = None
            while (kind := _exactly(client, 1)) != b"X":
                size = _exactly(client, 4)
                backend = backend or self._idle.pop()
                backend.sendall(kind + size + _exactly(client, int.from_bytes(size) - 4))
                if kind in b"QS" and self._answer(backend, client) == b"I" and self._mode == "transaction":
                    self._idle.append(backend)
                    backend = None
            if backend is not None:
                backend.close()

    def _answer(self, backend: socket.socket, client: socket.socket) -> bytes:
        """Pass on what the backend says until it is ready; returns the state of its transaction."""
        while True:
            kind, size = _exactly(backend, 1), _exactly(backend, 4)
            body = _exactly(backend, int.from_bytes(size) - 4)
            client.sendall(_message(kind, b"\0\0\0\1made" if kind == b"K" else body))
            if kind == b"Z":
                return body

    def close(self) -> None:
        """Take no further client."""
        self._listener.close()
        for backend in self._idle:
            backend.close()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        if not part:
            raise ConnectionResetError
        found += part
    return found
