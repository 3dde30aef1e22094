"""Rows of the version before one pending store, in every state, are moved as they are, and their sources go on with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import alembic.command
import psycopg
import pytest
import sqlalchemy as sa

from stormproof import PostgresQueue, migrations
from stormproof.core.errors import Fenced, Json
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import Counts, SliceRow, Subscriber
from stormproof.core.pending.slice_position import at_of
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.protocol import Expectation, Lease, Limit
from stormproof.testing import messages_of

pytestmark = pytest.mark.postgres

BEFORE = "0010"
QUEUE = Subscriber("queue", "lines", "s")
FILES = Subscriber("files", "rows", "s")
ROW = "times_opened, times_failed, not_before, reason, history"
LATER = "clock_timestamp() + interval '1 hour'"


@pytest.fixture
def before(database: Database) -> Iterator[psycopg.Connection]:
    """A connection to a database of the version before, with a queue of 13 messages: 12 of one transaction."""
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("create schema stormproof"))
        config = migrations._config()  # pyright: ignore[reportPrivateUsage]
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, BEFORE)
    with connect(database, application_name="tests", autocommit=True) as connection:
        with connection.transaction(), connection.cursor() as cursor:
            MessageTable("lines").create(cursor, 100)
        yield connection


def migrate(database: Database) -> None:
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    assert migrations.migrate(engine).up_to_date
    engine.dispose()


def put(connection: psycopg.Connection, *payloads: str) -> int:
    """Put messages in one transaction; gives its number."""
    row = connection.execute(
        "with new as (insert into stormproof_queue.lines (payload) select convert_to(p, 'UTF8') from unnest(%s::text[]) as p"
        " returning xid) select min(xid::text)::bigint from new",
        (list(payloads),),
    ).fetchone()
    assert row is not None
    return int(row[0])


def run(connection: psycopg.Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def queue_in_every_state(connection: psycopg.Connection) -> None:
    """Messages 1, 2 open; 3 held; 4 and 5, 6 parts of a split; 7 lapsed; 8 waits; 9 a retry that is open; 10 dead; 11
    dropped; 12 not opened, of the span in hand; 13 put later."""
    xid = put(connection, *(str(n) for n in range(1, 13)))
    (now,) = connection.execute("select pg_current_snapshot()::text").fetchone() or ("",)
    put(connection, "13")
    server = "(select system_identifier::text from pg_control_system()), "
    timeline = "('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint"
    run(
        connection,
        f"update stormproof.queue set server = {server.rstrip(', ')}",
        "insert into stormproof.queue_subscription (queue, subscription, epoch, from_snapshot, to_snapshot, after_xid,"
        f" after_id, server, timeline) values ('lines', 's', 1, '3:3:', '{now}', '{xid}', 11, {server}{timeline})",
        "insert into stormproof.queue_lapse (queue, subscription, owner, epoch) values ('lines', 's', 'late', 2)",
    )
    parts: list[tuple[int | None, int, str, str, int, int]] = [  # after, last, state, owner, expiry, opened, deaths
        (None, 2, "'open', 'one'", LATER, 1, 0),
        (2, 3, "'held', 'two'", "null", 1, 0),
        (3, 4, "'returned', null", "null", 2, 1),
        (4, 6, "'returned', null", "null", 2, 1),
        (6, 7, "'open', 'three'", "clock_timestamp() - interval '1 s'", 3, 1),
    ]
    for after, last, held, expiry, opened, deaths in parts:
        place = "null, null" if after is None else f"'{xid}', {after}"
        first = 1 if after is None else after + 1
        run(
            connection,
            "insert into stormproof.queue_slice (queue, subscription, kind, from_snapshot, to_snapshot, after_xid, after_id,"
            " last_xid, last_id, messages, bytes, min_id, max_id, state, owner, epoch, expires_at, opened, deaths)"
            f" values ('lines', 's', 'main', '3:3:', '{now}', {place}, '{xid}', {last}, {last - first + 1},"
            f" {last - first + 1}, {first}, {last}, {held}, 1, {expiry}, {opened}, {deaths})",
        )
    run(
        connection,
        "insert into stormproof.queue_slice (queue, subscription, kind, messages, bytes, min_id, max_id, state, owner,"
        f" epoch, expires_at, opened) values ('lines', 's', 'retry', 1, 1, 9, 9, 'open', 'four', 1, {LATER}, 1)",
        f"insert into stormproof.queue_retry (queue, subscription, id, xid, payload, {ROW}, slice) values"
        f" ('lines', 's', 8, '{xid}', '8', 2, 1, {LATER}, 'error', '[{{\"reason\": \"error\"}}]', null),"
        f" ('lines', 's', 9, '{xid}', '9', 1, 3, now(), 'failed', '[]', (select max(id) from stormproof.queue_slice))",
        "insert into stormproof.dead_letter (queue, subscription, id, xid, payload, reason, error, times_opened,"
        " times_failed, history, disposal, disposed_by, disposed_why, disposed_at, new_payload) values"
        f" ('lines', 's', 10, '{xid}', '10', 'error', 'ValueError: ten', 5, 5, '[]', null, null, null, null, null),"
        f" ('lines', 's', 11, '{xid}', '11', 'error', 'x', 5, 5, '[]', 'drop', 'ann', 'old', now(), null),"
        f" ('lines', 's', 8, '{xid}', 'old 8', 'error', 'x', 1, 1, '[]', 'edit', 'ann', 'why', now(), '8')",
    )


def files_in_every_state(connection: psycopg.Connection) -> None:
    """The same states over ranges of numbers."""
    run(
        connection,
        "insert into stormproof.file_subscription (source, subscription, epoch, format, next_id)"
        " values ('rows', 's', 4, 'text', 20)",
        "insert into stormproof.file_lapse (source, subscription, owner, epoch) values ('rows', 's', 'late', 3)",
        "insert into stormproof.file_slice (source, subscription, first_id, stop_id, messages, bytes, state, owner, epoch,"
        f" expires_at, opened, deaths) values ('rows', 's', 0, 5, 5, 50, 'open', 'one', 4, {LATER}, 1, 0),"
        " ('rows', 's', 5, 9, 4, 40, 'held', 'two', 4, null, 1, 0),"
        " ('rows', 's', 9, 10, 1, 10, 'returned', null, 3, null, 2, 1),"
        f" ('rows', 's', null, null, 1, 7, 'open', 'three', 4, {LATER}, 1, 0)",
        f"insert into stormproof.file_retry (source, subscription, id, file, payload, {ROW}, slice) values"
        f" ('rows', 's', 11, 1, 'eleven', 2, 1, {LATER}, 'error', '[]', null),"
        " ('rows', 's', 12, 2, 'twelve', 1, 3, now(), 'failed', '[]', (select max(id) from stormproof.file_slice))",
        "insert into stormproof.file_dead_letter (source, subscription, id, file, payload, reason, error, times_opened,"
        " times_failed, history) values ('rows', 's', 13, 2, 'thirteen', 'error', 'ValueError: x', 5, 5, '[]')",
    )


def test_a_queue_in_every_state_goes_on_exactly_once(before: psycopg.Connection, database: Database) -> None:
    queue_in_every_state(before)
    files_in_every_state(before)
    migrate(database)
    with closing(PostgresQueue("lines", database=database)) as queue:
        queue.subscribe("s", 2)
        assert queue.recover(2) == ("one", "two", "three", "four")
        queue.confirm(Lease("two", 2))  # it was prepared, and its sinks hold it
        for owner in ("one", "three", "four"):
            queue.abort(Lease(owner, 2))
        assert queue.requeue([letter.shown_id for letter in queue.dead_letters()], by="ann", why="mended") == (
            queue.dead_letters()[0].shown_id,
        )
        before.execute("update stormproof.pending_retry set not_before = clock_timestamp()")
        got, deaths = Counter[bytes](), Counter[bytes]()
        while (slice_ := queue.open(Lease("five", 2), Limit(100), 7)) is not None:
            messages = messages_of(queue, slice_, 7)
            got.update(message.payload for message in messages)
            deaths.update({messages[0].payload: slice_.deaths})
            assert len(messages) == slice_.expected.messages
            queue.confirm(Lease("five", 2))
        assert got == Counter(str(n).encode() for n in (1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13))
        assert deaths == {b"1": 1, b"4": 1, b"5": 1, b"7": 2, b"9": 1, b"8": 0, b"12": 0, b"13": 0}
        with pytest.raises(Fenced, match="late ran out"):
            queue.confirm(Lease("late", 2))
        backlog = queue.backlog()
        assert (backlog.ready, backlog.pending, backlog.waiting, backlog.dead) == (0, 0, 0, 0)


def test_dead_letters_keep_what_was_decided(before: psycopg.Connection, database: Database) -> None:
    queue_in_every_state(before)
    files_in_every_state(before)
    migrate(database)
    with closing(PostgresPendingStore("test", "t", database=database)) as store:
        with store.rows(QUEUE) as rows:
            found = rows.dead_letters(PostgresQueue.shown_id)
            assert [(d.id, d.payload, d.disposal, d.by, d.why, d.new_payload) for d in found] == [
                (10, b"10", None, None, None, None),
                (11, b"11", "drop", "ann", "old", None),
                (8, b"old 8", "edit", "ann", "why", b"8"),
            ]
            assert len({d.origin for d in found}) == 1
        with store.rows(FILES) as rows:
            assert [(d.id, d.origin, d.payload) for d in rows.dead_letters(PostgresQueue.shown_id)] == [
                (13, 2, b"thirteen")
            ]


def test_rows_of_files_are_moved_behind_those_of_queues(before: psycopg.Connection, database: Database) -> None:
    queue_in_every_state(before)
    files_in_every_state(before)
    migrate(database)
    with closing(PostgresPendingStore("test", "t", database=database)) as store, store.rows(FILES) as rows:
        assert rows.lock() == (4, {"next": 20, "format": "text"})
        one, two, returned, retry = rows.unresolved()
        assert one.id > 6  # a queue has the slices up to that
        assert one == SliceRow(one.id, {"range": [0, 5]}, 5, 50, "one", 4, opened=1)
        assert (two.owner, two.at) == ("two", {"range": [5, 9]})
        assert (returned.owner, returned.at, returned.opened, returned.deaths) == (None, {"range": [9, 10]}, 2, 1)
        assert retry.is_retry
        assert [(r.id, r.origin, r.times_failed, r.owner) for r in rows.waiting()] == [
            (11, 1, 1, None),
            (12, 2, 3, "three"),
        ]
        assert rows.retries_by_slice() == {retry.id: 1}
        counts = rows.counts()
        assert counts == Counts(1, 0, 10, 1, 1, counts.next_retry_in_s)
        assert rows.fate(Lease("late", 3)).lapsed
        new = rows.insert(SliceRow(0, {"range": [20, 21]}, 1, 1))
        assert new.id > retry.id


def test_what_the_ledger_kept_of_a_slice_is_understood(database: Database) -> None:
    """Positions stand in the ledger as the version before wrote them."""
    span: dict[str, Json] = {"start": "3:3:", "end": "9:9:", "after": None, "last": [5, 2]}
    told: dict[str, Json] = {"slice": 1, "messages": 2, "bytes": 9, "opened": 1, "deaths": 0}
    with closing(PostgresQueue("lines", database=database)) as queue:
        new = queue.attach({**told, "span": span, "ids": [1, 2], "replayed": []}, Expectation(2, 0))
        assert not new.retry
        assert at_of(new.position) == {"span": span, "ids": [1, 2]}
        retry = queue.attach({**told, "span": None, "ids": [1, 2], "replayed": [[5, 1], [5, 2]]}, Expectation(2, 0))
        assert retry.retry
        assert retry.replayed == ((1, 5), (2, 5))
        assert at_of(retry.position) is None
