"""`NatsSource`: the messages of a NATS JetStream stream.

Each of a stream's sequences is accounted for: received, or removed by the server and decided on.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal, Self, Unpack

from stormproof.core.base import arguments
from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import Json, PositionMismatch, UsageError
from stormproof.core.contract.capabilities import NATS
from stormproof.core.contract.payload import Unit
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, ContinuityLook, OnGap, OnNewStream, Rules
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import RedeliveringArguments, RedeliveringSource
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.postgres.database import Database
from stormproof.core.source.metadata import KeepsMetadata
from stormproof.core.source.nats.client import (
    AGAIN,
    ANEW,
    DONE,
    NatsConsumer,
    NatsMetadata,
    Pulled,
    StreamFacts,
    time_of,
)

log = logging.getLogger("stormproof.source")

_NAME_MAX: Final = 64


class NatsSource(KeepsMetadata, RedeliveringSource):
    """The messages of a JetStream stream, pulled by a durable consumer.

    Each topology has a consumer of its own, so each reads every message; but a stream with work-queue retention takes one
    consumer. While a message is in work, the server hears of it each third of `ack_wait_s`; what a driver that died was
    given comes again after `ack_wait_s`.

    Guarantee: a message is known by the stream's sequence, and by when the stream took it, for `horizon_s` seconds after it
    was resolved, also where a server that was killed forgot that it was confirmed. A stream that was deleted and made again,
    one that was set back and gives sequences again, and one whose messages were removed before they were read, stop the run
    by name.

    Not guaranteed: a server that is killed may lose the messages that it has not written to its disk (`sync_interval`).
    With `subject`, messages that were removed before they were read cannot be told from other subjects', and so
    `audit verify` says.
    """

    KIND: ClassVar[str] = "nats"
    capabilities = NATS
    """Ids of the server; a message can be read again by its sequence, but one journal serves all that deliver."""
    BEFORE_ID: ClassVar[str] = "/"
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
        on_gap: OnGap = "fail",
        on_new_stream: OnNewStream = "fail",
        ack_wait_s: float = 30.0,
        connect: Mapping[str, Any] | None = None,
        name: str | None = None,
        **pending: Unpack[RedeliveringArguments],
    ) -> None:
        """`subject` leaves out messages of the stream's other subjects.

        `consumer`: a durable consumer that is there already, or is to be made by this name; by default "stormproof-" and
        the topology's incarnation. `start`: where a consumer that is made begins. `on_gap`: what messages that were removed
        before they were read lead to. `on_new_stream`: what a stream that was deleted and made again, or was set back, leads
        to; "same" goes on in a stream that was set back, or whose consumer was deleted. `connect`: further arguments of
        `nats.connect`, such as credentials and TLS. `name`: under which messages are pending; by default the stream's.
        `metadata` names fields to add behind the schema's: subject, sequence, timestamp (when the
        stream took the message), headers, and delivered (how often). Those of a message's first delivery are kept.
        `RedeliveringArguments` and `PendingArguments` have further arguments.
        """
        arguments.require_text(self.NOUN, "stream", stream, "ORDERS")
        where = f"{self.NOUN} {stream}"
        if re.search(r"[\s.*>/\\]", stream):
            raise UsageError(f"{where}: a stream's name has no space, '.', '*', '>' or '/'", argument="stream")
        arguments.require_text(where, "url", url, "nats://HOST:PORT")
        arguments.require_text_if_given(where, "subject", subject, "orders.*")
        arguments.require_text_if_given(where, "name", name, stream)
        arguments.require_text_if_given(where, "consumer", consumer, "billing")
        arguments.require_choice(where, "start", start, ("earliest", "latest"))
        arguments.require_seconds(where, "ack_wait_s", ack_wait_s)
        if connect is not None:
            arguments.require_object(where, "connect", connect, Mapping, "{'user_credentials': 'FILE'}")
        super().__init__(name or stream, schema=schema, unit=unit, **pending)
        self._metadata = NatsMetadata.chosen(where, metadata, self._decoder.schema)
        self._decoder = self._metadata.decoder(self._decoder)
        self._stream = stream
        self._url = url
        self._subject = subject
        self._consumer_name = consumer
        self._start = start
        self._rules = Rules(where, self.name, "let the stream keep more", ANEW, on_gap, on_new_stream)
        self._ack_wait_s = max(1.0, ack_wait_s)
        self._connect = dict(connect or {})
        self._consumer: NatsConsumer | None = None
        self._identity = ""
        self._sequences = Sequences()

    def __repr__(self) -> str:
        return f"NatsSource({self._stream!r})"  # the url may have a password

    def datasets(self) -> tuple[DatasetName, ...]:
        """The stream at the first of its servers."""
        return (at_server("nats", self._url, self._stream, port=4222),)

    def for_run(self, database: Database) -> Self:
        """The same source for one run, with a connection of its own."""
        view = super().for_run(database)
        view._consumer, view._identity = None, ""
        return view

    # ---- which stream it is

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription; its consumer is made where it is missing."""
        self._subscription = subscription  # the consumer's name has it
        if self._consumer is not None:
            self._consumer.close()
        self._consumer, self._identity = None, ""
        self._forget_seen()
        super().subscribe(subscription, epoch)

    @property
    def _here(self) -> NatsConsumer:
        if self._consumer is None:
            name = self._consumer_name or _consumer_of(str(self._subscription))
            self._consumer = NatsConsumer(self._url, self._stream, name, self.where, self._ack_wait_s, self._connect)
        return self._consumer

    def start(self, cursor: Any) -> At:
        """In front of the first message, with the moment at which the stream was made."""
        return {**super().start(cursor), **self._made(self._start)}

    def _made(self, start: str, life: int = 0) -> dict[str, Json]:
        """Make the consumer; gives what tells the stream from another of its name, and what is there of its sequences.

        `life` counts how often the stream was set back and is read as a new one.
        """
        try:
            facts = self._here.stream()
        except PositionMismatch as error:
            raise UsageError(
                f"{self.where}: the server has no such stream; make it first, as by: nats stream add {self._stream}",
                source=self._stream,
            ) from error
        self._here.make(start, self._subject, anew=life > 0)
        identity = f"{facts.created}~{life}" if life else facts.created
        seen = Sequences.begun(facts, latest=start == "latest").to_json()
        return {"stream": identity, **seen, "consumer": self._marked(identity)}

    def _marked(self, identity: str) -> str:
        return f"{self._here.name} of {_created(identity)}"

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Remember which stream it has to be, and how far it was read."""
        if not self._identity:
            self._identity = str(position.get("stream"))
            self._sequences = Sequences.of(position)
            self._sequences.received(self._journal(cursor).behind(f"{self._identity}/", self._sequences.through))
            facts = self._facts()
            if facts is None or facts.created != _created(self._identity):
                self._another(facts)
            else:
                self._here.make(self._start, self._subject)  # it is there; one that was edited since is refused
            mine = self._marked(self._identity)
            self._refuse_sharing(who, cursor, f"the consumer {self._here.name}", "consumer", mine, "consumer")
        return {**position, "stream": self._identity, "consumer": self._marked(self._identity)}

    def _facts(self) -> StreamFacts | None:
        """The stream that is there now; None: it is not there, or the consumer is not."""
        try:
            return self._here.stream() if self._here.is_there() else None
        except PositionMismatch:
            return None

    def _another(self, facts: StreamFacts | None) -> None:
        """Read what is there in place of the stream or consumer before.

        Raises:
            PositionMismatch: `on_new_stream` does not say so.
        """
        same = self._rules.on_new_stream == "same"
        if same and facts is None and self._here.stream().created == _created(self._identity):
            log.warning("%s: its consumer was deleted; it reads on in the same stream", self.where)
            self._here.make(self._sequences.since(self._horizon_s), self._subject)
            return
        if self._rules.on_new_stream != "adopt":
            self._identity = ""
            raise self._here.gone()
        text = "the stream or its consumer was made again; what is there is taken for new messages"
        self._read_as_new(ContinuityLook(Continuity.ANOTHER, text), 0)

    def _read_as_new(self, look: ContinuityLook, life: int) -> None:
        self.saw(look)
        made = self._made("earliest", life)
        self._identity, self._sequences = str(made["stream"]), Sequences.of(made)
        self.saw(**made)

    # ---- what the journal asks for

    def receive(self, limit: int) -> Sequence[Delivery]:
        """What the consumer has not delivered, or has waited for too long."""
        known = self._sequences
        try:
            before = self._here.stream().last if known.end is None else known.end
            pulled, facts, is_all = self._here.pull(limit)
            if facts.created != _created(self._identity):
                raise self._here.gone()
        except PositionMismatch:
            self._another(self._facts())
            return ()
        look = self._compared(facts)
        if look.verdict is Continuity.REWOUND:
            self._set_back(look, facts)
            return ()  # it comes again
        counted, known = self._counted(pulled, facts, before if is_all else 0)
        self.saw(look, counted, **known.to_json())
        self._sequences = known
        received = [(f"{self._identity}/{one.stored_us}/{one.sequence}", one.reply, one.payload) for one in pulled]
        return self._metadata.kept(received, pulled)

    def _compared(self, facts: StreamFacts) -> ContinuityLook:
        """Whether the stream has what was received of it: looked at behind each new connection."""
        known = self._sequences
        if facts.last < known.highest:
            text = (
                f"the stream ends at sequence {facts.last}, and messages up to {known.highest} were received: the server "
                "was set back (a power loss before its sync_interval, a copy), and gives sequences again"
            )
            return ContinuityLook(Continuity.REWOUND, text, 0, str(facts.last), str(known.highest))
        if known.mark is None or self._here.connections == known.compared:
            return CONTINUOUS
        sequence, stored_us = known.mark
        found = self._here.stored_us(sequence)
        if found is not None and found != stored_us:
            text = (
                f"sequence {sequence} is another message than the one that was received: the server was set back (a power "
                "loss before its sync_interval, a copy), and gives sequences again"
            )
            return ContinuityLook(Continuity.REWOUND, text, 0, str(sequence), str(known.highest))
        known.compared = self._here.connections
        if found is None and facts.keeps and facts.last > known.highest:
            text = (
                f"whether the server was set back cannot be told: sequence {sequence}, the last that was received, was "
                "removed since, and the stream has newer ones"
            )
            known.mark = None
            return ContinuityLook(Continuity.UNKNOWN, text, 0, str(sequence), str(facts.last))
        return CONTINUOUS

    def _set_back(self, look: ContinuityLook, facts: StreamFacts) -> None:
        """Go on in a stream that was set back: behind what it still has of what was received, or with all as new."""
        if self._rules.on_new_stream == "adopt":
            _, _, life = self._identity.partition("~")
            return self._read_as_new(look, int(life or 0) + 1)
        self.saw(look)
        self._here.make(self._sequences.since(self._horizon_s), self._subject, anew=True)
        self._sequences = Sequences.begun(facts, latest=True)
        return self.saw(**self._sequences.to_json())

    def _counted(self, pulled: Sequence[Pulled], facts: StreamFacts, upto: int) -> tuple[ContinuityLook, Sequences]:
        """Whether sequences are missing between those that were received; all up to `upto` were delivered."""
        known = replace(self._sequences, above=dict(self._sequences.above))
        known.received([(one.sequence, one.stored_us) for one in pulled])
        known.end = facts.last
        top = max(upto, known.highest)
        behind = known.through
        if not known.misses(top):
            known.move(behind)
            return CONTINUOUS, known
        # What did not come and is there, and which no driver holds, was confirmed before this subscription, or is another's.
        is_passed = self._subject is not None or (upto > behind and self._here.holds_all())
        first, holes = self._here.gone_between(behind, top)
        gone = known.passed(first, holes, (top if self._subject is not None else upto) if is_passed else 0)
        if not gone:
            return CONTINUOUS, known
        if self._subject is not None:
            text = (
                f"{gone} messages between {behind} and {top + 1} were removed before they were read, and whether one of "
                f"them was of the subject {self._subject} cannot be told"
            )
            return ContinuityLook(Continuity.UNKNOWN, text, 0, str(behind), str(top + 1)), known
        before = max([first, *(one + 1 for one in holes if one <= known.through)])
        text = (
            f"{gone} messages between {behind} and {before} were removed from the stream before they were read (max_msgs, "
            "max_msgs_per_subject, max_bytes, max_age, or a purge)"
        )
        return ContinuityLook(Continuity.REMOVED, text, gone, str(behind), str(before)), known

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


def _created(identity: str) -> str:
    """When the stream of an identity was made."""
    return identity.partition("~")[0]


def _consumer_of(subscription: str) -> str:
    """A consumer's name for a subscription: the server takes no dots, spaces, '*', '>' and '/'."""
    plain = re.sub(r"[^\w-]", "_", subscription, flags=re.ASCII)[:_NAME_MAX]
    digest = "" if plain == subscription else f"-{hashlib.sha256(subscription.encode()).hexdigest()[:8]}"
    return f"stormproof-{plain}{digest}"


# ---- which of a stream's sequences are accounted for

_EARLIER_S: Final = 3_600.0
"""A stream that was set back is read again from so long before the last message that is known: clocks may differ."""


@dataclass(slots=True)
class Sequences:
    """Everything up to `through` is accounted for, and what is in `above` was received, with when the stream took it.

    `began` is where the stream ended when it was first read, and `absent` how many messages up to there were gone already,
    and are not met yet. `mark` is the last message up to `through` that was received, and `compared` the connection by which
    it was compared with the server's. `end` is where the stream ended at the last look.
    """

    through: int = 0
    began: int = 0
    absent: int = 0
    mark: tuple[int, int] | None = None
    above: dict[int, int] = field(default_factory=dict[int, int])
    compared: int = 0
    end: int | None = None

    @classmethod
    def begun(cls, facts: StreamFacts, *, latest: bool) -> Sequences:
        """Of a stream that is read from here on: what it has not any more is not missed."""
        through = facts.last if latest else max(0, facts.first - 1)  # an empty stream begins at 0
        return cls(through, facts.last, 0 if latest else facts.holes, end=facts.last)

    @property
    def highest(self) -> int:
        """The highest sequence that was received, or is accounted for."""
        return max(self.above, default=self.through)

    def since(self, horizon_s: float) -> datetime | str:
        """From when on the stream is to be read again so that nothing is left out."""
        if self.mark is None:
            return "earliest"
        return time_of(self.mark[1]) - timedelta(seconds=min(_EARLIER_S, horizon_s))

    def received(self, messages: Iterable[tuple[int, int]]) -> None:
        """These were received: sequence, and when the stream took it."""
        self.above.update(one for one in messages if one[0] > self.through)

    def misses(self, top: int) -> bool:
        """Whether one up to `top` is not accounted for."""
        return top - self.through > len(self.above)

    def passed(self, first: int, holes: Sequence[int], upto: int) -> int:
        """Move on over what was received and what is gone: the stream begins at `first`, and `holes` are gone behind it. All
        up to `upto` that is there is not waited for. Gives how many are missed.
        """
        low, gone = max(self.through, first - 1), set(holes)
        through = max(low, upto)
        while through + 1 in self.above or through + 1 in gone:
            through += 1
        left = [one for one in gone if low < one <= through and one not in self.above]
        early = [one for one in self.above if one <= low]
        old = sum(one <= self.began for one in left) + max(0, min(low, self.began) - self.through)
        excused = min(self.absent, max(0, old - sum(one <= self.began for one in early)))
        missed = len(left) + low - self.through - len(early) - excused
        self.absent -= excused
        self.move(through)
        return missed

    def move(self, through: int) -> None:
        """All up to here is accounted for, and what follows on it."""
        passed = [one for one in self.above if one <= through]
        while through + 1 in self.above:
            through += 1
            passed.append(through)
        if passed:
            last = max(passed)
            self.mark = max((last, self.above[last]), self.mark or (0, 0))
        for one in passed:
            del self.above[one]
        self.through = max(self.through, through)

    def to_json(self) -> dict[str, Json]:
        """For the position."""
        mark: list[Json] | None = None if self.mark is None else [*self.mark]
        return {"through": self.through, "began": self.began, "absent": self.absent, "mark": mark}

    @classmethod
    def of(cls, position: Mapping[str, Json]) -> Sequences:
        """What `to_json` wrote."""
        match position:
            case {"through": int(through), "began": int(began), "absent": int(absent), "mark": mark}:
                pair = (int(mark[0]), int(mark[1])) if isinstance(mark, list) else None  # type: ignore[arg-type]
                return cls(through, began, absent, pair)
            case _:
                return cls()
