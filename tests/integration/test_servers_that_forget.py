"""A chaos of servers: they lose their tail, remove what nobody read, give numbers again, are made again and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from support.brokers import skip_where_missing
from support.databases import fresh_database
from support.forgetful import KINDS, SEEDS, chaos

from stormproof.core.pending.continuity import CONTINUOUS
from stormproof.core.postgres.database import Database
from stormproof.core.source.kafka.partitions import Partitions
from stormproof.core.source.nats.source import NatsSource, Sequences
from stormproof.core.source.rabbitmq.stream_position import Seen
from stormproof.core.source.rabbitmq.stream_reader import StreamMessage
from stormproof.core.source.redis_streams.client import Counted

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(1_200)]


@pytest.mark.sampled(0.02)
@pytest.mark.parametrize("number", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_doubled_without_its_record(
    database: Database, tmp_path: Path, kind: str, number: int
) -> None:
    skip_where_missing(KINDS[kind][0])
    print(kind, number, dict(chaos(kind, number, database, tmp_path)))


def _blind_nats(self: NatsSource, pulled: Sequence[Any], facts: Any, upto: int) -> tuple[Any, Sequences]:
    return CONTINUOUS, self._sequences  # pyright: ignore[reportPrivateUsage]


def _blind_redis(self: Counted, facts: Any, ids: Any, *, is_all: bool) -> tuple[Any, Counted]:
    return CONTINUOUS, self.given(ids or ())


def _blind_kafka(self: Partitions, marked: Any) -> list[Any]:
    return []


def _blind_stream(cls: type[Seen], message: StreamMessage) -> Seen:
    return cls(message.offset, len(message.payload), 0)


BLIND: Final[Mapping[str, tuple[type, str, Any]]] = {
    "nats": (NatsSource, "_counted", _blind_nats),
    "redis": (Counted, "looked", _blind_redis),
    "kafka": (Partitions, "_told", _blind_kafka),
    "rabbitmq": (Seen, "of", classmethod(_blind_stream)),
}


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_control_without_a_mark_messages_are_lost_without_a_record(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    skip_where_missing(KINDS[kind][0])
    monkeypatch.setattr(*BLIND[kind])
    with pytest.raises(AssertionError, match=r"lost, \d+ on record|never applied"):
        every_seed(kind, database, tmp_path)


def every_seed(kind: str, database: Database, folder: Path) -> None:
    for number in range(SEEDS):
        with fresh_database(database, f"forgetful_{kind}_{number}") as fresh:
            chaos(kind, number, fresh, folder)
