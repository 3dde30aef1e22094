"""A TCP proxy before a message server, that cuts a connection at a confirmation: its effect is then unknown."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal, Self

Loses = Literal["answer", "request"]


class Cutter:
    """Passes bytes between clients on `port` and a server on another port of loopback.

    `cut_at(marker)` cuts one connection when a client next sends the marker: once the server has answered, before the
    client hears of it (``answer``); or before the server hears of it (``request``). `also_after_s` is how long the
    server's answer is waited for, where the protocol has none. A marker must come within one send of the client.
    """

    def __init__(self, server_port: int, also_after_s: float = 0.2) -> None:
        self._server_port = server_port
        self._also_after_s = also_after_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._marker: bytes | None = None
        self._loses: Loses = "answer"
        self.cut = 0
        self.refuses = False
        """Every connection is closed as soon as it was made."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, marker: bytes, loses: Loses = "answer") -> None:
        """Cut the next connection whose client sends this."""
        with self._lock:
            self._marker, self._loses = marker, loses

    def _accept(self) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    _end(client)
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:  # it is away: so is this
                    _end(client)
                    continue
                muted = threading.Event()
                threading.Thread(target=self._to_server, args=(client, server, muted), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, server, muted), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                loses = self._taken(data)
                if loses == "request":
                    break
                if loses == "answer":
                    muted.set()
                server.sendall(data)
                if loses == "answer":
                    threading.Timer(self._also_after_s, _end, (client, server)).start()
        if not muted.is_set():
            _end(client, server)

    def _to_client(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):
            while (data := server.recv(65_536)) and not muted.is_set():
                client.sendall(data)
        _end(client, server)

    def _taken(self, data: bytes) -> Loses | None:
        with self._lock:
            if self._marker is None or self._marker not in data:
                return None
            self._marker = None
            self.cut += 1
            return self._loses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):  # cut already
            end.shutdown(socket.SHUT_RDWR)
        end.close()
