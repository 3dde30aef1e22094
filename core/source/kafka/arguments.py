"""The arguments of a Kafka source: which topics, where to start, and the client's settings, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, cast

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import UsageError

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
