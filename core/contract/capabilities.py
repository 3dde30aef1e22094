"""What a source's server can do, and how a batch is made safe with it: decided here, for every source.

A source declares its `Capabilities`. `protection_of` says from them how its batches are made safe, `refusal` which
guarantee it cannot serve, and `outcome_of` what becomes of a message at each crash. docs/source_matrix.md is printed
from the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stormproof.core.base.message import Guarantee


class StableIds(StrEnum):
    """Who gives a message the id that is the same each time it comes, and no other message's."""

    SERVER = "server"
    PUBLISHER = "publisher"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a source declares of its server.

    `reopens`: any set of its messages can be read again, by their ids, for as long as it is pending. `delivers`: the
    server hands a message to one receiver, and waits for a confirmation. `counts_attempts`: the server says how often it
    delivered a message. `takes_over`: a message is confirmed to its server as soon as it is in the journal, and ours from
    then on.
    """

    stable_ids: StableIds
    reopens: bool = False
    delivers: bool = True
    counts_attempts: bool = False
    takes_over: bool = False


class Protection(StrEnum):
    """How a batch is made safe."""

    RANGES = "ranges"
    """The ledger has which messages are in a batch; they are read again from the server. Nothing is confirmed to it."""
    JOURNAL = "journal"
    """Messages are in a journal in Postgres before they are opened. One that comes again is known by its id."""
    TAKE_OVER = "take-over"
    """As `JOURNAL`; but nothing tells a message that comes again from a new one until its server has forgotten it."""
    NONE = "none"
    """Messages are not to be told apart, and only their server has them."""


def protection_of(able: Capabilities) -> Protection:
    """How a batch of such a source is made safe.

    Whether the server fences confirmations does not matter: none of them decides anything. The lease in Postgres does.
    """
    if able.reopens and not able.delivers:
        return Protection.RANGES
    if able.stable_ids is not StableIds.NONE:
        return Protection.JOURNAL
    return Protection.TAKE_OVER if able.takes_over else Protection.NONE


def refusal(able: Capabilities, guarantee: Guarantee, where: str) -> str | None:
    """Why a source cannot serve a guarantee; None where it can."""
    if protection_of(able) is not Protection.NONE or guarantee is not Guarantee.EXACTLY_ONCE:
        return None
    return (
        f"the messages of {where} have no stable id, so one that is delivered again after it was applied cannot be told "
        "from a new one. Have the publisher give each message an id and name it to the source, or run at-least-once"
    )


# ---- what becomes of a message


class Crash(StrEnum):
    """Where a driver ends, or what goes with it. A message passes these places in this order."""

    RECEIVED = "received, not written down"
    WRITTEN = "written down, the server not told"
    OPENED = "opened, no sink has it"
    APPLIED = "a sink has it, the ledger does not say so"
    COMMITTED = "the ledger says so, the server does not know"
    CONFIRMED = "the confirmation was sent, its answer is lost"
    SERVER = "the server is killed and forgets what it was told last"


class DeliverySemantics(StrEnum):
    """How often a message is applied."""

    ONCE = "once"
    LOST = "not at all"
    TWICE = "twice"
    ABSENT = "-"
    """There is no such moment."""


_RANGES_LACK: Final = frozenset({Crash.RECEIVED, Crash.WRITTEN, Crash.COMMITTED, Crash.CONFIRMED, Crash.SERVER})
_AFTER_THE_COMMIT: Final = frozenset({Crash.COMMITTED, Crash.CONFIRMED, Crash.SERVER})


def outcome_of(able: Capabilities, guarantee: Guarantee, crash: Crash) -> DeliverySemantics:
    """The worst that may become of a message."""
    protection = protection_of(able)
    if protection is Protection.RANGES and crash in _RANGES_LACK:
        return DeliverySemantics.ABSENT
    if crash is Crash.OPENED and guarantee is Guarantee.AT_MOST_ONCE:
        return DeliverySemantics.LOST
    if (
        guarantee is Guarantee.AT_MOST_ONCE
        and protection is not Protection.RANGES
        and able.stable_ids is StableIds.NONE
    ):
        return _outcome_of_telling_first(crash)
    if crash is Crash.APPLIED and guarantee is Guarantee.AT_LEAST_ONCE:
        return DeliverySemantics.TWICE
    if protection is Protection.TAKE_OVER:
        return _outcome_of_taking_over(crash)
    if protection is Protection.NONE and (crash is Crash.WRITTEN or crash in _AFTER_THE_COMMIT):
        return DeliverySemantics.TWICE
    return DeliverySemantics.ONCE


def _outcome_of_telling_first(crash: Crash) -> DeliverySemantics:
    """At-most-once without ids: the server hears of a message before it is written down."""
    if crash in {Crash.WRITTEN, Crash.COMMITTED, Crash.CONFIRMED}:
        return DeliverySemantics.ABSENT
    if crash is Crash.RECEIVED:
        return DeliverySemantics.LOST
    return DeliverySemantics.TWICE if crash is Crash.SERVER else DeliverySemantics.ONCE


def _outcome_of_taking_over(crash: Crash) -> DeliverySemantics:
    """The server hears of a message before it is opened: what is lost of that leads to another one like it."""
    if crash in {Crash.COMMITTED, Crash.CONFIRMED}:
        return DeliverySemantics.ABSENT
    return DeliverySemantics.TWICE if crash in {Crash.WRITTEN, Crash.SERVER} else DeliverySemantics.ONCE


# ---- every source


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A line of the matrix: a source as it is called, the class that it is, what it is able to do."""

    name: str
    made_by: str
    able: Capabilities


READS_AGAIN: Final = Capabilities(StableIds.SERVER, reopens=True, delivers=False)
REDELIVERS: Final = Capabilities(StableIds.SERVER)

KAFKA: Final = READS_AGAIN
RABBITMQ_STREAM: Final = READS_AGAIN
RABBITMQ_QUORUM: Final = Capabilities(StableIds.PUBLISHER, counts_attempts=True)
RABBITMQ_CLASSIC: Final = Capabilities(StableIds.PUBLISHER)
RABBITMQ_WITHOUT_ID: Final = Capabilities(StableIds.NONE)
REDIS_STREAM: Final = Capabilities(StableIds.SERVER, reopens=True, counts_attempts=True)
NATS: Final = Capabilities(StableIds.SERVER, reopens=True, counts_attempts=True)
KESTREL: Final = Capabilities(StableIds.NONE, takes_over=True)
KESTREL_WITH_ID: Final = Capabilities(StableIds.PUBLISHER, takes_over=True)

SOURCES: Final = (
    SourceRow("a queue in Postgres", "PostgresQueue", READS_AGAIN),
    SourceRow("files", "FileSource", READS_AGAIN),
    SourceRow("Kafka", "KafkaSource", KAFKA),
    SourceRow("RabbitMQ stream", "RabbitMQStreamSource", RABBITMQ_STREAM),
    SourceRow("RabbitMQ quorum queue", "RabbitMQSource", RABBITMQ_QUORUM),
    SourceRow("RabbitMQ classic queue", "RabbitMQSource", RABBITMQ_CLASSIC),
    SourceRow("RabbitMQ, without ids", "RabbitMQSource", RABBITMQ_WITHOUT_ID),
    SourceRow("Redis stream", "RedisStreamSource", REDIS_STREAM),
    SourceRow("NATS JetStream", "NatsSource", NATS),
    SourceRow("Kestrel", "KestrelSource", KESTREL),
    SourceRow("Kestrel, with an id", "KestrelSource", KESTREL_WITH_ID),
)


def matrix(
    made: frozenset[str] | None = None,
) -> Iterator[tuple[SourceRow, Guarantee, str | None, tuple[DeliverySemantics, ...]]]:
    """Each source under each guarantee: why it is refused, if it is, and what a crash at each place leads to.

    `made`: the classes that there are; None: all of them.
    """
    for row in SOURCES:
        if made is None or row.made_by in made:
            for guarantee in Guarantee:
                outcomes = tuple(outcome_of(row.able, guarantee, crash) for crash in Crash)
                yield row, guarantee, refusal(row.able, guarantee, row.name), outcomes
