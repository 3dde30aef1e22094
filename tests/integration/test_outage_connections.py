"""One outage makes every connection of a driver stale: all are dropped at once, and the driver goes on at its next try."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from support.databases import create_database
from support.proxy import Proxy
from support.queues import prepared_database, put

from stormproof import FileSource, PostgresMap, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.base.failpoint import watched
from stormproof.core.contract.source import Source
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver
from stormproof.trident.driver.steps import Steps

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

ROWS, COUNTS, MAPS = 10, 2, 2
"""So many sinks of each kind: fourteen sessions, each with a connection of its own."""

LINES = [f"a w{i}".encode() for i in range(12)]
TRIES_MAX = 2
"""One for the connection that was in use, one where another thread's (a lease's) failed beside it."""

_numbers = itertools.count(1)


@pytest.fixture
def own(server: EmbeddedPostgres) -> Database:
    """A database of the test's own, on a server that it may restart."""
    return prepared_database(create_database(server.database, f"outage_{next(_numbers)}"))


def topology(source: Source, database: Database, share: int) -> Topology:
    """Rows to tables, counts to tables, and states; of each kind one in `share`."""
    t = Topology("outage")
    words = t.stream("lines", source).flat_map(str.split, "line", schema="word string")
    words.into(*(PostgresSink(f"rows{i}", database=database) for i in range(0, ROWS, share)))
    counts = words.group_by("word").persistent_aggregate(n=count())
    counts.into(*(PostgresSink(f"counts{i}", database=database) for i in range(0, COUNTS, share)))
    for i in range(0, MAPS, share):
        words.group_by("word").persistent_aggregate(
            name=f"fold{i}",
            state=PostgresMap(f"map{i}", "transactional", database=database),
            state_name=f"map{i}",
            n=count(),
        )
    return t


class Run:
    """One driver in this process, whose clock takes no time; `strike` is called the first time that it comes to a place."""

    def __init__(
        self, source: Source, database: Database, folder: Path, clock: ManualClock | None = None, *, share: int = ROWS
    ) -> None:
        self.clock = clock or ManualClock()
        self._share = share
        self._source, self._database, self._folder = source, database, folder

    def until_idle(self, point: str, strike: Callable[[], object], *, at: int = 3) -> None:
        reached = Counter[str]()

        def strike_once(name: str) -> None:
            reached[name] += 1
            if name == point and reached[name] == at:
                strike()

        settings = Settings(
            database_url=self._database.sqlalchemy_url.render_as_string(hide_password=False),
            home=self._folder / "home",
            batch_messages=4,
        )
        with (
            watched(strike_once),
            driver(
                topology(self._source, self._database, self._share),
                settings=settings,
                engine="inline",
                until_idle=True,
                clock=self.clock,
                rng=random.Random(1),
            ) as coordinator,
        ):
            coordinator.run()
        assert reached[point] >= at


def tries(caplog: pytest.LogCaptureFixture) -> int:
    """How many tries failed."""
    return sum("failed, recovering" in record.message for record in caplog.records)


def require_exact(database: Database) -> None:
    """Every word once in each table, and counted once in each count."""
    with connect(database, application_name="tests", autocommit=True) as connection:
        tables = [
            name
            for (name,) in connection.execute(
                "select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
            )
        ]
        for table in tables:
            what = "count(*)" if table.startswith("rows") else "sum(n)"
            (found,) = connection.execute(f"select {what} from {table}".encode()).fetchone() or (0,)
            assert found == 2 * len(LINES), table
    assert len(tables) >= 3


def queue(database: Database) -> PostgresQueue:
    put(database, "q", LINES)
    return PostgresQueue("q", schema="line string", database=database)


def terminate_all(server: EmbeddedPostgres, database: Database) -> None:
    """End every connection to the database."""
    with connect(server.database, application_name="tests", autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
            (dict(database.parameters)["dbname"],),
        )


@pytest.mark.parametrize("point", ["prepare.before", "commit.after_sink"])
def test_a_restart_of_postgres_costs_fourteen_sinks_one_try(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(queue(own), own, tmp_path, share=1)
    run.until_idle(point, lambda: server.restart(immediate=True), at=2)
    assert 1 <= tries(caplog) <= TRIES_MAX
    assert run.clock.monotonic_s() < 1  # all that it waited for: 57 s, where each connection is found out by itself
    require_exact(own)


def test_a_restart_costs_a_topology_over_files_one_try(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lines.txt").write_bytes(b"\n".join(LINES))
    source = FileSource(tmp_path / "lines.txt", "text", schema="line string", name="lines", database=own)
    Run(source, own, tmp_path).until_idle("commit.after_sink", lambda: server.restart(immediate=True))
    assert 1 <= tries(caplog) <= TRIES_MAX
    require_exact(own)


def test_control_connections_that_are_kept_cost_a_try_each(
    server: EmbeddedPostgres,
    own: Database,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Steps, "drop_connections", lambda _self: None)
    Run(queue(own), own, tmp_path, share=1).until_idle("commit.after_sink", server.restart)
    assert tries(caplog) > (ROWS + COUNTS + MAPS) / 2
    require_exact(own)


def test_every_backend_is_terminated(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(queue(own), own, tmp_path).until_idle("finish.in_transaction", lambda: terminate_all(server, own), at=2)
    assert 1 <= tries(caplog) <= TRIES_MAX
    require_exact(own)


class Healing(ManualClock):
    """What is broken heals while the driver waits for the n-th time."""

    def __init__(self, heal: Callable[[], None], *, at: int = 4) -> None:
        super().__init__()
        self._heal, self._left = heal, at

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._left -= 1
        if self._left == 0:
            self._heal()


def require_outlasted(
    run: Run, strike: Callable[[], None], caplog: pytest.LogCaptureFixture, database: Database, said: str
) -> None:
    run.until_idle("commit.before_sink", strike)
    failed = [record.message for record in caplog.records if "failed, recovering" in record.message]
    assert len(failed) == 4
    assert said in failed[-1]
    require_exact(database)


def test_a_database_that_is_read_only_for_a_while(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a fail-over: a standby that is not promoted yet answers, and refuses every write."""

    def set_(value: str) -> None:
        with connect(server.database, application_name="tests", autocommit=True) as connection:
            name = dict(own.parameters)["dbname"]
            connection.execute(f"alter database {name} set default_transaction_read_only = {value}".encode())
        terminate_all(server, own)

    run = Run(queue(own), own, tmp_path, Healing(lambda: set_("off")))
    require_outlasted(run, lambda: set_("on"), caplog, own, "the server takes no writes")


def test_a_server_that_accepts_and_then_closes(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(own) as proxy:

        def hang_up(hangs_up: bool) -> None:
            proxy.hangs_up = hangs_up
            terminate_all(server, own)

        source = queue(proxy.database)
        run = Run(source, proxy.database, tmp_path, Healing(lambda: hang_up(False)))
        require_outlasted(run, lambda: hang_up(True), caplog, own, "closed the connection")


def test_the_limit_of_connections_is_reached(
    server: EmbeddedPostgres, own: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as taken:

        def take_all() -> None:
            terminate_all(server, own)
            with suppress(StoreUnavailable):
                while True:
                    taken.enter_context(closing(connect(server.database, application_name="tests")))

        run = Run(queue(own), own, tmp_path, Healing(taken.close))
        require_outlasted(run, take_all, caplog, own, "too many clients")
