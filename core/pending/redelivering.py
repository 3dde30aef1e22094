"""`RedeliveringSource`: servers that deliver messages again, and cannot open a set of them a second time."""

from __future__ import annotations

import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Self, Unpack

from stormproof.core.base.arguments import error_prefix, require_seconds, require_whole
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Json, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.base.process import fewer_collections
from stormproof.core.contract.capabilities import REDELIVERS, Capabilities, StableIds
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.source import Backlog, Lease, Limit, Slice, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages
from stormproof.core.pending.continuity import ContinuityLook, Rules, with_looks
from stormproof.core.pending.journal import (
    INDEXED_MAX,
    Delivery,
    Journal,
    JournalCounts,
    JournalReader,
    ReusedId,
    indexed_id,
)
from stormproof.core.pending.numbered import NumberedSource, next_of, range_of
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import At, PendingRows, Subscriber
from stormproof.core.pending.source import PendingArguments
from stormproof.core.pending.tables import SCHEMA
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.store import query

# ---- the handles of a server's deliveries, by which they are confirmed


class Handles:
    """Handles by the number of their message. Most messages come once, so a handle that is alone stands without a list."""

    __slots__ = ("_first", "_further")

    def __init__(self) -> None:
        self._first: dict[int, Any] = {}
        self._further: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """How many messages have one."""
        return len(self._first)

    def add(self, numbers: Sequence[int], handles: Sequence[Any]) -> None:
        """One more handle for each of these messages."""
        added = dict(zip(numbers, handles, strict=True))
        if len(added) == len(numbers) and self._first.keys().isdisjoint(added):
            self._first.update(added)
            return
        for number, handle in zip(numbers, handles, strict=True):
            if number in self._first:
                self._further.setdefault(number, []).append(handle)
            else:
                self._first[number] = handle

    def numbers(self) -> list[int]:
        """The messages that have one."""
        return list(self._first)

    def pop(self, numbers: Iterable[int]) -> list[Any]:
        """All handles of these messages; they are not kept."""
        popped: list[Any] = []
        for number in numbers:
            popped.append(self._first.pop(number))
            popped += self._further.pop(number, ())
        return popped

    def clear(self) -> None:
        """Keep none."""
        self._first.clear()
        self._further.clear()


log = logging.getLogger("stormproof.source")

DAY_S: Final = 24 * 3_600.0
FORGET_INTERVAL_S: Final = 10.0
RECEIVES_MAX: Final = 100
"""Receives for one opening, as long as they bring nothing new."""


class RedeliveringArguments(PendingArguments, total=False):
    """The keyword arguments that every source takes whose server delivers messages again; each may be left out."""

    database: Database | str | None
    """Where messages are pending. Default: the run's."""
    prefetch: int
    """How many messages may be written down and not opened yet. Default: 10,000."""
    horizon_s: float
    """Seconds for which a message is known by its id after it was resolved. Default: 7 days."""
    clock: Clock | None


class RedeliveringSource(NumberedSource):
    """A source whose server delivers a message, waits for its confirmation, and delivers it again where none comes.

    What is received is written down in the run's Postgres, under the message's stable id, before it can be opened. From
    then on it is pending there: its slice can be read again, and a retry or a dead letter has its payload. The server hears
    of a message only once its slice is confirmed: that it is owed a confirmation is written in the transaction of the
    confirm. A crash or a lost connection in between costs nothing: the message comes again, with another handle, is known
    by its id, and is confirmed by that handle.

    A connector says how messages are received, confirmed and given back. It must keep:
        - A stable id is the same each time a message comes, and no other message's.
        - The server delivers again what was not confirmed. It may do so at any time, in any order, and more than once.
        - `receive` returns what is there, without waiting long: due retries wait for it.
        - A store that is away is a `StoreUnavailable`. Handles die with their connection: a connector that makes another
          one calls `reconnected`.

    Guarantee: a message that comes again after its slice was confirmed is never opened a second time, is always confirmed
    with its new handle, and counted as suppressed: for `horizon_s` seconds after it was resolved.

    Not guaranteed: a message that the server delivers later than that is a new one. Subscriptions of one source share its
    server's messages: each comes to one of them.

    Threads and forks: those of every pending source, as far as the connector's client allows it.
    """

    ORIGIN: ClassVar[int | None] = 0
    capabilities: Capabilities = REDELIVERS
    """What the server can do; by default, it gives messages stable ids, and delivers them again."""
    id_from: str | None = ""
    """Where stable ids stand, as the source was given it; "", the default: the server gives them."""
    READS_AHEAD: ClassVar[bool] = True
    """Whether more may be received than the next slice takes, as far as `prefetch` allows it."""

    def __init__(
        self,
        name: str,
        *,
        schema: str = "line string",
        unit: Unit | None = None,
        database: Database | str | None = None,
        prefetch: int = 10_000,
        horizon_s: float = 7 * DAY_S,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        """`RedeliveringArguments` and `PendingArguments` describe the arguments."""
        where = f"{self.NOUN} {name}"
        require_whole(where, "prefetch", prefetch, 1)
        require_seconds(where, "horizon_s", horizon_s)
        with error_prefix(where):
            decoder = decoder_for(schema, unit)
        super().__init__(
            name, decoder=decoder, store=PostgresPendingStore(self.NOUN, name, database=database), **pending
        )
        self._prefetch = self._ahead = prefetch
        self._horizon_s = horizon_s
        self._clock: Clock = clock or SystemClock()
        self._began = self._clock.now() - timedelta(seconds=self._clock.monotonic_s())
        self._forgot_s = -math.inf
        self._handles = Handles()
        self._at_most_once = False
        self._left: int | None = None
        self._rules = Rules(self.where, name, "have the server keep more", "Give the topology another name")
        self._forget_seen()

    def _forget_seen(self) -> None:
        """What was seen and is not written down is seen again."""
        self._looks: list[ContinuityLook] = []
        self._seen: dict[str, Json] = {}
        self._noted: dict[str, Json] = {}

    # ---- what a connector says

    @abstractmethod
    def receive(self, limit: int) -> Sequence[Delivery]:
        """At most `limit` messages that the server has for us now; none where there are none."""

    @abstractmethod
    def acknowledge(self, handles: Sequence[Any]) -> None:
        """Confirm these deliveries to the server; that one is repeated or comes too late must do no harm.

        Raises:
            StoreUnavailable: the server may not have heard it. The messages come again, and are confirmed then.
        """

    @abstractmethod
    def give_back(self, handles: Sequence[Any]) -> None:
        """Nobody here waits for these deliveries any more: the server may deliver them again at once."""

    def reused(self, message: Delivery) -> Delivery | None:
        """What to write down in place of a message whose id came before with another payload: one with an id of its own,
        which is the same each time it comes, and a payload that fails. None, the default: the run stops by name.
        """
        return None

    def left_at_server(self) -> int | None:
        """How many messages the server has for us that it has not delivered, as the newest `receive` has shown; None: that
        is not known, which is the default.
        """
        return None

    def reconnected(self) -> None:
        """The connection is another one: the handles that were given before are dead."""
        self._handles.clear()

    # ---- what every such source does

    @property
    def _tells_first(self) -> bool:
        """Whether the server hears of a message before it is written down: one that came again could be applied twice, and
        none may be.
        """
        return self._at_most_once and self.capabilities.stable_ids is StableIds.NONE

    @property
    def _tells_at_once(self) -> bool:
        """Whether it hears of a message then, or as soon as it is written down: then none is owed a confirmation."""
        return self._tells_first or self.capabilities.takes_over

    def begin(self, guarantee: Guarantee) -> None:
        """Under at-most-once, messages without ids are confirmed to their server before they are written down."""
        self._at_most_once = guarantee is Guarantee.AT_MOST_ONCE

    def for_run(self, database: Database) -> Self:
        """The same source for one run, with handles of its own."""
        view = super().for_run(database)
        view._handles = Handles()
        view._left = None
        view._forget_seen()
        return view

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; makes it where it is missing.

        Raises:
            Fenced: a newer epoch has the subscription.
            UsageError: messages in the journal have ids from another place.
        """
        super().subscribe(subscription, epoch)
        with self.rows() as rows:
            rows.move({**self._locked(rows, self.subscriber, epoch), "id_from": self.id_from})

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Refuse ids from another place while messages are known by those before."""
        before = position.get("id_from", self.id_from)
        if before != self.id_from and Journal(cursor, who, self.where).is_in_use(self._horizon_s, self._now()):
            raise UsageError(
                f"{self.where}: its messages are known by id_from={before!r}, and this is id_from={self.id_from!r}: those "
                f"that the server delivers again would be applied twice. Go on with id_from={before!r}; or, once the server "
                "has none left and `stormproof status` shows none unresolved and none owed, read it with "
                f"id_from={self.id_from!r} under another topology name. Nothing is known any more {self._horizon_s:g} "
                "seconds (horizon_s) after the last message was resolved",
                source=self.name,
                id_from=before,
            )
        return position

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """None: the server gives a message to whoever receives it."""
        return SourcePreview(why=f"{self.where}: its server hands messages out, so reading them would take them")

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones; None where there are none."""
        self._ahead = self._prefetch if self.READS_AHEAD else min(self._prefetch, limit.messages)
        return super().open(lease, limit, seed, tx)

    @fewer_collections()
    def look(self, epoch: int) -> None:
        """Receive messages, and write them down; confirm what is owed.

        Raises:
            Fenced: a newer epoch has the subscription.
            StoreUnavailable: the server or the database is away.
        """
        self.pay()
        self._receive_new(epoch)
        self._left = self.left_at_server()

    def _receive_new(self, epoch: int) -> None:
        for _ in range(RECEIVES_MAX):
            with self.rows() as rows:
                position = self._locked(rows, self.subscriber, epoch)
                stop = self.stop(rows.cursor)
            room = self._ahead - max(0, stop - next_of(position))
            given = self.receive(room) if room > 0 else ()
            received = [
                one if len(one.stable_id) <= INDEXED_MAX else one._replace(stable_id=indexed_id(one.stable_id))
                for one in given
            ]
            if not received and not self._looks and not self._seen:
                return
            if self._tells_first:
                # Whatever becomes of the call, what was received is not used if it fails: that is lost, or comes again.
                self.acknowledge([message.handle for message in received])
            with self.rows() as rows:
                position = self._locked(rows, self.subscriber, epoch)
                moved = with_looks({**position, **self._seen}, self._looks)
                if moved != position:
                    rows.move(moved)
                numbers = self._write(self._journal(rows.cursor), received)
                failpoint("journal.in_transaction")
            self._noted |= self._seen
            self._looks, self._seen = [], {}
            failpoint("journal.after_write")
            if not received:
                return
            if self._tells_at_once:
                # The server has nothing else for us until then, so what it gives at a time may be less than a batch.
                if not self._tells_first:
                    self.acknowledge([message.handle for message in received])
                continue
            self._handles.add(numbers, [message.handle for message in received])
            if min(numbers) < stop:
                self.pay()  # for what has come again
            if max(numbers) >= stop:
                return  # else all of it is known here: what is new may stand behind it

    def _write(self, journal: Journal, received: Sequence[Delivery]) -> list[int]:
        """Write messages down; those that bring an id which came with another payload are told apart first."""
        owed = not self._tells_at_once
        try:
            return journal.write(received, owed=owed)
        except ReusedId:
            payloads = journal.digests(message.stable_id for message in received)
            told_apart: list[Delivery] = []
            for message in received:
                digest = hashlib.sha256(message.payload).digest()
                if payloads.setdefault(message.stable_id, digest) == digest:
                    told_apart.append(message)
                    continue
                other = self.reused(message)
                if other is None:
                    raise
                log.warning(
                    "%s: the id %r came with another payload before; this message is going to be a dead letter",
                    self.where,
                    message.stable_id,
                )
                told_apart.append(other)
            return journal.write(told_apart, owed=owed)

    def saw(self, *looks: ContinuityLook, **seen: Json) -> None:
        """Keep what a look at the server has shown, and what the next one is to be compared with.

        It is written into the subscription's position together with what `receive` returns, so before any of that can be
        opened; `check` finds it there.

        Raises:
            PositionMismatch: the run must not go on, by the arguments in `_rules`.
        """
        self._looks += self._rules.decided(looks)
        self._seen |= {
            name: value for name, value in seen.items() if name not in self._noted or self._noted[name] != value
        }

    def pay(self) -> None:
        """Confirm to the server what it is owed, as far as handles are here; what stays owed comes again.

        Raises:
            StoreUnavailable: the server or the database is away.
        """
        if not self._handles:
            return
        with self.rows() as rows:
            owed = self._journal(rows.cursor).owed(self._handles.numbers())
        if not owed:
            return
        # The handles go first: whatever becomes of the call, they are used up, and a message still owed comes with others.
        handles = self._handles.pop(owed)
        failpoint("journal.before_acknowledge")
        self.acknowledge(handles)
        failpoint("journal.after_acknowledge")
        with self.rows() as rows:
            self._journal(rows.cursor).paid(owed)

    def journal_counts(self) -> JournalCounts:
        """What the journal of this subscription holds."""
        with self.rows() as rows:
            return self._journal(rows.cursor).counts()

    def maintain(self) -> None:
        """Confirm to the server what it is owed, and forget what was resolved before the horizon."""
        self.pay()
        now_s = self._clock.monotonic_s()
        if now_s - self._forgot_s >= FORGET_INTERVAL_S:
            self._forgot_s = now_s
            super().maintain()
            with self.rows() as rows:
                self._journal(rows.cursor).forget(self._horizon_s, self._now())

    def close(self) -> None:
        """Confirm what is owed, give back to the server what is unresolved, and let connections go."""
        try:
            self.pay()
            if self._handles:
                self.give_back(self._handles.pop(self._handles.numbers()))
        except (StoreUnavailable, UsageError) as error:
            # It costs nothing but time: the server delivers again what it does not hear of, if its queue is there.
            log.warning("%s: deliveries were not given back, and come again later: %s", self.where, error)
        finally:
            self._handles.clear()
            super().close()

    def _refuse_sharing(self, who: Subscriber, cursor: Any, what: str, key: str, value: str, argument: str) -> None:
        """Refuse a consumer of the server's that another subscription reads by: each message would come to one of them.

        `key` and `value` are what positions have of a consumer. The lock stands until the transaction ends.

        Raises:
            UsageError: another subscription has it.
        """
        query(cursor, "select pg_advisory_xact_lock(hashtextextended('stormproof consumers', 0))")
        found = query(
            cursor,
            f"select subscription, source from {SCHEMA}.pending_subscription where kind = %s and position ->> %s = %s"
            " and (source, subscription) <> (%s, %s) order by 1, 2 limit 1",
            *(who.kind, key, value, who.source, who.subscription),
        ).fetchone()
        if found is not None:
            raise UsageError(
                f"{self.where}: {what} is read by the topology {found[0]!r} already (as source {found[1]!r}): each message "
                f"would come to one of the two. Give this one another by {argument}=, or leave {argument} away",
                source=self.name,
                subscription=str(found[0]),
            )

    def _now(self) -> datetime:
        """This machine's time, as it passes since the source was made: a clock that jumps makes no message old."""
        return self._began + timedelta(seconds=self._clock.monotonic_s())

    def _journal(self, cursor: Any) -> Journal:
        return Journal(cursor, self.subscriber, self.where)

    # ---- numbered messages

    def stop(self, cursor: Any) -> int:
        """Behind the last message that was written down."""
        return self._journal(cursor).stop()

    def start(self, cursor: Any) -> At:
        """In front of the first message; what the server has is not known yet."""
        return {**super().start(cursor), "at_server": None}

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """The messages from the position on; it has also what the server has left."""
        found = super().next(position, limit, seed, cursor)
        if found is None:
            return None
        return replace(found, position={**found.position, "at_server": self._left})

    @classmethod
    def at_server(cls, position: At) -> int | None:
        """As the newest opening found it."""
        left = position.get("at_server")
        return left if isinstance(left, int) else None

    def _backlog(self, rows: PendingRows) -> Backlog:
        return replace(super()._backlog(rows), at_server=self._left)

    def sizes(self, first: int, stop: int, limit: Limit, cursor: Any) -> Sequence[int]:
        """The lengths of payloads."""
        return self._journal(cursor).sizes(first, stop)

    def reader(self, first: int, stop: int) -> SliceReader:
        """Messages of the journal."""
        assert isinstance(self._store, PostgresPendingStore)
        return JournalReader(self._store.database, self.subscriber, first, stop, self.unpack())

    def range_payloads(self, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """Out of the journal."""
        return self._journal(cursor).payloads(ids)

    def settle(self, at: At, cursor: Any) -> None:
        """The server is owed a confirmation, in the transaction of ours; unless it heard of them at once."""
        self._journal(cursor).settle(*range_of(at), self._now(), owed=not self._tells_at_once)
