"""Sources that are made otherwise than before: with another schema, metadata, decoding, and other ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from support.brokers.each import EACH
from support.brokers.harness import opened, tuples_of
from support.brokers.rabbitmq_server import RabbitMQHarness, RabbitMQServer
from support.brokers.redis_server import RedisHarness
from support.queues import prepared_database

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

ANY: Final = Limit(1_000)
METADATA: Final[Mapping[str, tuple[str, ...]]] = {
    "rabbitmq": ("message_id", "routing_key", "headers", "redelivered"),
    "rabbitmq-stream": ("message_id", "offset", "headers"),
    "redis": ("id", "timestamp", "fields"),
    "nats": ("subject", "sequence", "timestamp", "delivered"),
    "kestrel": ("host",),
    "kafka": ("topic", "offset", "timestamp", "headers", "tombstone"),
}


@pytest.fixture(params=METADATA)
def made(request: pytest.FixtureRequest, database: Database) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """A harness, and metadata of its broker that no message lacks."""
    fixture, make = EACH[request.param]
    server = request.getfixturevalue(fixture)
    harness = make(prepared_database(database), request.node.name, server=server)
    yield harness, METADATA[request.param]
    harness.close()


def view(harness: Any, epoch: int, **options: Any) -> Any:
    harness.options = options
    return harness.view(epoch=epoch)


def fail_first(source: Any, epoch: int, owner: str) -> None:
    lease = Lease(owner, epoch)
    slice_ = source.open(lease, Limit(1), 7)
    source.confirm(lease, failures_of(source, slice_))


def everything(source: Any, epoch: int) -> list[dict[str, Any]]:
    """The tuples of all that is open, each of which fails; where one cannot be read, it is left out."""
    found: list[dict[str, Any]] = []
    number = 0
    while (slice_ := source.open(lease := Lease(f"{epoch}/{number}", epoch), ANY, 7)) is not None:
        found += tuples_of(source, slice_)
        source.confirm(lease, failures_of(source, slice_))
        number += 1
    return found


def failures_of(source: Any, slice_: Any) -> list[MessageFailure]:
    """All of a slice's messages as failed ones."""
    return [
        MessageFailure(
            MessageId(row["id"]), row["origin"], Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True
        )
        for reader in source.readers(slice_, 1)
        for batch in reader.read(7, frozenset(), 100)
        for row in batch.select(["id", "origin"]).to_pylist()
    ]


def test_schema_metadata_and_decoding_may_change_whatever_is_pending_waiting_and_dead(
    made: tuple[Any, tuple[str, ...]],
) -> None:
    """A dead letter, a retry, a slice of a driver that died, and messages that were never opened."""
    harness, metadata = made
    harness.put([b'{"n": %d, "extra": "x"}' % n for n in range(6)])
    first = view(harness, 1, schema="n bigint", max_attempts=1)
    fail_first(first, 1, "dead")
    (letter,) = first.dead_letters()
    first.close()
    second = view(harness, 2, schema="n bigint")
    fail_first(second, 2, "waits")
    assert second.open(Lease("dies", 2), Limit(2), 7) is not None

    third = view(harness, 3, schema="n bigint, extra string", metadata=metadata)
    for owner in third.recover(3):
        third.abort(Lease(owner, 3))
    assert third.requeue([letter.shown_id], by="me", why="test") == (letter.shown_id,)
    harness.wait_for_retries()
    found = everything(third, 3)
    assert sorted((row["n"], row["extra"]) for row in found) == [(n, "x") for n in range(6)]
    assert [row for row in found if any(row[name] is None for name in metadata)] == []
    third.close()

    fourth = view(harness, 4, schema="payload binary")
    harness.wait_for_retries()
    assert sorted(row["payload"] for row in everything(fourth, 4)) == [
        b'{"n": %d, "extra": "x"}' % n for n in range(6)
    ], "without what the broker said of them"
    fourth.close()


def test_an_entry_of_several_fields_is_known_again_by_another_schema(
    database: Database, request: pytest.FixtureRequest
) -> None:
    """A driver died that was given entries; the next one has one more column."""
    harness = RedisHarness(
        prepared_database(database), request.node.name, server=request.getfixturevalue("redis_server")
    )
    with harness.server.client() as client:
        for n in range(3):
            client.xadd(harness.name, {"id": n, "extra": f"x{n}"})
        source = view(harness, 1, schema="id bigint, other string")
        assert source.open(Lease("a", 1), Limit(2), 7) is not None
        source.confirm(Lease("a", 1))  # and here it dies: neither is confirmed to the server
        after = view(harness, 2, schema="id bigint, other string, extra string")
        slice_ = after.open(Lease("b", 2), ANY, 7)
        assert tuples_of(after, slice_) == [{"id": 2, "other": None, "extra": "x2"}]
    harness.close()


@pytest.mark.parametrize("changed", ["header:id", None])
def test_other_ids_are_refused_by_name_while_messages_are_known_by_the_ones_before(
    rabbitmq: RabbitMQServer, database: Database, request: pytest.FixtureRequest, changed: str | None
) -> None:
    harness = RabbitMQHarness(prepared_database(database), request.node.name, server=rabbitmq)
    rabbitmq.put(harness.name, [b"a", b"b"], ["1", "2"], headers={"id": "x"})
    source = view(harness, 1)
    assert opened(source, Lease("a", 1), Limit(1)) == [b"a"]
    source.confirm(Lease("a", 1))
    source.close()
    with pytest.raises(UsageError, match=r"known by id_from='message_id', .* under another topology name"):
        view(harness, 2, id_from=changed)
    again = view(harness, 3)
    assert opened(again, Lease("b", 3)) == [b"b"]
    again.confirm(Lease("b", 3))
    again.close()
    with pytest.raises(UsageError, match="known by id_from='message_id'"):
        view(harness, 4, id_from=changed)
    harness.execute("update stormproof.pending_message set resolved_at = resolved_at - interval '8 days'")
    rabbitmq.put(harness.name, [b"c"], headers={"id": "x"})
    after = view(harness, 5, id_from=changed)
    assert opened(after, Lease("c", 5)) == [b"c"], "nothing is known any more"
    with pytest.raises(UsageError, match=f"known by id_from={changed!r}"):
        view(harness, 6)
    harness.close()
