"""`KestrelSource`: the items of a Kestrel queue as messages."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Self, Unpack

import pyarrow as pa

from stormproof.core.base.arguments import require_text, require_text_if_given, require_whole
from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.capabilities import KESTREL, KESTREL_WITH_ID
from stormproof.core.contract.payload import Unit
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import RedeliveringArguments, RedeliveringSource
from stormproof.core.postgres.database import Database
from stormproof.core.source.kestrel.client import Address, Hosts, KestrelConnection
from stormproof.core.source.metadata import Fact, KeepsMetadata, Metadata
from stormproof.core.source.stable_ids import IdFrom

log = logging.getLogger("stormproof.source")

CONNECTIONS: Final = 16
ASK_WAITING_S: Final = 1.0
"""How often servers are asked how many items they have, while there are some: the answer has all of a server's queues."""
_QUEUE: Final = re.compile(r"[^\s/~\x00-\x20\x7f]{1,200}")


class ItemMetadata(Metadata):
    """What Kestrel knows of an item: the server that it came from, as HOST:PORT."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {"host": (pa.string(), lambda connection: connection.server)}


class KestrelSource(KeepsMetadata, RedeliveringSource):
    """The items of a Kestrel queue, over all servers of a cluster, by the memcache protocol.

    Kestrel's items have no id, so an item that comes again cannot be told from a new one. Therefore an item is taken over
    as soon as possible: it is opened (``get QUEUE/open``), written down in the run's Postgres, and closed (``/close``).
    From then on it is pending in Postgres alone: retries, dead letters and replays ask no server. Nothing is ever aborted
    because it failed, so no item bounces between clients.

    Guarantee: no item is lost, whatever ends: a server has it until the journal has it. From the moment when the server
    has heard of the take-over, an item is applied exactly once.

    Not guaranteed: an item whose take-over the server did not hear of comes again as a new message. That is one whose
    driver, connection or server went between the commit of the journal and the server's journal, some milliseconds; or
    whose `openTransactionTimeout` at the server ran out meanwhile. A log line names the server and how many they may be.
    With `id_from="field:NAME"`, a field of JSON items that is an item's own id, such an item is known and not applied again.

    A server that does not answer is left alone for half a second, longer each time, at most a minute; the others go on, and
    what it holds waits. Only when none answers the run waits for them, as for every store.

    Threads: topologies on several threads may share one object; each run has connections of its own.
    """

    KIND: ClassVar[str] = "kestrel"
    BEFORE_ID: ClassVar[str] = "="
    NOUN: ClassVar[str] = "Kestrel queue"

    def __init__(
        self,
        queue: str,
        *,
        hosts: Sequence[str] = ("127.0.0.1:22133",),
        schema: str = "line string",
        unit: Unit | None = None,
        id_from: str | None = None,
        metadata: Sequence[str] | Mapping[str, str] = (),
        connections: int = CONNECTIONS,
        open_reads: int = 1,
        name: str | None = None,
        new_id: Callable[[], str] | None = None,
        **pending: Unpack[RedeliveringArguments],
    ) -> None:
        """`hosts`: each server as HOST:PORT; 22133 where there is no port. `queue` may be one of a fanout, ``NAME+CHILD``.

        `connections`: at most so many to each server; `open_reads`: items that a connection may have open, at most the
        server's maxOpenTransactions (1 where nobody set it). Items come in steps of connections times open_reads a server.
        `id_from`: ``field:NAME`` where items have an id of their own. `name`: under which messages are pending; by default
        the queue's. `metadata`: ``("host",)`` adds the server that an item came from. `prefetch`: how many items
        may be taken over and not opened yet. `new_id` makes the ids of items. `RedeliveringArguments` and `PendingArguments`
        have further arguments.
        """
        require_text(self.NOUN, "queue", queue, "orders")
        if not _QUEUE.fullmatch(queue):
            raise UsageError(
                f"{self.NOUN} {queue!r}: a queue's name has 1 to 200 characters, no spaces, '/' or '~'",
                argument="queue",
            )
        where = f"{self.NOUN} {queue}"
        require_text_if_given(where, "name", name, queue)
        require_whole(where, "connections", connections, 1)
        require_whole(where, "open_reads", open_reads, 1)
        if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{where}: hosts is {hosts!r}; it is a list of servers, such as ['kestrel1:22133', 'kestrel2:22133']",
                argument="hosts",
            )
        self._addresses = tuple(dict.fromkeys(Address.of(where, host) for host in hosts))
        self._id_from = None if id_from is None else IdFrom.of(where, id_from, properties=False)
        self.id_from = id_from
        self.capabilities = KESTREL if id_from is None else KESTREL_WITH_ID  # items are taken over in both cases
        super().__init__(name or queue, schema=schema, unit=unit, **pending)
        self._metadata = ItemMetadata.chosen(where, metadata, self._decoder.schema)
        self._decoder = self._metadata.decoder(IdFrom.decoder(self._decoder, id_from))
        self._queue = queue
        self._most = (connections, open_reads)
        self._new_id = new_id or (lambda: uuid.uuid4().hex)
        self._hosts: Hosts | None = None
        self._is_empty = False
        self._asked_s = -math.inf
        self._waiting: int | None = None

    def datasets(self) -> tuple[DatasetName, ...]:
        """The queue at each of its servers."""
        return tuple(
            at_server("kestrel", f"{one.host}:{one.port}", self._queue, port=one.port) for one in self._addresses
        )

    def for_run(self, database: Database) -> Self:
        """The same queue for one run, with connections of its own."""
        view = super().for_run(database)
        view._hosts, view._is_empty, view._asked_s, view._waiting = None, False, -math.inf, None
        return view

    @property
    def _servers(self) -> Hosts:
        if self._hosts is None:
            connections, open_reads = self._most
            self._hosts = Hosts(
                self.where,
                self._addresses,
                self._queue,
                connections=connections,
                open_reads=open_reads,
                clock=self._clock,
                rng=self._rng,
            )
        return self._hosts

    # ---- what the journal asks for

    def receive(self, limit: int) -> Sequence[Delivery]:
        """Open items at every server in turn. An item that was not written down the last time is given back first."""
        received = [self._delivery(connection, item) for connection, item in self._servers.receive(limit)]
        self._is_empty = not received and self._servers.all_answered
        return self._metadata.kept(received, [connection for _, connection, _ in received])

    def _delivery(self, connection: KestrelConnection, item: bytes) -> tuple[str, KestrelConnection, bytes]:
        if self._id_from is None:
            return self._new_id(), connection, item
        id_, payload = self._id_from.identified(item)
        return id_, connection, payload

    def reused(self, message: Delivery) -> Delivery | None:
        """A message that fails: its publisher gave an id twice."""
        return None if self._id_from is None else self._id_from.reused(message)

    def left_at_server(self) -> int | None:
        """Items that nobody was given, at all servers: none, where the newest `receive` brought none; else they tell."""
        if self._is_empty:
            return 0
        now_s = self._clock.monotonic_s()
        if self._hosts is not None and now_s - self._asked_s >= ASK_WAITING_S:
            self._asked_s, self._waiting = now_s, self._hosts.waiting()
        return self._waiting

    def acknowledge(self, handles: Sequence[KestrelConnection]) -> None:
        """Close the reads: the servers forget the items. That one may not have heard it is logged, and stops nobody."""
        for address, items in self._servers.confirm(handles):
            log.warning(
                "%s: %s was lost while it was told that %d items are ours; those of which it did not hear come again%s",
                self.where,
                address,
                items,
                " as new messages" if self._id_from is None else ", and are known by their ids",
            )

    def give_back(self, handles: Sequence[KestrelConnection]) -> None:
        """Abort what is open."""
        self._servers.give_back()

    def drop_connections(self) -> None:
        """Let connections go: the servers give back what is open. The next call makes others."""
        super().drop_connections()
        if self._hosts is not None:
            self._hosts.drop()
