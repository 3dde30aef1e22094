"""Our own server of Kestrel's protocol, as a process; and a harness for the suite that every source must pass."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from stormproof import KestrelSource
from support.brokers import Broker, listens, running
from support.brokers.harness import BrokerHarness

EXAMPLES = Path(__file__).parents[3] / "examples"


class KestrelClient:
    """One connection, as a person at a terminal has it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._file = self._socket.makefile("rb")

    def send(self, command: str) -> None:
        """Send it, and do not wait for an answer."""
        self._socket.sendall(command.encode() + b"\r\n")

    def next_line(self) -> str:
        """The next line of what the server says; empty where it hung up."""
        return self._file.readline().decode().rstrip("\r\n")

    def line(self, command: str) -> str:
        """The first line of an answer."""
        self.send(command)
        return self.next_line()

    def put(self, queue: str, *items: bytes, expiry_s: int = 0) -> list[str]:
        self._socket.sendall(
            b"".join(b"set %s 0 %d %d\r\n%s\r\n" % (queue.encode(), expiry_s, len(i), i) for i in items)
        )
        return [self._file.readline().decode().strip() for _ in items]

    def get(self, key: str) -> bytes | None:
        """The item of ``get KEY``, if there is one; ConnectionError where the server hangs up."""
        head = self.line(f"get {key}")
        if head == "END":
            return None
        if not head.startswith("VALUE "):
            raise ConnectionError(head)
        data = self._file.read(int(head.split()[3]) + 2)[:-2]
        assert self._file.readline() == b"END\r\n"
        return data

    def stats(self, queue: str) -> dict[str, int]:
        found, line = dict[str, int](), self.line("stats")
        while line != "END":
            name, value = line.split()[1:3]
            if name.startswith(f"queue_{queue}_") and "+" not in name.removeprefix(f"queue_{queue}_"):
                found[name.removeprefix(f"queue_{queue}_")] = int(value)
            line = self._file.readline().decode().strip()
        return found

    def __enter__(self) -> KestrelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        with suppress(OSError):  # the server is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


class KestrelServer(Broker):
    """The server of the examples: ``examples/kestrel_server/server.py``."""

    NAME: ClassVar[str] = "Kestrel"
    INSTALL: ClassVar[str] = "nothing: it is among the examples"

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.options = options

    @classmethod
    def missing(cls) -> str | None:
        return None

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(EXAMPLES)}

    def command(self) -> Sequence[str]:
        module = ["-m", "kestrel_server.server"]
        return [sys.executable, *module, "--port", str(self.port), "--dir", str(self.folder / "queues"), *self.options]

    def answers(self) -> bool:
        return listens(self.port)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self) -> KestrelClient:
        return KestrelClient(self.port)

    def put(self, queue: str, payloads: Sequence[bytes]) -> None:
        with self.client() as client:
            assert set(client.put(queue, *payloads)) <= {"STORED"}

    def left(self, queue: str) -> int:
        """Items that nobody has closed."""
        with self.client() as client:
            stats = client.stats(queue)
        return stats.get("items", 0) + stats.get("open_transactions", 0)


@pytest.fixture(scope="session")
def kestrel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KestrelServer]:
    """One server for the session; a test takes a queue of its own."""
    with running(KestrelServer, tmp_path_factory) as server:
        yield server


def queue_of(name: str) -> str:
    """A queue's name, from a test's."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


@dataclass
class KestrelHarness(BrokerHarness):
    """Over a queue of the test's own; items go to the servers in turn."""

    servers: Sequence[KestrelServer] = field(kw_only=True)
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    @property
    def queue(self) -> str:
        return queue_of(self.name)

    def put(self, payloads: Sequence[bytes]) -> None:
        for place, server in enumerate(self.servers):
            server.put(self.queue, payloads[place :: len(self.servers)])

    @property
    def confirms_by(self) -> bytes:
        return b"/close"

    def left(self) -> int:
        return sum(server.left(self.queue) for server in self.servers)

    def deliver_again(self) -> None:
        """It cannot: what was closed is gone."""

    def made(self, **options: Any) -> KestrelSource:
        given: dict[str, Any] = {
            "hosts": [server.host for server in self.servers],
            "name": self.name,
            "database": self.database,
            "max_attempts": self.max_attempts,
            "rng": Random(1),
        }
        return KestrelSource(self.queue, **{**given, **self.options, **options})
