"""One connection to a Kestrel server: open, close and abort reads of a queue, by the memcache protocol."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

_RECEIVED: Final = 65_536
_LINE_MAX: Final = 4_096


class ProtocolError(Exception):
    """The server refused a command, or answered what is no answer; the connection is of no use any more."""


class Connection:
    """Reads of one queue. Commands are sent first and their answers read afterwards, so that connections work side by side.

    The server counts its open reads by connection: a close or an abort means the oldest of them. When the connection goes,
    the server puts all of them back at the head of the queue.
    """

    def __init__(self, host: str, port: int, queue: str, timeout_s: float) -> None:
        self.server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._socket = socket.create_connection((host, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queue = key = queue.encode()
        self._commands = {verb: b"get %s/%s\r\n" % (key, verb.encode()) for verb in ("open", "close", "abort")}
        self._buffer = bytearray()
        self._place = 0
        self.open = 0
        """Reads that are open here, as far as is known."""

    def ask(self, reads: int) -> None:
        """Send for so many items."""
        self._socket.sendall(self._commands["open"] * reads)

    def given(self, reads: int) -> list[bytes]:
        """The items of what was asked for; fewer, where the queue is empty."""
        items = [item for _ in range(reads) if (item := self._answer()) is not None]
        self.open += len(items)
        return items

    def close_reads(self, reads: int) -> None:
        """Send that the oldest reads are done with."""
        self._socket.sendall(self._commands["close"] * reads)

    def abort_reads(self) -> int:
        """Send that every read is given back; how many answers there will be."""
        self._socket.sendall(self._commands["abort"] * self.open)
        return self.open

    def ended(self, reads: int) -> None:
        """Wait until the server has heard of so many ends of reads."""
        for _ in range(reads):
            if self._answer() is not None:
                raise ProtocolError("an item came where none was asked for")
            self.open -= 1

    def waiting(self) -> int | None:
        """How many items the queue has that nobody was given; None: the server does not say. No answer may be due here."""
        self._socket.sendall(b"stats\r\n")
        found: int | None = None
        while (line := self._line()) != b"END":
            word, name, value = (*line.split(), b"", b"", b"")[:3]
            if word == b"ERROR":
                return None
            if word != b"STAT":
                raise ProtocolError(line.decode("utf-8", "replace")[:200])
            if name == b"queue_%s_items" % self._queue and value.isdigit():
                found = int(value)
        return found

    def drop(self) -> None:
        """Close it; the server gives back what is open."""
        with suppress(OSError):  # it was closed from the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- answers

    def _answer(self) -> bytes | None:
        line = self._line()
        if line == b"END":
            return None
        if not line.startswith(b"VALUE "):
            raise ProtocolError(line.decode("utf-8", "replace")[:200])
        length = line.rpartition(b" ")[2]
        if not length.isdigit():
            raise ProtocolError(f"no length of a value: {line.decode('utf-8', 'replace')[:200]}")
        item = self._bytes(int(length))
        if self._bytes(2) != b"\r\n" or self._line() != b"END":
            raise ProtocolError("a value does not end where its length says")
        return item

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._place)) < 0:
            if len(self._buffer) - self._place > _LINE_MAX:
                raise ProtocolError("a line has no end")
            self._more()
        line = bytes(self._buffer[self._place : end])
        self._place = end + 2
        return line

    def _bytes(self, count: int) -> bytes:
        while len(self._buffer) - self._place < count:
            self._more()
        data = bytes(self._buffer[self._place : self._place + count])
        self._place += count
        return data

    def _more(self) -> None:
        del self._buffer[: self._place]
        self._place = 0
        data = self._socket.recv(_RECEIVED)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._buffer += data
