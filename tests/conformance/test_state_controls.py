"""Negative controls: maps and stores that break one promise each; the public suite must catch every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from support.state_suite import failing

from stormproof.sinks.contract.protocol import PreparedTransaction
from stormproof.trident.state.key_value import (
    CachedStore,
    KeyValueBacking,
    KeyValueStore,
    MemoryStore,
    OpaqueMap,
    TransactionalMap,
)
from stormproof.trident.state.map import StoredMap, make_map
from stormproof.trident.state.protocol import StateContext, StateFactory, StateKind


class DropsLast(MemoryStore):
    """Loses the last key of every call."""

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        super().multi_put(dict(list(items.items())[:-1]) if len(items) > 1 else items)


class Sorted(MemoryStore):
    """Answers in the order of the keys, not in the order asked."""

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return super().multi_get(sorted(keys))


class Stale(MemoryStore):
    """Each read gives what was there at the read before: a replica that lags behind."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[bytes, bytes] = {}

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found = [self.before.get(key) for key in keys]
        self.before = dict(self.items)
        return found


class FoldsCase(MemoryStore):
    """Cuts keys, so that two keys meet in one."""

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return super().multi_get([key[:4] for key in keys])

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        super().multi_put({key[:4]: value for key, value in items.items()})


class KeepsFirst(MemoryStore):
    """Never overwrites."""

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        for key, value in items.items():
            self.items.setdefault(key, value)


class SkipsByPosition(StoredMap):
    """Skips what the position says is held, and trusts no key: a txid that was cut short is written again whole."""

    def _same(self, held: pa.RecordBatch) -> pa.Array:
        return pa.array([False] * held.num_rows)


class SkipsLater(StoredMap):
    """Takes a number that is behind for one that is held."""

    def _refuse_later(self, keys: pa.RecordBatch, held: pa.RecordBatch) -> None:
        pass


class IgnoresLife(StoredMap):
    """Compares numbers of different lives."""

    def _mine(self, held: pa.RecordBatch) -> pa.Array:
        return pa.array([True] * held.num_rows)


class WritesEachUpdate(StoredMap):
    """Writes updates one by one: the second row of a key finds the txid there, and is skipped."""

    def multi_update(self, rows: pa.RecordBatch, *, each_once: bool = False) -> None:
        for row in range(rows.num_rows):
            super().multi_update(rows.slice(row, 1), each_once=True)


class PositionFirst(KeyValueBacking):
    """Says that a txid is held before its keys are there."""

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        super().begin(transaction, checked=checked)
        self.end()
        super().begin(transaction, checked=False)


class NoFence(KeyValueBacking):
    """Never looks whether a newer epoch is there."""

    @property
    def _epoch(self) -> int:
        return 1_000_000


def over(made: Callable[..., Any], kind: type[Any] = OpaqueMap) -> Callable[[], Callable[[], StateFactory]]:
    def fresh() -> Callable[[], StateFactory]:
        store = made()
        return lambda: kind(lambda: store, cache_keys=1)

    return fresh


def mapped(cls: type[StoredMap], kind: type[Any]) -> Callable[[], Callable[[], StateFactory]]:
    def make(context: StateContext, kind_: StateKind, store: KeyValueStore) -> StoredMap:
        return cls(context, kind_, KeyValueBacking(context, kind_, store, cache_keys=1_000))

    return broken(make, kind)


def backed(cls: type[KeyValueBacking], kind: type[Any]) -> Callable[[], Callable[[], StateFactory]]:
    def make(context: StateContext, kind_: StateKind, store: KeyValueStore) -> StoredMap:
        return make_map(context, kind_, cls(context, kind_, store, cache_keys=1_000))

    return broken(make, kind)


def broken(make: Callable[..., StoredMap], kind: type[Any]) -> Callable[[], Callable[[], StateFactory]]:
    def fresh() -> Callable[[], StateFactory]:
        store = MemoryStore()
        # A subclass, so that the suite's own way to cut a write short still finds `open_store`.
        made: Any = type("Made", (kind,), {"make": lambda self, context: make(context, self.kind, self.open_store())})
        return lambda: made(lambda: store)

    return fresh


CASES: list[tuple[str, Callable[[], Callable[[], StateFactory]], str]] = [
    ("a write is lost", over(DropsLast), "another_driver_finds_it"),
    ("answers in another order", over(Sorted), "values_come_back_by_key_in_the_order_asked"),
    ("stale reads", over(Stale), "it_says_its_last_txid"),
    ("keys that meet", over(FoldsCase), "values_come_back_by_key_in_the_order_asked"),
    ("never overwrites", over(KeepsFirst), "txids_are_merged_one_after_the_other"),
    ("keys are not compared", mapped(SkipsByPosition, TransactionalMap), "a_txid_cut_short_anywhere_comes_again"),
    ("keys are not compared, opaque", mapped(SkipsByPosition, OpaqueMap), "a_txid_cut_short_anywhere_comes_again"),
    ("behind is not refused", mapped(SkipsLater, OpaqueMap), "a_txid_that_is_behind_is_refused"),
    ("lives are not told apart", mapped(IgnoresLife, TransactionalMap), "numbers_of_another_life_say_nothing"),
    ("each row is written", mapped(WritesEachUpdate, TransactionalMap), "a_key_may_come_several_times_in_a_txid"),
    ("the position comes first", backed(PositionFirst, TransactionalMap), "it_says_its_last_txid"),
    ("no fence", backed(NoFence, OpaqueMap), "an_older_epoch_is_fenced_out"),
]


def test_a_sound_store_passes() -> None:
    assert failing(over(MemoryStore), picklable=False) == set()
    assert failing(over(MemoryStore, TransactionalMap), picklable=False) == set()


@pytest.mark.parametrize(("fresh", "case"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_suite_catches(fresh: Callable[[], Callable[[], StateFactory]], case: str) -> None:
    assert any(name.startswith(case) for name in failing(fresh, picklable=False))


def test_a_cache_that_is_filled_before_the_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trident's own: the write fails, the map finds the txid in the cache, and the store never gets the value."""

    def cache_first(self: Any, items: Mapping[bytes, bytes]) -> None:
        self._cache.update(items)
        self._store.multi_put(items)

    monkeypatch.setattr(CachedStore, "multi_put", cache_first)

    def cached() -> Callable[[], StateFactory]:
        store = MemoryStore()
        return lambda: TransactionalMap(lambda: store)

    assert "a_txid_cut_short_anywhere_comes_again_and_counts_once" in failing(cached, picklable=False)
