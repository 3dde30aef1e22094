"""Slices of bulk producers: found by a shorter walk, read without the columns that are known, and the same messages."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from support.queues import prepared_database
from support.source_harness import messages_of

from stormproof.core.contract.source import Lease, Limit, Slice
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.postgres_queue import PostgresQueue, reader
from stormproof.core.source.postgres_queue.reader import PostgresSliceReader

pytestmark = pytest.mark.postgres


@pytest.fixture
def queue(database: Database, monkeypatch: pytest.MonkeyPatch) -> PostgresQueue:
    prepared_database(database)
    monkeypatch.setattr(reader, "BULK", 1)
    made = PostgresQueue("lines", database=database)
    made.subscribe("s", 1)
    return made


def opened(queue: PostgresQueue, limit: int) -> list[Slice]:
    found = list[Slice]()
    while (slice_ := queue.open(Lease(f"o{len(found)}", 1), Limit(limit), len(found))) is not None:
        found.append(slice_)
    return found


def xids_of(queue: PostgresQueue, slice_: Slice) -> list[int | None]:
    readers = queue.readers(slice_, 2)
    return [reader.xid for reader in readers if isinstance(reader, PostgresSliceReader)]


def test_one_transaction_is_cut_into_whole_slices_of_known_origin(queue: PostgresQueue) -> None:
    with closing(queue):
        xid = int(str(queue.put(b"%d" % number for number in range(10)).first).partition("-")[0])
        slices = opened(queue, 4)
        assert [slice_.expected.messages for slice_ in slices] == [4, 4, 2]
        messages = [message for slice_ in slices for message in messages_of(queue, slice_, slices.index(slice_))]
        assert [message.payload for message in messages] == [b"%d" % number for number in range(10)]
        assert {message.origin for message in messages} == {xid}
        assert [xids_of(queue, slice_) for slice_ in slices] == [[xid] * 2] * 3


def test_ids_with_gaps_fill_a_slice_all_the_same(queue: PostgresQueue, database: Database) -> None:
    with closing(queue), connect(database, application_name="a") as a, connect(database, application_name="b") as b:
        for number in range(12):
            queue.put([b"%d" % number], connection=(a, b)[number % 3 == 0])
        a.commit()
        b.commit()
        slices = opened(queue, 5)
        assert [slice_.expected.messages for slice_ in slices] == [5, 5, 2]
        assert [len(set(xids_of(queue, slice_)) - {None}) for slice_ in slices] == [0, 1, 1]
        found = [message.payload for at, slice_ in enumerate(slices) for message in messages_of(queue, slice_, at)]
        assert sorted(found, key=int) == [b"%d" % number for number in range(12)]


def test_tokens_are_those_of_the_server(database: Database) -> None:
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 500)
    with connect(database, application_name="tests") as connection:
        for seed in (0, 1, -7, 2**61 + 3, -(2**63)):
            rows = connection.execute(
                "select hashint8extended(id, %s) from unnest(%s::bigint[]) with ordinality u (id, n) order by n",
                (seed, ids.tolist()),
            ).fetchall()
            assert [token for (token,) in rows] == reader.tokens(ids, seed).tolist()


@pytest.mark.parametrize("agrees", [True, False])
def test_tokens_of_a_server_with_another_hash_are_sent(
    queue: PostgresQueue, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    """Control: with a hash of its own where the server's differs, the reader's tokens would not add up."""
    monkeypatch.setattr(reader, "tokens", lambda ids, seed: np.zeros(len(ids), np.int64))
    monkeypatch.setattr(reader, "agrees", lambda found: agrees)
    with closing(queue):
        queue.put([b"a", b"b", b"c"])
        (slice_,) = opened(queue, 4)
        xor = 0
        for message in messages_of(queue, slice_, 0):
            xor ^= message.token
        assert (xor == slice_.expected.xor) is not agrees
