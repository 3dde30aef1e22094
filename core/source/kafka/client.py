"""A Kafka cluster: which arguments its clients take, how they are made, what it is asked, and what its errors mean here."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import MissingRight, StoreUnavailable, StormproofError, TransientError, UsageError
from stormproof.core.base.extras import required

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient


log = logging.getLogger("stormproof.kafka")
_client_log = logging.getLogger("stormproof.kafka.client")

REPEATED_S: Final = 30.0
"""How long a line of the client's log is left out when it comes again: it logs each attempt, 20 in a second."""
_DIFFERS = re.compile(r"\d+ms|#\w+-\d+")
"""What differs between two lines that say the same: a duration, and the number of the client."""
_TEXTS_MAX: Final = 1_000


def _is_news(record: logging.LogRecord, told_s: dict[str, float]) -> bool:
    """Whether a line of the client's log was not in the log a moment ago; notes it in `told_s`, by its text."""
    text = _DIFFERS.sub("", record.getMessage())
    is_news = record.created - told_s.get(text, -math.inf) >= REPEATED_S
    if is_news:
        if len(told_s) > _TEXTS_MAX:
            told_s.clear()
        told_s[text] = record.created
    return is_news


_client_log.addFilter(partial(_is_news, told_s={}))

ANSWER_S: Final = 30.0
"""How long a cluster may leave a question unanswered; a run waits for it longer than that, by asking again."""
REFUSAL_S: Final = 3.0
"""How long it takes to notice, while a first answer is waited for, that the client is refused."""
END_WAIT_MS: Final = 20
"""How long a fetch at the end of a partition waits: only then is it known that transaction markers are all that is left."""

_RIGHTS: Final = frozenset(
    {"TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"},
)
_WRONG: Final = frozenset(
    {"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "_INVALID_ARG", "_SSL", "_FATAL"},
)

_ERROR: Final = methodcaller("error")
_NO_ANSWER: Final = frozenset(
    {"_TRANSPORT", "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_ALL_BROKERS_DOWN", "REQUEST_TIMED_OUT"}
)

_SET_BACK: Final = "UNKNOWN_LEADER_EPOCH"
"""The answer of a broker that was set back to a client that knows of a later leader, for as long as the client lives."""

Partition = tuple[str, int]
"""Topic and number."""

NONE_LATER: Final = -1
"""The answer to a question by time, where no message is as late as that."""


class Topic(NamedTuple):
    """What the cluster says of a topic: its id, which a topic of the same name that was made later does not have."""

    id: str
    partitions: tuple[int, ...]


@dataclass(slots=True)
class ErrorListener:
    """Listens to a client: its questions only time out where the cluster refuses it."""

    refusal: Any = None
    """Why the cluster refuses the client, or the client the cluster."""
    was_cut: bool = False
    """Whether a connection ended: the broker may have been set back since."""

    def __call__(self, error: Any) -> None:
        """The client tells an error that concerns no single question."""
        if error.name() in _WRONG:
            self.refusal = error
        self.was_cut = self.was_cut or error.name() in _NO_ANSWER


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a cluster is, and the settings of its clients. Picklable, and as secret as the passwords in it."""

    servers: str
    isolation: str = "read_committed"
    settings: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    answer_s: float = ANSWER_S

    def consumer(self, group: str | None = None, heard: Callable[[Any, Any], None] | None = None) -> Consumer:
        """A consumer that is told what to read: no group decides that, and an offset that is not there is an error.

        `heard` is called with the error (or None) and the offsets of what was committed to the group.
        """
        consumer: Consumer = _kafka().Consumer(
            {
                **({} if heard is None else {"on_commit": heard}),
                "group.id": group or "stormproof",  # the library wants one; without `group` nothing is committed to it
                **self._common,
                "isolation.level": self.isolation,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "allow.auto.create.topics": False,
                "fetch.wait.max.ms": END_WAIT_MS,
                "queued.min.messages": 10_000,  # read ahead of what is asked for: a slice, and not ten
                "fetch.queue.backoff.ms": 5,  # by default the client fetches nothing for a second once that many are there
                **dict(self.settings),
            },
            logger=_client_log,
        )
        return consumer

    def admin(self, heard: ErrorListener) -> AdminClient:
        """A client that asks, and tells `heard` why it is refused."""
        client: AdminClient = required("confluent_kafka.admin", "kafka", "KafkaSource").AdminClient(
            {**self._common, **_without_consumers(dict(self.settings)), "error_cb": heard}, logger=_client_log
        )
        return client

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.servers,
            "client.id": "stormproof",
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1_000,
        }

    @contextmanager
    def errors(self, what: str, refusal: Callable[[], Any] = lambda: None) -> Generator[None]:
        """Errors of the client as those of this package. `refusal` may know why an answer did not come."""
        exception = _kafka().KafkaException
        try:
            yield
        except exception as error:
            cause = error.args[0]
            known = refusal() if cause.name() in _NO_ANSWER else None
            raise self.error(what, known or cause) from error

    def error(self, what: str, cause: Any) -> StormproofError:
        """What an error of the cluster means: its client is away, or set wrong, or lacks a right."""
        name = cause.name() if hasattr(cause, "name") else type(cause).__name__
        text = f"{what} at {self.servers}: {self.without_secrets(str(getattr(cause, 'str', lambda: cause)()))} ({name})"
        if name in _RIGHTS:
            return MissingRight(
                f"{text}. Give the client's principal READ and DESCRIBE on the topic (kafka-acls --add --operation read)",
                servers=self.servers,
                error=name,
            )
        if name in _WRONG:
            return UsageError(
                f"{text}. Mend `client`, the settings of the source's client, such as sasl.username, sasl.password and "
                "ssl.ca.location; or what the cluster expects of them",
                servers=self.servers,
                error=name,
            )
        if name in _NO_ANSWER:
            text += ". Nothing answers there: see that the cluster runs, and that `servers` names it"
        return StoreUnavailable(text, servers=self.servers, error=name)

    def without_secrets(self, text: str) -> str:
        """A text without the values of settings that are secret."""
        for name, value in self.settings:
            if isinstance(value, str) and value and any(word in name for word in SECRETS):
                text = text.replace(value, "***")
        return text


SECRETS: Final = ("password", "secret", "jaas", "key.pem", "sasl.oauthbearer.config", "credentials")
"""Parts of the names of settings whose values are never shown."""


def _without_consumers(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a client which only asks has, too."""
    return {name: value for name, value in settings.items() if not name.startswith(("fetch.", "queued.", "max.poll."))}


def _kafka() -> Any:
    """The client library.

    Raises:
        MachineUnfit: it is not installed here.
    """
    return required("confluent_kafka", "kafka", "KafkaSource")


class Asking:
    """What the driver asks a cluster; its client is made when it is needed, and again in a fork."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._admin: AdminClient | None = None
        self._heard = ErrorListener()
        self._made_in = 0
        self.epochs: dict[Partition, int] = {}
        """The partitions' leader epochs, where the newest question for their ends has had them."""
        self._answers_right: set[Partition] = set()
        """The partitions of which the highest timestamp was once told right."""

    def __reduce__(self) -> tuple[Callable[[Cluster], Asking], tuple[Cluster]]:
        return Asking, (self.cluster,)

    @property
    def _client(self) -> AdminClient:
        if self._admin is None or self._made_in != os.getpid():
            self._heard = ErrorListener(was_cut=True)
            self._admin, self._made_in = self.cluster.admin(self._heard), os.getpid()
        return self._admin

    def close(self) -> None:
        """Let the client go; the next question makes another."""
        if self._made_in == os.getpid():
            self._admin = None

    @contextmanager
    def _asked(self, what: str) -> Generator[AdminClient]:
        """The client; where it gets no answer, it is asked whether it was refused."""
        client = self._client

        def refusal() -> Any:
            client.poll(0)  # its errors wait for this
            return self._heard.refusal

        try:
            with self.cluster.errors(what, refusal):
                yield client
            refusal()
            self._heard.refusal = None  # it was answered since
        except StoreUnavailable as error:
            if error.details.get("error") == _SET_BACK:
                self.close()
            raise

    def was_cut(self) -> bool:
        """Whether a connection ended since this was asked last."""
        self._client.poll(0)
        was_cut, self._heard.was_cut = self._heard.was_cut, False
        return was_cut

    def names(self) -> tuple[str, frozenset[str]]:
        """The cluster's id, and the names of its topics."""
        with self._asked("the cluster's topics could not be listed") as client:
            found = self._patiently(client, client.list_topics)
        return str(found.cluster_id), frozenset(str(name) for name in found.topics)

    def _patiently(self, client: AdminClient, ask: Callable[..., Any]) -> Any:
        """An answer, for as long as one may take; where the client is refused meanwhile, that ends it."""
        until_s = time.monotonic() + self.cluster.answer_s
        while True:
            try:
                return ask(timeout=min(REFUSAL_S, self.cluster.answer_s))
            except _kafka().KafkaException as error:
                client.poll(0.1)  # its errors and its log wait for this
                refused = self._heard.refusal is not None or error.args[0].name() not in _NO_ANSWER
                if refused or time.monotonic() > until_s:
                    raise

    def topics(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """Ids and partitions of topics; None for one that is not there."""
        kafka = _kafka()
        wanted = sorted(names)
        if not wanted:
            return {}
        found: dict[str, Topic | None] = {}
        with self._asked("topics could not be described") as client:
            answers = client.describe_topics(kafka.TopicCollection(wanted), request_timeout=self.cluster.answer_s)
        for name, answer in answers.items():
            try:
                about = answer.result()
            except kafka.KafkaException as error:
                if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                    raise self.cluster.error(f"topic {name} could not be described", error.args[0]) from error
                found[str(name)] = None
            else:
                found[str(name)] = Topic(str(about.topic_id), tuple(sorted(one.id for one in about.partitions)))
        return found

    def earliest(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offsets that are still there."""
        return self._offsets(dict.fromkeys(partitions, _specs().earliest()))

    def ends(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """The offsets behind the last message that may be read; those of an open transaction may not.

        Not `committed`: behind the last message of all.
        """
        answers = self._listed(dict.fromkeys(partitions, _specs().latest()), committed=committed)
        self.epochs |= {
            one: int(found.leader_epoch) for one, found in answers.items() if found.leader_epoch is not None
        }
        return {one: int(found.offset) for one, found in answers.items()}

    def at_time(self, partitions: Sequence[Partition], when: datetime) -> dict[Partition, int]:
        """The offsets of the first messages at or after a time; where there is none, the ends."""
        found = self.first_at(dict.fromkeys(partitions, int(when.timestamp() * 1_000)))
        later = [one for one, offset in found.items() if offset == NONE_LATER]
        return {**found, **self.ends(later)} if later else found

    def first_at(self, times: Mapping[Partition, int]) -> dict[Partition, int]:
        """The offsets of the first messages at or after a time (milliseconds), or `NONE_LATER`."""
        return self._offsets({one: _specs().for_timestamp(time_ms) for one, time_ms in times.items()}, NONE_LATER)

    def newest(self, ends: Mapping[Partition, int]) -> dict[Partition, int]:
        """The highest timestamps (milliseconds) of what is in partitions, up to these ends and beyond.

        Those that do not hold are left out: a broker before 3.0 takes the question for another one.
        """
        answers = self._listed(dict.fromkeys(ends, _specs().max_timestamp()), NONE_LATER, committed=False)
        found = {one: int(answer.timestamp) for one, answer in answers.items() if answer.timestamp > 0}
        later = self.first_at({one: time_ms + 1 for one, time_ms in found.items() if one not in self._answers_right})
        self._answers_right |= {one for one, offset in later.items() if not 0 <= offset < ends[one]}
        return {one: time_ms for one, time_ms in found.items() if one in self._answers_right}

    def told(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The offsets that a consumer group has; none where they cannot be read."""
        kafka = _kafka()
        asked = kafka.ConsumerGroupTopicPartitions(group, [kafka.TopicPartition(*one) for one in partitions])
        try:
            with self._asked(f"the offsets of consumer group {group} could not be read") as client:
                (answer,) = client.list_consumer_group_offsets([asked], request_timeout=self.cluster.answer_s).values()
                return {(one.topic, one.partition): int(one.offset) for one in answer.result().topic_partitions}
        except StormproofError as error:
            log.info("%s", error)
            return {}

    def _offsets(self, wanted: Mapping[Partition, Any], *also: int) -> dict[Partition, int]:
        return {one: int(answer.offset) for one, answer in self._listed(wanted, *also).items()}

    def _listed(self, wanted: Mapping[Partition, Any], *also: int, committed: bool = True) -> dict[Partition, Any]:
        """What the cluster answers; offsets below 0 are no answer, except for `also`."""
        if not wanted:
            return {}
        kafka = _kafka()
        isolation = self.cluster.isolation if committed else "read_uncommitted"
        level = kafka.IsolationLevel[isolation.upper()]
        asked = {kafka.TopicPartition(*one): spec for one, spec in wanted.items()}
        found: dict[Partition, Any] = {}
        with self._asked("the offsets of partitions could not be asked") as client:
            answers = client.list_offsets(asked, isolation_level=level, request_timeout=self.cluster.answer_s)
            for partition, answer in answers.items():
                result = answer.result()
                # A connection that ends between question and answer may leave a partition without an offset or an error.
                if result.offset < 0 and result.offset not in also:
                    raise StoreUnavailable(
                        f"the offsets of partitions could not be asked at {self.cluster.servers}: no answer for partition "
                        f"{partition.partition} of topic {partition.topic}",
                        servers=self.cluster.servers,
                        offset=int(result.offset),
                    )
                found[(partition.topic, partition.partition)] = result
        return found


def _specs() -> Any:
    return required("confluent_kafka.admin", "kafka", "KafkaSource").OffsetSpec


class Delivered(NamedTuple):
    """What a consumer gave at once: messages, and partitions whose end it has come to (with the offset there)."""

    messages: list[Any]
    ends: Mapping[Partition, int]


class OffsetGone(Exception):
    """An offset that was to be read is not there (any more): below the first one, or above the end."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.partition = partition


class GapsFound(TransientError):
    """A range of offsets that was taken to have no gaps has some. Nothing is lost: it is counted, and opened again."""


class Feed:
    """A consumer that is told where to read. `at` is where it stands in each partition that it reads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.answer_s = cluster.answer_s
        self._consumer = cluster.consumer()
        self._heard_s = time.monotonic()

    def assign(self, at: Mapping[Partition, int], epochs: Mapping[Partition, int] | None = None) -> None:
        """Read these partitions, from these offsets on. Where the leader `epochs` of what stands before them are given, the
        broker is asked first whether its log has it: one that lost it raises OffsetGone.
        """
        partition = _kafka().TopicPartition
        known = epochs or {}
        with self.cluster.errors("partitions could not be read"):
            self._consumer.assign(
                [partition(*one, offset, leader_epoch=known.get(one, -1)) for one, offset in at.items()]
            )
        self._heard_s = time.monotonic()

    def next(self, most: int, wait_s: float) -> Delivered:
        """What has arrived, at most `most` messages; waits for the first of them.

        Raises:
            OffsetGone: an offset to read is not there.
            StoreUnavailable: nothing at all was heard for too long.
        """
        with self.cluster.errors("partitions could not be read"):
            first = self._consumer.poll(wait_s)
            arrived: list[Any] = [] if first is None else [first, *self._consumer.consume(most, 0)]
        if arrived:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > self.answer_s:
            raise StoreUnavailable(
                f"partitions could not be read at {self.cluster.servers}: no answer for {self.answer_s:g} seconds",
                servers=self.cluster.servers,
            )
        if not [error for error in map(_ERROR, arrived) if error is not None]:
            return Delivered(arrived, {})
        good: list[Any] = []
        ends: dict[Partition, int] = {}
        for message in arrived:
            error = message.error()
            if error is None:
                good.append(message)
                continue
            name, partition = error.name(), (message.topic(), message.partition())
            if name == "_PARTITION_EOF":
                ends[partition] = message.offset()
            elif name in {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "_LOG_TRUNCATION"}:
                raise OffsetGone(partition)
            elif error.fatal() or not error.retriable() or name in _RIGHTS | _WRONG:
                raise self.cluster.error(f"partition {partition[1]} of topic {partition[0]} could not be read", error)
        return Delivered(good, ends)

    def close(self) -> None:
        """Let the connections go."""
        self._consumer.close()


def feeds(cluster: Cluster) -> list[Feed]:
    """Idle consumers of this process for a cluster: a fork never sees its parent's."""
    return _idle.setdefault((os.getpid(), cluster), [])


_idle: dict[tuple[int, Cluster], list[Feed]] = {}


# ---- the arguments of a source: which topics, where to start, and the client's settings

Start: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[int, int] | Mapping[str, Mapping[int, int]]
"""Where a new subscription begins: at all that is there, behind it, at a time, or at offsets by (topic and) partition."""

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]

_OURS: Final = {
    "bootstrap.servers": "servers",
    "group.id": "group",
    "isolation.level": "isolation",
    "auto.offset.reset": "start",
    "enable.auto.commit": "group",
    "enable.auto.offset.store": "group",
    "enable.partition.eof": "start",
    "group.instance.id": "group",
    "partition.assignment.strategy": "topics",
}
"""Settings of the client that an argument decides instead."""


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics by name, or those that a pattern (``^...``) matches."""

    given: tuple[str, ...]

    @classmethod
    def of(cls, given: Any) -> Topics:
        """From the argument.

        Raises:
            UsageError: it names no topic, or a pattern cannot be read.
        """
        names = cast("Sequence[Any]", (given,) if isinstance(given, str) else given)
        if isinstance(given, Sequence) and names and all(isinstance(one, str) and one for one in names):
            for one in names:
                if one.startswith("^"):
                    try:
                        re.compile(one)
                    except re.error as error:
                        raise UsageError(
                            f"Kafka source: topics has the pattern {one!r}, which cannot be read: {error}",
                            argument="topics",
                        ) from error
            return cls(tuple(dict.fromkeys(names)))
        raise UsageError(
            f"Kafka source: topics is {shown(given)}; it must be a topic, a list of topics, or a pattern such as "
            "'^orders-.*'",
            argument="topics",
        )

    @property
    def name(self) -> str:
        """What a source of them is called where nobody says otherwise."""
        return "+".join(self.given)

    @property
    def literal(self) -> frozenset[str]:
        """Those given by name."""
        return frozenset(one for one in self.given if not one.startswith("^"))

    @property
    def has_pattern(self) -> bool:
        """Whether the cluster's topics must be listed to know them."""
        return len(self.literal) < len(self.given)

    def matches(self, topic: str) -> bool:
        """Whether a topic is one of them; Kafka's own are none that a pattern means."""
        return topic in self.literal or (
            not topic.startswith("__")
            and any(one.startswith("^") and re.match(one, topic) is not None for one in self.given)
        )


def checked_start(where: str, start: Any, topics: Topics) -> Start:
    """The start, if it is one.

    Raises:
        UsageError: it is none.
    """
    if start in ("earliest", "latest"):
        return cast("Start", start)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise UsageError(f"{where}: start is {start}, without a time zone; say datetime(..., tzinfo=UTC)")
        return start
    if isinstance(start, Mapping) and start:
        by_topic = cast("Mapping[object, object]", start)
        if all(isinstance(topic, str) for topic in by_topic) and all(map(_is_offsets, by_topic.values())):
            return cast("Start", by_topic)
        if _is_offsets(by_topic) and len(topics.given) == 1 and not topics.has_pattern:
            return cast("Start", by_topic)
    raise UsageError(
        f"{where}: start is {shown(start)}; it is 'earliest', 'latest', a time (datetime), or offsets: "
        "{partition: offset} for a single topic, {topic: {partition: offset}} for several",
        argument="start",
    )


def _is_offsets(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, int) and isinstance(offset, int) and offset >= 0
        for key, offset in cast("Mapping[object, object]", value).items()
    )


def start_offset(start: Mapping[Any, Any], topic: str, partition: int) -> int | None:
    """The offset that is given for a partition; None: it is not named."""
    offsets: Mapping[int, int] = start.get(topic, {}) if all(isinstance(key, str) for key in start) else start
    return offsets.get(partition)


def checked_settings(where: str, settings: Any) -> tuple[tuple[str, Any], ...]:
    """Settings of the client, such as those of security, as they are passed on.

    Raises:
        UsageError: an argument decides one of them.
    """
    if settings is None:
        return ()
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise UsageError(
            f"{where}: client is {type(settings).__name__}; it is a mapping such as {{'security.protocol': 'SASL_SSL'}}",
            argument="client",
        )
    given: Mapping[str, Any] = dict(settings)
    for name in given:
        if name in _OURS:
            raise UsageError(
                f"{where}: setting {name!r} of client is decided by the argument {_OURS[name]!r}",
                argument="client",
                setting=name,
            )
    return tuple(sorted(given.items()))
