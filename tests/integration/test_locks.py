"""A session that holds a lock and does not let go: nobody waits for it for ever."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from support.queues import prepared_database, put
from support.topologies import SinkMode, topology

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.base.message import Guarantee
from stormproof.core.graph.plan import compile_topology
from stormproof.core.postgres.database import Database
from stormproof.trident.driver.opening import attached
from stormproof.trident.driver.recovery import recover
from stormproof.trident.driver.steps import Steps
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.ledger.ledger import Ledger

pytestmark = pytest.mark.postgres


def test_recovery_names_a_lock_that_somebody_keeps(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    put(database, "q", [b"a b"])
    built = topology("locked", SinkMode.DELTA_FOLD, tmp_path, database, "q")
    plan = compile_topology(built, Guarantee.EXACTLY_ONCE)
    engine = ledger_engine(database, lock_timeout_s=0.2)
    ledger = Ledger(engine, SystemClock(), lambda: "life")
    with attached(plan, built.source, ledger) as (run, sessions), psycopg.connect(database.conninfo) as other:
        steps = Steps(ledger, run, built.source, sessions, lease_s=30)
        other.execute("select from stormproof.pending_subscription for update")
        with pytest.raises(StoreUnavailable):
            recover(steps, sweep=False, ended=lambda _: None)
        other.rollback()
        recover(steps, sweep=False, ended=lambda _: None)
    engine.dispose()
