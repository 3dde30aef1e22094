"""A proxy before a Postgres that can lose the answer of a COMMIT, or the COMMIT itself."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from stormproof.core.postgres.database import Database

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
"""A simple query, as libpq sends it: type, length, text, NUL; the text in any case."""

Loses = Literal["answer", "commit"]


class Proxy:
    """Passes bytes between clients of `database` and the server, on a socket in a folder of its own.

    `lose_next` makes it cut one connection at the next COMMIT of any: after the server has answered it and before the
    client hears of that (``answer``), or before the server hears of it (``commit``). While `hangs_up`, it accepts every
    connection and closes it at once.
    """

    def __init__(self, server: Database) -> None:
        parameters = dict(server.parameters)
        name = f".s.PGSQL.{parameters['port']}"
        self._server = str(Path(parameters["host"]) / name)
        self._folder = tempfile.mkdtemp(prefix="proxy-")  # short: a socket's path may have 107 bytes
        self.database = Database.of({**parameters, "host": self._folder})
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder) / name))
        self._listener.listen()
        self._lock = threading.Lock()
        self._loses: Loses | None = None
        self.lost = 0
        self.hangs_up = False
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next(self, what: Loses) -> None:
        """Lose the next COMMIT's answer, or the COMMIT."""
        with self._lock:
            self._loses = what

    def lose_nothing(self) -> None:
        """Lose no COMMIT, if one was still to be lost."""
        with self._lock:
            self._loses = None

    def _accept(self) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                if self.hangs_up:
                    _cut(client, server)
                    continue
                try:
                    server.connect(self._server)
                except OSError:  # it is away: so is this, until the next one asks
                    _cut(client, server)
                    continue
                muted = threading.Event()
                threading.Thread(target=self._to_server, args=(client, server, muted), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, server, muted), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):  # one end is gone: so is the other, below
            while data := client.recv(65536):
                loses = self._take() if data[-len(COMMIT) :].upper() == COMMIT else None
                if loses == "commit":
                    break
                if loses == "answer":
                    muted.set()
                server.sendall(data)
        if not muted.is_set():  # else the answer is yet to come; who hears it cuts
            _cut(client, server)

    def _to_client(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):
            while (data := server.recv(65536)) and not muted.is_set():
                client.sendall(data)
        _cut(client, server)

    def _take(self) -> Loses | None:
        with self._lock:
            loses, self._loses = self._loses, None
            self.lost += loses is not None
            return loses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        shutil.rmtree(self._folder)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):  # cut already
            end.shutdown(socket.SHUT_RDWR)
        end.close()
