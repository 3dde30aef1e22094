"""A server that speaks Kestrel's memcache protocol, for tests and examples: it is not meant for production.

    (cd examples && python -m kestrel_server.server --port 22133 --dir /tmp/kestrel)

prints its port (with ``--port 0`` a free one) and serves until SIGTERM. Queues are kept in DIR, and are there again after a
restart, also after a kill: reads that were open then are back at the head of their queue.

SET, GET with ``/open``, ``/close``, ``/abort``, ``/close/open``, ``/peek`` and ``/t=MS``; DELETE, FLUSH, FLUSH_ALL,
FLUSH_EXPIRED, STATS, VERSION, STATUS, SHUTDOWN, QUIT. A queue ``orders+audit`` is given a copy of all that is put into
``orders``. An open read belongs to its connection, and is given back when that goes.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from kestrel_server.queue import Item, Queue, QueueLimits, limits_for

VERSION: Final = "stormproof-kestrel-test-server"
LINE_MAX: Final = 4_096
VALUE_MAX: Final = 64 << 20
_RELATIVE_MAX_S: Final = 60 * 60 * 24 * 30
"""Expiries above it are a date, as in memcache."""


class Queues:
    """All queues of a server, by name. Children are given what is put into their parent."""

    def __init__(
        self,
        folder: Path,
        limits: QueueLimits | None = None,
        now_ms: Callable[[], int] | None = None,
        *,
        fsync: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limits = limits or QueueLimits()
        self._now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._fsync = fsync
        self._queues: dict[str, Queue] = {}
        self._arrivals: dict[str, asyncio.Event] = {}
        for path in sorted(folder.iterdir()):
            if path.name.endswith("~~"):
                path.unlink()
            else:
                self._made(path.name)

    def __getitem__(self, name: str) -> Queue:
        """The queue; made where it is missing, as Kestrel does on every mention."""
        return self._queues[name] if name in self._queues else self._made(name)

    def _made(self, name: str) -> Queue:
        limits = limits_for(self._limits, name)
        expired = partial(self._expire, limits.expire_to)
        queue = Queue(name, self._folder, limits, self._now_ms, expired, fsync=self._fsync)
        self._queues[name] = queue
        return queue

    def _expire(self, to: str, item: Item) -> None:
        if to:
            self.put(to, item.data)

    def put(self, name: str, data: bytes, expiry: int = 0) -> bool:
        """Add an item to a queue and to its children; `expiry` in memcache's way, in seconds."""
        expiry_ms = expiry * 1_000
        if 0 < expiry <= _RELATIVE_MAX_S:
            expiry_ms += self._now_ms()
        for child in [child for child in self._queues if child.startswith(f"{name}+")]:
            self._put(child, data, expiry_ms)
        return self._put(name, data, expiry_ms)

    def _put(self, name: str, data: bytes, expiry_ms: int) -> bool:
        stored = self[name].put(data, expiry_ms)
        self.arrived(name)
        return stored

    def arrived(self, name: str) -> None:
        """Wake those who wait for an item of this queue."""
        self._arrivals.pop(name, asyncio.Event()).set()

    def arrival(self, name: str) -> asyncio.Event:
        """Set when an item is next put or given back."""
        return self._arrivals.setdefault(name, asyncio.Event())

    def delete(self, name: str) -> None:
        """Forget a queue, and what is in it."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.end(delete=True)

    def all(self) -> list[Queue]:
        """Every queue, by name."""
        return [self._queues[name] for name in sorted(self._queues)]

    def end(self) -> None:
        """Close the journals."""
        for queue in self._queues.values():
            queue.end()


class _HangUp(Exception):
    """The connection is closed after this answer, as Kestrel does with clients that break the protocol."""


class Session:
    """One connection, and the reads that it has open."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._queues = server.queues
        self._reader = reader
        self._writer = writer
        self._open: dict[str, deque[int]] = {}

    async def run(self) -> None:
        """Serve until the client goes; what it has open is given back then."""
        try:
            while line := await self._reader.readline():
                await self._command(line)
                await self._writer.drain()
        except _HangUp as end:
            self._say(str(end))
            with suppress(ConnectionError):
                await self._writer.drain()
        except (ConnectionError, ValueError, asyncio.IncompleteReadError):
            pass  # the client is gone, or sends a line without end
        finally:
            self._give_back()
            self._writer.close()

    def _say(self, text: str) -> None:
        self._writer.write(text.encode() + b"\r\n")

    def _give_back(self) -> None:
        for name, xids in self._open.items():
            for xid in reversed(xids):  # the first that was read comes first again
                self._queues[name].abort(xid)
            if xids:
                self._queues.arrived(name)
        self._open.clear()

    async def _command(self, line: bytes) -> None:
        words = line.decode("utf-8", "replace").split()
        verb = words[0].lower() if words else ""
        arguments = words[1:]
        if verb in ("get", "gets") and len(arguments) == 1:
            await self._get(arguments[0])
        elif verb == "set" and len(arguments) == 4:
            await self._set(*arguments)
        else:
            self._operate(verb, arguments)

    def _operate(self, verb: str, arguments: Sequence[str]) -> None:
        match verb, arguments:
            case "delete", [name]:
                self._queues.delete(name)
                self._open.pop(name, None)
                self._say("DELETED")
            case "flush", [name]:
                self._queues[name].flush()
                self._say("END")
            case "flush_all", []:
                for queue in self._queues.all():
                    queue.flush()
                self._say("Flushed all queues.")
            case "flush_expired", [name]:
                self._say(str(self._queues[name].discard_expired()))
            case "stats", []:
                self._stats()
            case "version", []:
                self._say(f"VERSION {VERSION}")
            case "status", []:
                self._say("UP")
            case "shutdown", []:
                self._server.stop()
            case "quit", []:
                raise _HangUp
            case _:
                raise _HangUp("CLIENT_ERROR unknown command")

    def _stats(self) -> None:
        now_s = int(time.time())
        figures: list[tuple[str, object]] = [
            ("uptime", now_s - self._server.started_s),
            ("time", now_s),
            ("version", VERSION),
            ("curr_items", sum(len(queue) for queue in self._queues.all())),
            ("curr_connections", self._server.connections),
            ("cmd_get", self._server.gets),
            ("cmd_set", self._server.sets),
        ]
        for queue in self._queues.all():
            figures += [(f"queue_{queue.name}_{name}", value) for name, value in queue.stats()]
        for name, value in figures:
            self._say(f"STAT {name} {value}")
        self._say("END")

    async def _set(self, name: str, flags: str, expiry: str, length: str) -> None:
        if not (flags.isdecimal() and expiry.isdecimal() and length.isdecimal()) or int(length) > VALUE_MAX:
            raise _HangUp("CLIENT_ERROR bad command")
        data = await self._reader.readexactly(int(length) + 2)
        if not data.endswith(b"\r\n"):
            raise _HangUp("CLIENT_ERROR bad data chunk")
        self._check_name(name)
        self._server.sets += 1
        self._say("STORED" if self._queues.put(name, data[:-2], int(expiry)) else "NOT_STORED")

    def _check_name(self, name: str) -> None:
        if not name or "/" in name or "~" in name or name.startswith("."):
            raise _HangUp("CLIENT_ERROR illegal queue name")

    async def _get(self, key: str) -> None:
        name, *options = key.split("/")
        self._check_name(name)
        waits_ms = 0
        flags = set[str]()
        for option in options:
            if option.startswith("t=") and option[2:].isdecimal():
                waits_ms = int(option[2:])
            elif option in ("open", "close", "abort", "peek"):
                flags.add(option)
            elif option:
                raise _HangUp("CLIENT_ERROR unknown option")
        if len(flags) > 1 and flags & {"abort", "peek"}:
            raise _HangUp("CLIENT_ERROR illegal combination of options")
        self._server.gets += 1
        mine = self._open.setdefault(name, deque())
        if "abort" in flags:
            if mine:
                self._queues[name].abort(mine.popleft())
                self._queues.arrived(name)
            self._say("END")
            return
        if "close" in flags and mine:
            self._queues[name].close(mine.popleft())
        if flags == {"close"}:
            self._say("END")
            return
        opened = sum(len(xids) for xids in self._open.values())
        if (opened and not flags) or ("open" in flags and opened >= self._server.open_reads_max):
            raise _HangUp("ERROR")  # Kestrel's whole answer
        self._answer(name, await self._item(name, flags, waits_ms))

    async def _item(self, name: str, flags: set[str], waits_ms: int) -> bytes | None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + waits_ms / 1_000
        while (found := self._now(name, flags)) is None and (left_s := end_s - loop.time()) > 0:
            # A client that goes while it waits must not be given an item: Kestrel has the same care.
            waiter = asyncio.ensure_future(self._queues.arrival(name).wait())
            gone = asyncio.ensure_future(self._reader.read(1)) if not self._server.pipelined(self._reader) else None
            done, _ = await asyncio.wait(
                {waiter, *([gone] if gone else [])}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            waiter.cancel()
            if gone is not None and gone in done:
                raise _HangUp if not gone.result() else _HangUp("CLIENT_ERROR a command while another one waits")
            if gone is not None:
                gone.cancel()
                with suppress(asyncio.CancelledError):
                    await gone
        return found

    def _now(self, name: str, flags: set[str]) -> bytes | None:
        queue = self._queues[name]
        if "open" in flags:
            opened = queue.open()
            if opened is None:
                return None
            self._open[name].append(opened[0])
            return opened[1].data
        item = queue.peek() if "peek" in flags else queue.take()
        return None if item is None else item.data

    def _answer(self, name: str, data: bytes | None) -> None:
        if data is not None:
            self._writer.write(b"VALUE %s 0 %d\r\n%s\r\n" % (name.encode(), len(data), data))
        self._say("END")


class Server:
    """Queues behind a port of loopback."""

    def __init__(self, queues: Queues, open_reads_max: int = 1) -> None:
        self.queues = queues
        self.open_reads_max = open_reads_max
        self.started_s = int(time.time())
        self.connections = self.gets = self.sets = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End it; `serve` returns."""
        self._stopped.set()

    def pipelined(self, reader: asyncio.StreamReader) -> bool:
        """Whether the client has sent its next command already."""
        return bool(getattr(reader, "_buffer", b""))

    async def serve(self, host: str, port: int, started: Callable[[int], None]) -> None:
        """Serve until `stop`, and say the port first."""
        sessions = set[asyncio.Task[None]]()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            sessions.add(task)
            self.connections += 1
            try:
                await Session(self, reader, writer).run()
            finally:
                self.connections -= 1
                sessions.discard(task)

        listener = await asyncio.start_server(connected, host, port, limit=LINE_MAX * 16)
        started(listener.sockets[0].getsockname()[1])
        await self._stopped.wait()
        listener.close()
        for task in sessions:
            task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        self.queues.end()


async def _main(arguments: argparse.Namespace) -> None:
    limits = QueueLimits(
        max_items=arguments.max_items,
        max_item_bytes=arguments.max_item_bytes,
        max_age_s=arguments.max_age,
        open_timeout_s=arguments.open_timeout,
        discard_old=arguments.discard_old,
        expire_to=arguments.expire_to,
        max_journal_bytes=arguments.max_journal_bytes,
    )
    server = Server(Queues(arguments.dir, limits, fsync=arguments.fsync), arguments.max_open)
    for signal_ in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_, server.stop)
    await server.serve(arguments.host, arguments.port, lambda port: print(port, flush=True))


def main(given: Sequence[str] | None = None) -> int:
    """Run the server; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m kestrel_server.server", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--port", type=int, default=22133, help="0: a free one")
    parser.add_argument("--dir", type=Path, required=True, help="where queues are kept")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--max-open", type=int, default=1, help="open reads of a connection (Kestrel's default: 1)")
    parser.add_argument(
        "--open-timeout", type=float, default=0, help="seconds until an open read is given back; 0: never"
    )
    parser.add_argument("--max-items", type=int, default=0, help="items of a queue; 0: no limit")
    parser.add_argument("--max-item-bytes", type=int, default=0, help="0: no limit")
    parser.add_argument("--max-age", type=float, default=0, help="seconds until an item expires; 0: never")
    parser.add_argument("--expire-to", default="", help="the queue that takes what expired")
    parser.add_argument("--discard-old", action="store_true", help="a full queue drops its oldest item")
    parser.add_argument("--max-journal-bytes", type=int, default=16 << 20, help="a longer journal is written anew")
    parser.add_argument("--fsync", action="store_true", help="write each change through to the disk")
    asyncio.run(_main(parser.parse_args(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
