"""`NatsSource`: the messages of a NATS JetStream stream."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar, Final, Literal, Self

from stormproof.core.arguments import require_choice, require_object, require_seconds, require_text
from stormproof.core.clock import Clock
from stormproof.core.dataset import DatasetName, at_server
from stormproof.core.errors import Json, PositionMismatch, UsageError
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import DAY_S, RedeliveringSource
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.postgres.database import Database
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.capabilities import NATS, Capabilities
from stormproof.core.source.decode import Unit
from stormproof.core.source.metadata import KeepsMetadata, Metadata
from stormproof.core.source.nats.consumer import AGAIN, DONE, Consumer, Pulled, StreamFacts
from stormproof.core.source.nats.message_metadata import MESSAGE, columns_of

log = logging.getLogger("stormproof.source")

_NAME_MAX: Final = 64


class NatsSource(KeepsMetadata, RedeliveringSource):
    """The messages of a JetStream stream, pulled by a durable consumer.

    Each topology has a consumer of its own, so each reads every message; but a stream with work-queue retention takes one
    consumer. While a message is in work, the server hears of it each third of `ack_wait_s`; what a driver that died was
    given comes again after `ack_wait_s`.

    Guarantee: a message is known by the stream's sequence for `horizon_s` seconds after it was resolved, also where a
    server that was killed forgot that it was confirmed. A stream that was deleted and made again, and one whose limits
    removed messages before they were read, stop the run by name.

    Not guaranteed: a server that is killed may lose the messages that it has not written to its disk (`sync_interval`).
    With `subject`, messages that limits removed before they were read cannot be told from other subjects'.
    """

    KIND: ClassVar[str] = "nats"
    NOUN: ClassVar[str] = "NATS stream"

    def __init__(
        self,
        stream: str,
        *,
        url: str = "nats://127.0.0.1:4222",
        schema: str = "line string",
        unit: Unit | None = None,
        metadata: Sequence[str] | Mapping[str, str] = (),
        subject: str | None = None,
        consumer: str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_gap: Literal["fail", "record"] = "fail",
        on_new_stream: Literal["fail", "adopt"] = "fail",
        ack_wait_s: float = 30.0,
        connect: Mapping[str, Any] | None = None,
        name: str | None = None,
        database: Database | str | None = None,
        max_attempts: int = 5,
        backoff: Backoff | None = None,
        prefetch: int = 10_000,
        horizon_s: float = 7 * DAY_S,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """`subject` leaves out messages of the stream's other subjects.

        `consumer`: a durable consumer that is there already, or is to be made by this name; by default "stormproof-" and
        the topology's incarnation. `start`: where a consumer that is made begins. `on_gap`: what messages that were removed
        before they were read lead to. `on_new_stream`: what a stream that was deleted and made again leads to. `connect`:
        further arguments of `nats.connect`, such as credentials and TLS. `name`: under which messages are pending; by
        default the stream's. `metadata` names fields to add behind the schema's: subject, sequence, timestamp (when the
        stream took the message), headers, and delivered (how often). Those of a message's first delivery are kept.
        """
        require_text(self.NOUN, "stream", stream, "ORDERS")
        where = f"{self.NOUN} {stream}"
        if re.search(r"[\s.*>/\\]", stream):
            raise UsageError(f"{where}: a stream's name has no space, '.', '*', '>' or '/'", argument="stream")
        require_text(where, "url", url, "nats://HOST:PORT")
        for argument, value, example in (("subject", subject, "orders.*"), ("name", name, stream)):
            if value is not None:
                require_text(where, argument, value, example)
        if consumer is not None:
            require_text(where, "consumer", consumer, "billing")
        require_choice(where, "start", start, ("earliest", "latest"))
        require_choice(where, "on_gap", on_gap, ("fail", "record"))
        require_choice(where, "on_new_stream", on_new_stream, ("fail", "adopt"))
        require_seconds(where, "ack_wait_s", ack_wait_s)
        if connect is not None:
            require_object(where, "connect", connect, Mapping, "{'user_credentials': 'FILE'}")
        super().__init__(
            name or stream,
            schema=schema,
            unit=unit,
            database=database,
            max_attempts=max_attempts,
            backoff=backoff,
            prefetch=prefetch,
            horizon_s=horizon_s,
            clock=clock,
            rng=rng,
        )
        self._metadata = Metadata.chosen(where, metadata, MESSAGE, self._decoder.schema)
        self._decoder = self._metadata.decoder(self._decoder)
        self._stream = stream
        self._url = url
        self._subject = subject
        self._consumer_name = consumer
        self._start = start
        self._fails_at_gap = on_gap == "fail"
        self._adopts = on_new_stream == "adopt"
        self._ack_wait_s = max(1.0, ack_wait_s)
        self._connect = dict(connect or {})
        self._consumer: Consumer | None = None
        self._identity = ""
        self._seen = -1

    def __repr__(self) -> str:
        return f"NatsSource({self._stream!r})"  # the url may have a password

    def datasets(self) -> tuple[DatasetName, ...]:
        """The stream at the first of its servers."""
        return (at_server("nats", self._url, self._stream, port=4222),)

    @property
    def capabilities(self) -> Capabilities:
        """Ids of the server; a message can be read again by its sequence, but one journal serves all that deliver."""
        return NATS

    def for_run(self, database: Database) -> Self:
        """The same source for one run, with a connection of its own."""
        view = super().for_run(database)
        view._consumer, view._identity, view._seen = None, "", -1
        return view

    # ---- which stream it is

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription; its consumer is made where it is missing."""
        self._subscription = subscription  # the consumer's name has it
        if self._consumer is not None:
            self._consumer.close()
        self._consumer, self._identity, self._seen = None, "", -1
        super().subscribe(subscription, epoch)

    @property
    def _here(self) -> Consumer:
        if self._consumer is None:
            name = self._consumer_name or _consumer_of(str(self._subscription))
            self._consumer = Consumer(self._url, self._stream, name, self.where, self._ack_wait_s, self._connect)
        return self._consumer

    def start(self, cursor: Any) -> At:
        """In front of the first message, with the moment at which the stream was made."""
        return {**super().start(cursor), **self._made(self._start)}

    def _made(self, start: str) -> dict[str, Json]:
        """Make the consumer; gives what tells the stream from another of its name, and the last sequence not to be read."""
        try:
            facts = self._here.stream()
        except PositionMismatch as error:
            raise UsageError(
                f"{self.where}: the server has no such stream; make it first, as by: nats stream add {self._stream}",
                source=self._stream,
            ) from error
        self._here.make(start, self._subject)
        return {
            "stream": facts.created,
            "behind": facts.last if start == "latest" else facts.first - 1,
            "consumer": self._marked(facts.created),
        }

    def _marked(self, created: str) -> str:
        return f"{self._here.name} of {created}"

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Remember which stream it has to be, and how far it was read."""
        if not self._identity:
            facts = self._facts()
            if facts is None or facts.created != position.get("stream"):
                position = {**position, **self._another()}
            else:
                self._here.make(self._start, self._subject)  # it is there; one that was edited since is refused
            mine = self._marked(str(position["stream"]))
            self._refuse_sharing(who, cursor, f"the consumer {self._here.name}", "consumer", mine, "consumer")
            position = {**position, "consumer": mine}
            self._identity = str(position["stream"])
            behind = position.get("behind")
            self._seen = max(
                behind if isinstance(behind, int) else 0, self._journal(cursor).highest(f"{self._identity}/")
            )
        return {**position, "stream": self._identity}

    def _facts(self) -> StreamFacts | None:
        """The stream that is there now; None: it is not there, or the consumer is not."""
        try:
            return self._here.stream() if self._here.is_there() else None
        except PositionMismatch:
            return None

    def _another(self) -> dict[str, Json]:
        """What is known of the stream that is there now.

        Raises:
            PositionMismatch: it is not to be read in place of the one before.
        """
        if not self._adopts:
            raise self._here.gone()
        log.warning("%s: stream or consumer was made again; a new stream's messages are new ones", self.where)
        return self._made("earliest")

    # ---- what the journal asks for

    def receive(self, limit: int) -> Sequence[Delivery]:
        """What the consumer has not delivered, or has waited for too long."""
        try:
            pulled, facts = self._here.pull(limit)
            if facts.created != self._identity:
                raise self._here.gone()
        except PositionMismatch:
            if not self._adopts:
                raise
            self._identity = ""  # `check` adopts it, before the next opening
            return ()
        self._look_for_gap(pulled, facts)
        received = [Delivery(f"{self._identity}/{one.sequence}", one.reply, one.payload) for one in pulled]
        return self._metadata.kept(received, columns_of(self._metadata.known, [one.message for one in pulled]))

    def _look_for_gap(self, pulled: Sequence[Pulled], facts: StreamFacts) -> None:
        """Messages that were removed from the stream's beginning before they were read."""
        if self._subject is None and facts.first > self._seen + 1:
            lost = (
                facts.first
                - self._seen
                - 1
                - len({m.sequence for m in pulled if self._seen < m.sequence < facts.first})
            )
            if lost > 0:
                text = (
                    f"{self.where}: {lost} messages from sequence {self._seen + 1} on were removed from the stream before "
                    "they were read (max_msgs, max_bytes, max_age, or a purge)"
                )
                if self._fails_at_gap:
                    raise PositionMismatch(
                        f"{text}. To go on without them, and have them on record, pass on_gap='record'; let the stream "
                        "keep more",
                        source=self.name,
                        messages=lost,
                    )
                self.put_lost_on_record(lost, str(self._seen), str(facts.first))
            self._seen = facts.first - 1
        self._seen = max([self._seen, *(one.sequence for one in pulled)])

    def left_at_server(self) -> int | None:
        """What the consumer has not delivered."""
        return None if self._consumer is None else self._consumer.left

    def acknowledge(self, handles: Sequence[Any]) -> None:
        """Confirm deliveries; the server has read it when this returns, and may forget it if it is killed."""
        self._here.answer(handles, DONE)

    def give_back(self, handles: Sequence[Any]) -> None:
        """Have them delivered again at once."""
        self._here.answer(handles, AGAIN)

    def drop_connections(self) -> None:
        """Let the connection go; the next call makes another."""
        super().drop_connections()
        if self._consumer is not None:
            self._consumer.close()

    def close(self) -> None:
        """Confirm what is owed, give back what is unresolved, and let the connection go."""
        super().close()
        if self._consumer is not None:
            self._consumer.close()


def _consumer_of(subscription: str) -> str:
    """A consumer's name for a subscription: the server takes no dots, spaces, '*', '>' and '/'."""
    plain = re.sub(r"[^\w-]", "_", subscription, flags=re.ASCII)[:_NAME_MAX]
    digest = "" if plain == subscription else f"-{hashlib.sha256(subscription.encode()).hexdigest()[:8]}"
    return f"stormproof-{plain}{digest}"
