"""Where executors are on other machines, a Postgres that they cannot reach is refused by name before anything starts."""

from __future__ import annotations

import pytest

from stormproof import MemorySource, PostgresQueue
from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import SettingsError
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.heartbeat.listener import LOOPBACK, DriverAddress
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import heartbeat_listener, require_reachable

HERE = Database.from_url("postgresql://me@localhost/here", setting="x")
NAMED = Settings(database_url="postgresql://me@db/there")


class Elsewhere(InlineEngine):
    """An engine whose tasks reach the driver at an address."""

    def __init__(self, address: DriverAddress | None) -> None:
        super().__init__()
        self._address = address

    @property
    def driver_address(self) -> DriverAddress | None:
        return self._address


CLUSTER = Elsewhere(DriverAddress("127.0.0.1", "127.0.0.1"))
BESIDE = Elsewhere(DriverAddress("127.0.0.1", "127.0.0.1", same_machine=True))


def test_a_queue_in_the_embedded_postgres_is_refused_where_tasks_are_on_other_machines() -> None:
    queue = PostgresQueue("words").for_run(HERE)
    with pytest.raises(
        SettingsError, match=r"queue 'words' is the embedded Postgres.*STORMPROOF_DATABASE_URL=postgresql:"
    ):
        require_reachable(HERE, queue, CLUSTER, Settings())


def test_what_reaches_it_or_does_not_need_it_is_not_refused() -> None:
    queue, elsewhere = PostgresQueue("words").for_run(HERE), Database.from_url("postgresql://me@db/there", setting="x")
    require_reachable(HERE, queue, CLUSTER, NAMED)
    require_reachable(HERE, queue, BESIDE, Settings())
    require_reachable(HERE, queue, Elsewhere(None), Settings())
    require_reachable(HERE, MemorySource("lines", []), CLUSTER, Settings())
    require_reachable(HERE, PostgresQueue("words", database=elsewhere).for_run(HERE), CLUSTER, Settings())


@pytest.mark.parametrize(("engine", "listens_at"), [(CLUSTER, CLUSTER.driver_address), (Elsewhere(None), LOOPBACK)])
def test_tasks_report_to_where_they_reach_the_driver(engine: Elsewhere, listens_at: DriverAddress) -> None:
    with heartbeat_listener(engine, Settings(), RunOptions(), SystemClock()) as listener, listener.job() as heard:
        assert heard.place.host == listens_at.host
