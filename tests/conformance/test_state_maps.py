"""What every map promises, asked of each: in memory, over a store of files, in Postgres and in Delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from stormproof.core.base.errors import PositionMismatch, SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import PreparedTransaction
from stormproof.testing import MapStateConformance
from stormproof.testing.states import A, B, batch, folded
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.key_value import MemoryMap, MemoryStore, NonTransactionalMap, OpaqueMap, TransactionalMap
from stormproof.trident.state.map import StoredMap
from stormproof.trident.state.postgres import PostgresMap
from stormproof.trident.state.protocol import StateFactory, StateKind

KEY_VALUE = {
    "non-transactional": NonTransactionalMap,
    "transactional": TransactionalMap,
    "opaque": OpaqueMap,
}
Make = Callable[[], StateFactory]


class TestKeyValueMap(MapStateConformance):
    """Without a cache worth the name, so that every key is evicted, and with one."""

    picklable = False

    @pytest.fixture(autouse=True, params=list(KEY_VALUE))
    def kind(self, request: pytest.FixtureRequest) -> None:
        self.made = KEY_VALUE[request.param]
        self.store = MemoryStore()

    @pytest.fixture(autouse=True, params=[1, 1_000], ids=["small-cache", "cache"])
    def cache(self, request: pytest.FixtureRequest) -> None:
        self.cache_keys: int = request.param

    def make(self) -> StateFactory:
        return self.made(lambda: self.store, cache_keys=self.cache_keys)


class TestMemoryMap(MapStateConformance):
    picklable = False

    @pytest.fixture(autouse=True, params=list(StateKind))
    def fresh(self, request: pytest.FixtureRequest) -> None:
        self.map = MemoryMap(request.param)

    def make(self) -> StateFactory:
        return self.map


@pytest.mark.postgres
class TestPostgresMap(MapStateConformance):
    writes_max = 3

    @pytest.fixture(autouse=True, params=["transactional", "opaque"])
    def fresh(self, request: pytest.FixtureRequest, database: Database) -> None:
        self.made = partial(PostgresMap, 'public."100%s ""To.tals"', request.param, database=database)

    def make(self) -> StateFactory:
        return self.made()

    def test_a_connection_that_is_lost_within_a_txid_takes_all_of_it(self) -> None:
        """Its rows were undone with it: on a new connection the guard would be moved without them."""
        with self._open() as state:
            self._commit(state, 1, A)
            state.begin_commit(2)
            state.multi_update(batch(B), each_once=True)
            vars(vars(state)["_backing"])["_table"].link.connection().close()
            with pytest.raises(StoreUnavailable):
                state.commit(2)
        with self._open() as state:
            self._require(state, folded(A))
            self._commit(state, 2, B)
            self._require(state, folded(A, B))

    def test_a_table_that_takes_the_name_within_a_txid_gets_no_row(self, database: Database) -> None:
        with self._open() as state, psycopg.connect(database.conninfo, autocommit=True) as other:
            self._commit(state, 1, A)
            state.begin_commit(2)
            other.execute("set lock_timeout = '1s'")
            try:
                other.execute(r'alter table public."100%s ""To.tals" rename to before')
            except psycopg.errors.LockNotAvailable:
                # The txid has read the table, and its lock keeps others from the name until it ends.
                state.multi_update(batch(B), each_once=True)
                state.commit(2)
                self._require(state, folded(A, B))
                return
            other.execute(r'create table public."100%s ""To.tals" (like before including all)')
            state.multi_update(batch(B), each_once=True)
            with pytest.raises(SinkRefused, match="took the name"):
                state.commit(2)
            assert other.execute(r'select count(*) from public."100%s ""To.tals"').fetchall() == [(0,)]
            assert other.execute("select count(*) from before").fetchall() == [(len(folded(A)),)]

    def test_a_txid_that_is_refused_at_its_begin_leaves_no_transaction(self, database: Database) -> None:
        with self._open() as state:
            self._commit(state, 2, A)
            assert isinstance(state, StoredMap)
            state.announce(PreparedTransaction(9, 8, "digest", 0, ()), checked=True)
            with pytest.raises(PositionMismatch):
                state.begin_commit(9)
            with psycopg.connect(database.conninfo) as other:
                left = "select application_name from pg_stat_activity where state = 'idle in transaction'"
                assert other.execute(left).fetchall() == []


class TestDeltaMap(MapStateConformance):
    writes_max = 2

    @pytest.fixture(autouse=True, params=["transactional", "opaque"])
    def fresh(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.made = partial(DeltaMap, tmp_path / "lake" / "totals", request.param)

    def make(self) -> StateFactory:
        return self.made()


def test_a_map_with_a_transaction_is_never_non_transactional() -> None:
    with pytest.raises(TopologyError, match="opaque"):
        PostgresMap("totals", "non-transactional")
    with pytest.raises(TopologyError, match="opaque"):
        DeltaMap("totals", "non-transactional")
