"""The servers of a Kestrel cluster: asked in turn; one that does not answer is left alone for a while.

A connection opens, closes and aborts reads of a queue, by the memcache protocol. Kestrel's servers know nothing of each
other: a cluster is what its clients make of it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from random import Random
from typing import Final, NamedTuple, TypeVar

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StoreUnavailable, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.pending.source import Backoff

_RECEIVED: Final = 65_536
_LINE_MAX: Final = 4_096


class ProtocolError(Exception):
    """The server refused a command, or answered what is no answer; the connection is of no use any more."""


class KestrelConnection:
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


log = logging.getLogger("stormproof.source")


# ---- the servers of a cluster

_T = TypeVar("_T")
PORT: Final = 22_133
TIMEOUT_S: Final = 10.0
LEFT_ALONE: Final = Backoff(0.5, 60.0)
"""How long a server that did not answer is left alone, by how often it did not."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, where: str, text: object) -> Address:
        """From ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``.

        Raises:
            UsageError: it is none of these.
        """
        if isinstance(text, str) and text.strip() and not any(letter.isspace() or letter in "/@" for letter in text):
            host, bracket, port = text.removeprefix("[").partition("]") if text.startswith("[") else ("", "", text)
            if not bracket:
                host, _, port = text.partition(":")
                port = f":{port}" if port else ""
            if host and not port:
                return cls(host, PORT)
            if host and port[:1] == ":" and port[1:].isdecimal() and 0 < int(port[1:]) < 65_536:
                return cls(host, int(port[1:]))
        raise UsageError(
            f"{where}: hosts has {text!r}; each is HOST, HOST:PORT or [IPV6]:PORT, such as 'kestrel1:{PORT}'",
            argument="hosts",
        )

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OpenItem(NamedTuple):
    """An item, and the connection on which it is open."""

    connection: KestrelConnection
    item: bytes


class Host:
    """One server, and our connections to it: as many as are of use, up to a limit."""

    def __init__(self, address: Address, queue: str, connections: int, open_reads: int) -> None:
        self.address = address
        self.connections: list[KestrelConnection] = []
        self.failures = 0
        self.not_before_s = 0.0
        self._queue = queue
        self._most = connections
        self._reads = open_reads
        self._width = 1

    def asked(self, limit: int) -> list[tuple[KestrelConnection, int]]:
        """Ask for items, at most `limit`; gives the connections, and how many were asked for on each."""
        wanted = min(limit, self._width * self._reads)
        asked: list[tuple[KestrelConnection, int]] = []
        while wanted > 0:
            if len(asked) == len(self.connections):
                self.connections.append(KestrelConnection(self.address.host, self.address.port, self._queue, TIMEOUT_S))
            reads = min(wanted, self._reads)
            self.connections[len(asked)].ask(reads)
            asked.append((self.connections[len(asked)], reads))
            wanted -= reads
        return asked

    def answered(self, items: int, asked: int) -> None:
        """It works; where there was an item for each ask, more connections are of use."""
        self.failures = 0
        self._width = min(self._most, self._width * 2) if items == asked else max(1, -(-items // self._reads))

    def drop(self) -> None:
        """Let its connections go; it gives back what is open."""
        for connection in self.connections:
            connection.drop()
        self.connections.clear()


class Hosts:
    """Every server of a cluster; `on_lost` hears of a server that is gone, before anything else is asked."""

    def __init__(
        self,
        where: str,
        addresses: Sequence[Address],
        queue: str,
        *,
        connections: int,
        open_reads: int,
        clock: Clock,
        rng: Random,
    ) -> None:
        self._where = where
        self._hosts = [Host(address, queue, connections, open_reads) for address in addresses]
        self._turn = 0
        self._open_reads = open_reads
        self._clock = clock
        self._rng = rng
        self.all_answered = False
        """Whether each server answered when items were last received."""

    # ---- items

    def receive(self, limit: int) -> list[OpenItem]:
        """At most `limit` items, of every server in turn. What was open before, and was not closed, is given back first.

        Raises:
            StoreUnavailable: no server answers.
            UsageError: a server refuses what it is asked for.
        """
        self.give_back()
        received: list[list[OpenItem]] = []
        answered, last = 0, ""
        waiting: list[tuple[Host, list[tuple[KestrelConnection, int]]]] = []
        for host in self._in_turn():
            if limit <= 0:
                break
            asked, error = self._try(host, lambda host=host, limit=limit: host.asked(limit))  # type: ignore[misc]
            if asked is None:
                last = error
                continue
            waiting.append((host, asked))
            limit -= sum(reads for _, reads in asked)
        for host, asked in waiting:  # they answer side by side
            items, error = self._try(host, lambda asked=asked: _given(asked))  # type: ignore[misc]
            if items is None:
                last = error
                continue
            answered += 1
            host.answered(len(items), sum(reads for _, reads in asked))
            received.append(items)
        self.all_answered = answered == len(self._hosts)
        if not answered:
            raise StoreUnavailable(
                f"{self._where}: no server answers ({', '.join(str(host.address) for host in self._hosts)}): {last}",
                hosts=[str(host.address) for host in self._hosts],
            )
        return [one for row in zip_longest(*received) for one in row if one is not None]

    def confirm(self, connections: Iterable[KestrelConnection]) -> list[tuple[Address, int]]:
        """Close a read for each mention of a connection; gives the servers that may not have heard it, and of how many."""
        reads: dict[KestrelConnection, int] = {}
        for connection in connections:
            reads[connection] = reads.get(connection, 0) + 1
        unheard: list[tuple[Address, int]] = []
        told: list[tuple[Host, dict[KestrelConnection, int]]] = []
        for host in self._hosts:
            mine = {connection: count for connection, count in reads.items() if connection in host.connections}
            if mine:
                told.append((host, mine))
                self._try(host, lambda mine=mine: _close(mine))  # type: ignore[misc]
        for host, mine in told:
            ended = host.connections and self._try(host, lambda mine=mine: _ended(mine))[0]  # type: ignore[misc]
            if not ended:
                unheard.append((host.address, sum(mine.values())))
        return unheard

    def waiting(self) -> int | None:
        """How many items the servers have that nobody was given; None: one of them does not say, or does not answer."""
        total = 0
        for host in self._hosts:
            if not host.connections:
                return None
            found, _ = self._try(host, host.connections[0].waiting)
            if found is None:
                return None
            total += found
        return total

    def give_back(self) -> None:
        """Abort every read that is open: the items are at the head of their queue again."""
        for host in self._hosts:
            held = {connection: connection.open for connection in host.connections if connection.open}
            if held:
                self._try(host, lambda held=held: _abort(held))  # type: ignore[misc]

    def drop(self) -> None:
        """Let every connection go."""
        for host in self._hosts:
            host.drop()

    # ---- which server

    def _in_turn(self) -> list[Host]:
        """Servers that are asked now, each time another one first. Where every one is left alone, all are asked."""
        self._turn = (self._turn + 1) % len(self._hosts)
        hosts = self._hosts[self._turn :] + self._hosts[: self._turn]
        now_s = self._clock.monotonic_s()
        return [host for host in hosts if host.not_before_s <= now_s] or hosts

    def _try(self, host: Host, call: Callable[[], _T]) -> tuple[_T | None, str]:
        """What the call gives; None and why, where the server does not answer: it is left alone for a while then."""
        try:
            return call(), ""
        except ProtocolError as error:
            host.drop()
            text = storable_text(str(error), 200)
            if text.startswith("ERROR") and self._open_reads > 1:
                raise UsageError(
                    f"{self._where}: {host.address} allows a connection fewer than {self._open_reads} open reads; set "
                    "open_reads=1, or raise maxOpenTransactions on the server",
                    host=str(host.address),
                ) from error
            if text.startswith("CLIENT_ERROR"):
                raise UsageError(
                    f"{self._where}: {host.address} refuses a read: {text}", host=str(host.address)
                ) from error
            return None, self._leave_alone(host, text or "it closed the connection")
        except OSError as error:
            host.drop()
            return None, self._leave_alone(host, str(error) or type(error).__name__)

    def _leave_alone(self, host: Host, why: str) -> str:
        host.failures += 1
        delay_s = LEFT_ALONE.delay_s(host.failures, self._rng)
        host.not_before_s = self._clock.monotonic_s() + delay_s
        log.warning("%s: %s does not answer, and is left alone for %.1f s: %s", self._where, host.address, delay_s, why)
        return f"{host.address}: {why}"


def _given(asked: Sequence[tuple[KestrelConnection, int]]) -> list[OpenItem]:
    return [OpenItem(connection, item) for connection, reads in asked for item in connection.given(reads)]


def _close(reads: dict[KestrelConnection, int]) -> None:
    for connection, count in reads.items():
        connection.close_reads(count)


def _ended(reads: dict[KestrelConnection, int]) -> bool:
    for connection, count in reads.items():
        connection.ended(count)
    return True


def _abort(held: dict[KestrelConnection, int]) -> None:
    for connection in reversed(held):  # the first that was read comes first again
        connection.abort_reads()
    for connection, reads in held.items():
        connection.ended(reads)
