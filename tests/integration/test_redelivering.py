"""Sources whose server can only redeliver: what comes again is known, confirmed and never applied twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import psycopg
import pytest
import sqlalchemy as sa
from support.queues import prepared_database
from support.redelivering import Handle, ToyHarness, ToyServer, ToySource
from support.source_harness import messages_of
from support.verdicts import verified

from stormproof import PostgresSink, Topology
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import Fenced, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.capabilities import RABBITMQ_WITHOUT_ID
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.journal import Delivery, Journal, JournalCounts
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.start.settings import Settings
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.status import status

pytestmark = pytest.mark.postgres

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)
ANY = Limit(100)


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases that keep apart by their source's name."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_redelivering template template0")
    yield prepared_database(postgres.database.with_name("test_redelivering"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_redelivering with (force)")


@pytest.fixture
def harness(request: pytest.FixtureRequest, shared_database: Database) -> Iterator[ToyHarness]:
    harness = ToyHarness(shared_database, request.node.name)
    yield harness
    harness.close()


def opened(source: ToySource, lease: Lease, limit: Limit = ANY) -> list[bytes]:
    """The payloads of the next slice; none where there is none."""
    slice_ = source.open(lease, limit, 7)
    return [] if slice_ is None else [message.payload for message in messages_of(source, slice_)]


# ---- one message after the other


def test_a_message_is_confirmed_to_its_server_after_its_slice_and_not_before(harness: ToyHarness) -> None:
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    assert opened(source, A, Limit(2)) == [b"a", b"b"]
    source.maintain()
    assert harness.server.confirmed == []
    source.confirm(A)
    source.maintain()
    assert harness.server.confirmed == ["m1", "m2"]
    source.close()
    assert [id_ for id_, _ in harness.server.ready] == ["m3"], "given back"


def test_what_was_received_is_durable_and_no_server_is_needed_to_open_it(harness: ToyHarness) -> None:
    harness.put([b"a", b"b"])
    assert opened(harness.view(), A, Limit(1)) == [b"a"]
    harness.server.ready.clear()
    harness.server.lose()
    harness.server.ready.clear()  # the server has forgotten everything
    after = harness.view(epoch=2)
    assert after.recover(2) == ("a",)
    after.abort(Lease("a", 2))
    assert opened(after, Lease("b", 2)) == [b"a"]
    assert opened(after, Lease("c", 2)) == [b"b"]


def test_a_confirmation_that_is_owed_survives_a_crash_and_is_paid_with_the_new_handle(harness: ToyHarness) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)  # and here the driver dies
    harness.server.lose()
    after = harness.view(epoch=2)
    assert after.journal_counts() == JournalCounts(messages=2, owed=2, suppressed=0)
    assert opened(after, Lease("b", 2)) == [], "they come again, and are not opened again"
    assert harness.server.confirmed == ["m1", "m2"]
    assert harness.server.left == 0
    assert after.journal_counts() == JournalCounts(messages=2, owed=0, suppressed=2)


def test_a_message_that_comes_again_while_it_is_pending_is_taken_once(harness: ToyHarness) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()
    assert opened(source, A) == [b"a", b"b"]
    harness.server.redeliver_everything()
    assert opened(source, B) == []
    harness.server.lose()
    source.connection = None
    assert opened(source, B) == []
    assert source.journal_counts() == JournalCounts(2, 0, 0, unresolved=2)
    source.confirm(A)
    source.maintain()
    assert sorted(set(harness.server.confirmed)) == ["m1", "m2"]
    assert harness.server.left == 0


def test_a_confirmation_that_the_server_ignored_is_repeated_when_the_message_comes_again(harness: ToyHarness) -> None:
    harness.put([b"a"])
    source = harness.view()
    assert opened(source, A) == [b"a"]
    stale = harness.server.connect()
    harness.server.lose(source.connection)  # a timeout at the server: its handles are dead, and nobody here knows
    source.connection = stale
    source.confirm(A)
    source.maintain()
    assert (harness.server.ignored, harness.server.confirmed, harness.server.left) == (1, [], 1)
    assert source.journal_counts().owed == 0, "for all that is known here"
    assert opened(source, B) == []
    assert (harness.server.confirmed, harness.server.left) == (["m1"], 0)
    assert source.journal_counts().suppressed == 1


def test_a_confirmation_that_fails_stays_owed(harness: ToyHarness) -> None:
    harness.put([b"a"])
    source = harness.view()
    assert opened(source, A) == [b"a"]
    source.confirm(A)
    harness.server.lose()
    with pytest.raises(StoreUnavailable, match="connection is gone"):
        source.maintain()
    assert source.journal_counts().owed == 1
    source.connection = None
    assert opened(source, B) == []
    assert (harness.server.confirmed, source.journal_counts().owed) == (["m1"], 0)


def test_failed_messages_are_ours_and_the_server_hears_that_it_may_forget_them(harness: ToyHarness) -> None:
    harness.put([b"bad", b"good"])
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    bad = messages_of(source, slice_)[0]
    source.confirm(A, [bad.failed()])
    harness.server.lose()
    source.connection = None
    harness.wait_for_retries()
    assert opened(source, B) == [b"bad"], "of the store, though the server delivers it again"
    assert harness.server.left == 0
    source.confirm(B)
    assert opened(source, C) == []


def test_an_id_that_comes_with_another_payload_is_refused_by_name(harness: ToyHarness) -> None:
    harness.server.ready.extend([("k", b"one"), ("k", b"one")])
    source = harness.view()
    assert opened(source, A) == [b"one"]
    harness.server.ready.append(("k", b"two"))
    with pytest.raises(UsageError, match="the id 'k' came with two different payloads"):
        source.open(B, ANY, 7)
    harness.server.ready.extend([("n", b"one"), ("n", b"two")])
    with pytest.raises(UsageError, match="the id 'n' came with two different payloads"):
        source.open(B, ANY, 7)


@pytest.mark.parametrize("id_", ["", "x" * 1_001, "a\0b", "\ud800"])
def test_an_id_that_is_none_is_refused(harness: ToyHarness, id_: str) -> None:
    harness.server.ready.append((id_, b"one"))
    with pytest.raises(UsageError, match="printable characters"):
        harness.view().open(A, ANY, 7)


def test_an_id_that_is_too_long_for_an_index_is_known_when_it_comes_again(harness: ToyHarness) -> None:
    rng = Random(1)
    long = ["".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(999)) for _ in range(2)]
    long.append(long[0][:-1] + "x")  # one that differs at its end alone
    source = harness.view()
    harness.server.ready.extend([(id_, b"%d" % n) for n, id_ in enumerate(long)])
    assert opened(source, A) == [b"0", b"1", b"2"]
    source.confirm(A)
    harness.server.ready.extend([(long[0], b"0"), (long[1], b"1"), (long[2], b"2")])
    assert opened(source, B) == []
    assert source.journal_counts() == JournalCounts(messages=3, owed=0, suppressed=3)
    harness.server.ready.append((long[1], b"other"))
    with pytest.raises(UsageError, match="came with two different payloads"):
        source.open(B, ANY, 7)


def test_a_name_that_is_too_long_for_an_index_is_refused_by_name_and_not_waited_for(database: Database) -> None:
    rng = Random(1)
    name = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(2_000))
    source = ToySource(name, ToyServer(), database=prepared_database(database))
    with pytest.raises(UsageError, match="a name is too long for the database"):
        source.subscribe("s", 1)
    source.close()


def test_an_older_epoch_receives_nothing(harness: ToyHarness) -> None:
    harness.put([b"a"])
    old = harness.view()
    harness.view(epoch=2)
    with pytest.raises(Fenced):
        old.open(A, ANY, 7)
    assert old.connection is None


def test_no_more_is_received_than_may_wait_unopened(harness: ToyHarness) -> None:
    harness.put([b"%d" % n for n in range(10)])
    source = ToySource(harness.name, harness.server, database=harness.database, prefetch=4)
    harness.views.append(source)
    source.subscribe("s", 1)
    assert opened(source, A, Limit(2)) == [b"0", b"1"]
    assert harness.server.deliveries == 4
    assert opened(source, B, Limit(9)) == [b"2", b"3", b"4", b"5"]
    assert harness.server.deliveries == 6


def test_within_the_horizon_a_message_is_known_and_after_it_a_new_one(harness: ToyHarness) -> None:
    clock = ManualClock(datetime.now(UTC))
    source = ToySource(harness.name, harness.server, database=harness.database, horizon_s=3_600, clock=clock)
    harness.views.append(source)
    source.subscribe("s", 1)

    def comes_again(hours: float) -> list[bytes]:
        harness.execute(
            f"update stormproof.pending_message set resolved_at = resolved_at - make_interval(secs => {hours * 3_600})"
            " where MINE"
        )
        clock.advance(60)
        source.maintain()
        harness.server.ready.append(("m1", b"a"))
        found = opened(source, Lease(f"after {hours}", 1))
        source.confirm(Lease(f"after {hours}", 1))
        return found

    harness.put([b"a", b"b"])
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)
    assert comes_again(0.5) == []
    assert comes_again(0.6) == [b"a"], "forgotten after 1.1 hours"
    assert harness.execute("select number from stormproof.pending_message where MINE order by 1") == [(1,), (2,)]


def test_what_stands_behind_an_unresolved_message_is_kept_until_that_is_resolved(harness: ToyHarness) -> None:
    clock = ManualClock(datetime.now(UTC))
    source = ToySource(harness.name, harness.server, database=harness.database, horizon_s=3_600, clock=clock)
    harness.views.append(source)
    source.subscribe("s", 1)
    harness.put([b"a", b"b", b"c"])
    assert opened(source, A, Limit(1)) == [b"a"]
    assert opened(source, B, Limit(2)) == [b"b", b"c"]
    source.confirm(B)

    def kept_after_two_hours() -> list[tuple[int, bool]]:
        harness.execute(
            "update stormproof.pending_message set resolved_at = resolved_at - make_interval(hours => 2) where MINE"
        )
        clock.advance(60)
        source.maintain()
        return harness.execute(
            "select number, payload is not null from stormproof.pending_message where MINE order by 1"
        )

    assert kept_after_two_hours() == [(0, True), (1, True), (2, True)]
    source.confirm(A)
    assert kept_after_two_hours() == [(2, False)], "the newest stays, without its payload"


DAYS_8: Final = timedelta(days=8)


@pytest.mark.parametrize(
    ("then", "later", "jump"),
    [
        pytest.param(-DAYS_8, -DAYS_8, -DAYS_8, id="the database jumps ahead"),
        pytest.param(DAYS_8, 0 * DAYS_8, -DAYS_8, id="the database was behind"),
        pytest.param(0 * DAYS_8, DAYS_8, 0 * DAYS_8, id="the driver is ahead"),
        pytest.param(-DAYS_8, 0 * DAYS_8, 0 * DAYS_8, id="the driver was behind"),
    ],
)
def test_a_message_is_known_whichever_of_two_clocks_is_wrong(
    harness: ToyHarness, then: timedelta, later: timedelta, jump: timedelta
) -> None:
    """`then` and `later` are the driver's clock beside the database's, when the message is resolved and when it comes again;
    `jump` is what the database's had wrong at first. The horizon is 7 days.
    """
    now = datetime.now(UTC)
    given: dict[str, Any] = {"database": harness.database}
    source = ToySource(harness.name, harness.server, clock=ManualClock(now + then), **given)
    harness.views.append(source)
    source.subscribe("s", 1)
    harness.put([b"a", b"b"])
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)
    seconds = jump.total_seconds()
    harness.execute(
        f"update stormproof.pending_message set resolved_at = resolved_at + make_interval(secs => {seconds}) where MINE"
    )
    after = ToySource(harness.name, harness.server, clock=ManualClock(now + later), **given)
    harness.views.append(after)
    after.subscribe("s", 2)
    after.maintain()
    harness.server.ready.append(("m1", b"a"))
    assert opened(after, Lease("b", 2)) == []


def test_a_clock_that_jumps_while_a_driver_runs_makes_no_message_old(harness: ToyHarness) -> None:
    """Where both clocks are one machine's; the database's jumps as what it wrote is moved back."""
    clock = Jumping(datetime.now(UTC) - DAYS_8)
    source = ToySource(harness.name, harness.server, database=harness.database, clock=clock)
    harness.views.append(source)
    source.subscribe("s", 1)
    harness.put([b"a", b"b"])
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)
    harness.execute("update stormproof.pending_message set resolved_at = resolved_at - interval '8 days' where MINE")
    clock.jumped = DAYS_8
    source.maintain()
    harness.server.ready.append(("m1", b"a"))
    assert opened(source, B) == []


class Jumping(ManualClock):
    jumped = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.jumped


# ---- drivers that die


class Killed(BaseException):
    """The driver's end, at a failpoint."""


AFTER_A_DEATH = {
    "journal.in_transaction": [b"a", b"b"],
    "journal.after_write": [b"a", b"b"],
    "journal.before_acknowledge": [],
    "journal.after_acknowledge": [],
}
"""What is left to open for the next driver, by where the one before died."""


@pytest.mark.parametrize("point", AFTER_A_DEATH)
def test_a_driver_that_dies_at_a_seam_of_the_journal_loses_and_doubles_nothing(harness: ToyHarness, point: str) -> None:
    def reached(name: str) -> None:
        if name == point:
            raise Killed

    harness.put([b"a", b"b"])
    source = harness.view()
    with pytest.raises(Killed), watched(reached):  # noqa: PT012 - the point is in one of them
        opened(source, A)
        source.confirm(A)
        source.maintain()
    harness.server.lose()
    after = harness.view(epoch=2)
    assert after.recover(2) == ()
    assert opened(after, Lease("b", 2)) == AFTER_A_DEATH[point]
    after.confirm(Lease("b", 2))
    after.maintain()
    assert sorted(harness.server.confirmed) == ["m1", "m2"]
    assert harness.server.left == 0
    # The server heard it, and the journal does not know: the server never says so.
    owed = 2 if point == "journal.after_acknowledge" else 0
    assert after.journal_counts().owed == owed


# ---- a topology, whose drivers die anywhere


def dying(server: ToyServer, rng: Random) -> Callable[[str], None]:
    """Ends the driver at some failpoint; sooner or later its connection to the server goes, too."""
    left = rng.randrange(40, 300)

    def reached(name: str) -> None:
        nonlocal left
        del name
        left -= 1
        if rng.random() < 0.01:
            server.redeliver_everything()
        if left == 0:
            server.lose()
            raise Killed

    return reached


class Reconnects(ToySource):
    """As clients do: a connection that is gone is made anew, and nobody is told."""

    def acknowledge(self, handles: Sequence[Handle]) -> None:
        try:
            super().acknowledge(handles)
        except StoreUnavailable:
            self.connection = None
            raise


def checked(line: str) -> list[str]:
    if line.startswith("bad"):
        raise ValueError(line)
    return [line]


def live(database: Database, server: ToyServer, folder: Path, rng: Random, kind: type[ToySource] = Reconnects) -> None:
    """Drivers one after the other, until one gets to the end; and one more, for what came again at that moment."""
    ended = False
    settings = Settings(
        database_url=database.adbc_uri, staging_dir=str(folder), batch_messages=5, poll_interval_s=0.001
    )
    for _ in range(60):
        source = kind(
            "toy",
            server,
            database=database,
            max_attempts=2,
            backoff_base_s=0.001,
            backoff_max_s=0.001,
            prefetch=rng.choice([3, 7, 100]),
            rng=rng,
        )
        topology = Topology("toy")
        words = topology.stream("lines", source).flat_map(checked, "line", schema="word string")
        words.into(PostgresSink("applied", database=database))
        with watched(dying(server, rng) if not ended else lambda name: None), suppress(Killed):
            topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)
            if ended:
                return
            ended = True
    raise AssertionError("no driver came to the end")


def applied(database: Database) -> Counter[str]:
    with connect(database, application_name="tests") as connection:
        return Counter(word for (word,) in connection.execute("select word from applied").fetchall())


@pytest.mark.parametrize("seed", range(2))
def test_exactly_once_while_drivers_die_and_the_server_redelivers_as_it_likes(
    database: Database, tmp_path: Path, seed: int
) -> None:
    prepared_database(database)
    rng = Random(seed)
    server = ToyServer(rng, reorders=True)
    payloads = [b"word %d" % n for n in range(40)] + [b"bad 1", b"bad 2"]
    rng.shuffle(payloads)
    server.put(payloads)
    live(database, server, tmp_path, rng)
    assert applied(database) == Counter(f"word {n}" for n in range(40))
    assert server.left == 0, "every message is confirmed, however often it came"
    assert verified("toy", database).clean
    with connect(database, application_name="tests") as connection:
        dead = connection.execute(
            "select convert_from(payload, 'utf8') from stormproof.dead_letter order by 1"
        ).fetchall()
        journal = connection.execute(
            "select count(*), count(*) filter (where owed), sum(suppressed) from stormproof.pending_message"
        ).fetchone()
    assert dead == [("bad 1",), ("bad 2",)]
    assert journal is not None
    assert journal[:2] == (42, 0)
    assert journal[2] > 0, "some came again after they were applied"
    engine = sa.create_engine(database.sqlalchemy_url)
    (seen,) = status(AuditLedger(engine)).topologies
    engine.dispose()
    assert seen.journal == JournalCounts(*journal)


# ---- negative controls: what each rule is for


class NoKeyJournal(Journal):
    """Takes whatever comes for new."""

    def _known(self, payloads: Mapping[str, bytes]) -> dict[str, int]:
        return {}


class NoKey(ToySource):
    def _journal(self, cursor: Any) -> Journal:
        return NoKeyJournal(cursor, self.subscriber, self.where)


def test_without_the_unique_key_a_message_is_opened_again_after_it_was_confirmed(harness: ToyHarness) -> None:
    harness.kind = NoKey
    harness.put([b"a"])
    source = harness.view()
    assert opened(source, A) == [b"a"]
    source.confirm(A)
    harness.server.lose()
    with pytest.raises(psycopg.errors.UniqueViolation):  # the database's own, where the look-up is not to be trusted
        harness.view().open(B, ANY, 7)
    harness.server.lose()
    harness.execute("alter table stormproof.pending_message drop constraint pending_message_stable_id")
    try:
        assert opened(harness.view(), B) == [b"a"]
    finally:
        harness.execute("delete from stormproof.pending_message where MINE")
        harness.execute(
            "alter table stormproof.pending_message add constraint pending_message_stable_id"
            " unique (subscription, stable_id)"
        )


class AcknowledgesWhatItReceives(ToySource):
    def receive(self, limit: int) -> Sequence[Delivery]:
        received = super().receive(limit)
        self.acknowledge([message.handle for message in received])
        return received


class DiesBeforeItWrites(ToySource):
    def _journal(self, cursor: Any) -> Journal:
        if self._arrived:
            raise Killed
        return super()._journal(cursor)

    _arrived = False

    def receive(self, limit: int) -> Sequence[Delivery]:
        received = super().receive(limit)
        self._arrived = bool(received)
        return received


class AcknowledgesAndDies(DiesBeforeItWrites, AcknowledgesWhatItReceives):
    pass


@pytest.mark.parametrize(
    ("kind", "found"), [(DiesBeforeItWrites, [b"a"]), (AcknowledgesAndDies, [])], ids=["right", "acknowledged first"]
)
def test_a_message_that_is_confirmed_before_it_is_written_down_is_lost(
    harness: ToyHarness, kind: type[ToySource], found: list[bytes]
) -> None:
    harness.put([b"a"])
    harness.kind = kind
    with pytest.raises(Killed):
        harness.view().open(A, ANY, 7)
    harness.server.lose()
    harness.kind = ToySource
    assert opened(harness.view(), B) == found


class IgnoresJournal(Journal):
    def write(self, received: Sequence[Delivery], *, owed: bool = True) -> list[int]:
        known = self._known({message.stable_id: message.payload for message in received})
        numbers = super().write([message for message in received if message.stable_id not in known], owed=owed)
        return [*numbers, *[-1] * (len(received) - len(numbers))]


class IgnoresWhatItKnows(ToySource):
    def _journal(self, cursor: Any) -> Journal:
        return IgnoresJournal(cursor, self.subscriber, self.where)


def test_a_server_gets_never_rid_of_a_message_that_is_ignored_when_it_comes_again(harness: ToyHarness) -> None:
    harness.kind = IgnoresWhatItKnows
    harness.put([b"a"])
    source = harness.view()
    assert opened(source, A) == [b"a"]
    source.confirm(A)
    for _ in range(5):
        harness.server.lose()
        source.connection = None
        assert opened(source, B) == []
        source.maintain()
    assert harness.server.left == 1


class WithoutIds(ToySource):
    """Messages of this source have no ids, as those of a RabbitMQ queue without ids."""

    capabilities = RABBITMQ_WITHOUT_ID


@pytest.mark.parametrize("guarantee", [Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_server_that_was_told_first_is_owed_nothing(harness: ToyHarness, guarantee: Guarantee) -> None:
    """Under at-least-once it is told after the confirm."""
    harness.kind = WithoutIds
    harness.put([b"a", b"b"])
    source = harness.view()
    source.begin(guarantee)
    assert opened(source, Lease("a", 1)) == [b"a", b"b"]
    assert harness.server.left == (0 if guarantee is Guarantee.AT_MOST_ONCE else 2)
    source.confirm(Lease("a", 1))
    assert source.journal_counts().owed == (0 if guarantee is Guarantee.AT_MOST_ONCE else 2)
    source.maintain()
    assert (source.journal_counts().owed, harness.server.left) == (0, 0)
