"""The suite that every map state must pass: subclass `MapStateConformance` for a store of your own.

    class TestMyStore(MapStateConformance):
        @pytest.fixture(autouse=True)
        def fresh_store(self, tmp_path: Path) -> None:
            self.path = tmp_path / "store"

        def make(self) -> StateFactory:
            return OpaqueMap(partial(MyStore, self.path))

Each case states one promise. A store that breaks one loses or doubles values after a crash.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
import pytest

from stormproof.core.base.errors import Fenced, PositionMismatch, SinkRefused, StoreUnavailable, UsageError
from stormproof.sinks.contract.protocol import Held, PreparedTransaction, SinkIdentity
from stormproof.trident.state.key_value import POSITION_KEY, KeyValueMap, KeyValueStore, OpenStore
from stormproof.trident.state.map import maximum, minimum, total
from stormproof.trident.state.matrix import SupportsEvidence, SupportsLastTxid
from stormproof.trident.state.protocol import MapState, StateContext, StateFactory, StateKind

M = TypeVar("M", bound=KeyValueMap)

SCHEMA = pa.schema(
    [
        pa.field("word", pa.string()),
        pa.field("day", pa.int64()),
        pa.field("n", pa.int64()),
        pa.field("low", pa.float64()),
        pa.field("high", pa.string()),
    ]
)
KEYS = ("word", "day")
Row = tuple[str, int, int | None, float | None, str | None]
Value = tuple[int | None, float | None, str | None]
NOTHING: Value = (None, None, None)

A: list[Row] = [("a", 1, 2, 0.5, "x"), ("b", 1, 3, -1.0, "é"), ("a", 2, 7, 9.0, "")]
B: list[Row] = [("b", 1, 4, 0.0, "z"), ("c", 1, 1, 1.5, "y"), ("a", 1, -5, -7.25, "w")]


def context(topology: str = "topology", incarnation: str = "life1", epoch: int = 1) -> StateContext:
    """The context in which the suite makes maps: two key columns; a sum, a minimum and a maximum."""
    return StateContext(
        SinkIdentity(topology, incarnation, "totals"),
        SCHEMA,
        KEYS,
        {"n": total, "low": minimum, "high": maximum},
        epoch=epoch,
        create=True,
    )


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a record batch."""
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, f.type) for column, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def folded(*batches: Sequence[Row]) -> dict[tuple[str, int], Value]:
    """The values by definition, computed row by row: what the map is compared with."""
    held: dict[tuple[str, int], Value] = {}
    for word, day, n, low, high in (row for rows in batches for row in rows):
        n_, low_, high_ = held.get((word, day), NOTHING)
        held[word, day] = (
            n_ if n is None else n + (n_ or 0),
            min((v for v in (low, low_) if v is not None), default=None),
            max((v for v in (high, high_) if v is not None), default=None),
        )
    return held


class Interrupted(BaseException):
    """Stands for the end of the driver's process."""


class DyingStore:
    """A store that raises `error` once, after `writes` keys: there its driver ends, or its connection is lost."""

    def __init__(self, store: KeyValueStore, writes: int, error: BaseException) -> None:
        self._store = store
        self._writes = writes
        self._error: BaseException | None = error
        self._begun = False

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The store's own."""
        return self._store.multi_get(keys)

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """Write key by key, until the error is due."""
        for key, value in items.items():
            self._begun = self._begun or key != POSITION_KEY  # opening a map writes its position: no key of a txid
            if self._begun and self._writes == 0 and self._error is not None:
                error, self._error = self._error, None
                raise error
            self._writes -= self._begun
            self._store.multi_put({key: value})

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class MapStateConformance(ABC):
    """What every map promises, whatever it is stored in.

    `fences` is off for a store that cannot refuse an older epoch, `picklable` for one that stays in one process. The suite
    interrupts a txid after 0 to `writes_max` - 1 writes: a key-value map between two keys, any other map before its
    `commit`, unless `interrupted` offers more.
    """

    fences: bool = True
    picklable: bool = True
    writes_max: int = 5

    @abstractmethod
    def make(self) -> StateFactory:
        """A factory over the case's store, which is fresh; every call within a case must give the same store."""

    def interrupted(self, factory: StateFactory, writes: int, error: BaseException) -> StateFactory | None:
        """The factory, with `error` raised once after `writes` keys of a txid; None where that cannot be done."""
        if isinstance(factory, KeyValueMap):
            return _with_store(factory, _Dying(factory.open_store, writes, error))
        return None

    # -- values ------------------------------------------------------------------------------------------------------

    def test_what_was_never_written_is_nothing(self) -> None:
        """A key that was never written has NULL for every value."""
        with self._open() as state:
            assert self._values(state, [("nobody", 1), ("", 0)]) == [NOTHING, NOTHING]

    def test_values_come_back_by_key_in_the_order_asked(self) -> None:
        """`multi_get` answers in the order of the keys, also where one comes twice or is unknown."""
        with self._open() as state:
            self._commit(state, 1, A)
            asked = [("a", 2), ("nobody", 1), ("b", 1), ("a", 1), ("a", 2)]
            assert self._values(state, asked) == [folded(A).get(key, NOTHING) for key in asked]

    def test_txids_are_merged_one_after_the_other(self) -> None:
        """Txids are merged in their order; gaps between them mean nothing, and a txid may be empty."""
        with self._open() as state:
            for txid, rows in ((1, A), (2, B), (5, A), (6, [])):
                self._commit(state, txid, rows)
            self._require(state, folded(A, B, A))

    def test_a_txid_may_be_committed_on_another_thread(self) -> None:
        """One thread opens the state, another one commits a txid: so it is with several batches in flight."""
        with self._open() as state, ThreadPoolExecutor(1) as other:
            other.submit(self._commit, state, 1, A).result()
            self._commit(state, 2, B)
            self._require(state, folded(A, B))

    def test_a_key_may_come_several_times_in_a_txid(self) -> None:
        """Rows of one key in one txid are merged with each other."""
        with self._open() as state:
            self._commit(state, 1, A)
            state.begin_commit(2)
            for rows in (A, B, [], A + B):
                state.multi_update(batch(rows))
            state.commit(2)
            self._require(state, folded(A, A, B, A, B))

    def test_rows_whose_keys_come_once_may_be_written_at_once(self) -> None:
        """With `each_once` a map may write rows before the commit."""
        with self._open() as state:
            state.begin_commit(1)
            for row in A:
                state.multi_update(batch([row]), each_once=True)
            state.commit(1)
            self._require(state, folded(A))

    def test_a_txid_sees_its_own_writes(self) -> None:
        """What a txid put, or updated, is seen by its `multi_get` in every later call, also where the txid comes again."""
        with self._open() as state:
            self._commit(state, 1, A)
            held = folded(A)
            for _ in range(2):  # an updater that reads and puts, cut into calls, and interrupted before its commit
                state.begin_commit(2)
                for _ in range(3):
                    keys = [("c", 9), ("a", 1), ("b", 1)]
                    seen = [n or 0 for n, _, _ in self._values(state, keys)]
                    state.multi_put(batch([(*key, n + 10, 0.0, "x") for key, n in zip(keys, seen, strict=True)]))
            state.commit(2)
            held |= {("c", 9): (30, 0.0, "x"), ("a", 1): (32, 0.0, "x"), ("b", 1): (33, 0.0, "x")}
            self._require(state, held)
            state.begin_commit(3)
            for n in (4, 5):
                state.multi_update(batch([("a", 1, n, None, None)]))
                assert self._values(state, [("a", 1)])[0][0] == 32 + (4 if n == 4 else 9)
            state.commit(3)
            assert self._values(state, [("a", 1)])[0][0] == 41

    def test_nulls_add_nothing(self) -> None:
        """A NULL changes no value, and a value that was NULL takes the first that is not."""
        with self._open() as state:
            self._commit(state, 1, [("a", 1, 4, None, "x"), ("b", 1, None, None, None)])
            self._commit(state, 2, [("a", 1, None, 2.5, None), ("b", 1, 1, None, None)])
            self._require(state, {("a", 1): (4, 2.5, "x"), ("b", 1): (1, None, None)})

    def test_extreme_values_come_back_as_they_are(self) -> None:
        """The smallest and largest values of the types, and any text, are stored exactly."""
        rows: list[Row] = [
            ('\U0001f300 \u00e9 "quoted" \\ \n', -(2**63), 2**63 - 1, 5e-324, "\u2028"),
            ("", 2**63 - 1, -(2**63), float("-inf"), ""),
        ]
        with self._open() as state:
            self._commit(state, 1, rows)
            self._require(state, folded(rows))

    def test_a_sum_that_does_not_fit_is_refused(self) -> None:
        """A sum beyond 64 bits is refused by the name of its column; it does not wrap, and nothing of it is stored."""
        with self._open() as state:
            self._commit(state, 1, [("a", 1, 2**63 - 1, 1.0, "x")])
            with pytest.raises(SinkRefused, match="'n'"):
                self._commit(state, 2, [("a", 1, 1, 1.0, "x")])
        with self._open() as state:
            self._require(state, {("a", 1): (2**63 - 1, 1.0, "x")})

    def test_a_null_key_is_refused(self) -> None:
        """A row whose key is NULL is refused by the name of the key's column."""
        with self._open() as state, pytest.raises(SinkRefused, match="'word'"):
            self._commit(state, 1, [cast("Row", (None, 1, 1, 1.0, "x"))])

    def test_many_keys(self) -> None:
        """A txid may have more keys than one call to a store takes."""
        rows: list[Row] = [(f"w{i}", i % 3, i, i / 2, str(i)) for i in range(2_500)]
        with self._open() as state:
            self._commit(state, 1, rows)
            self._commit(state, 2, rows[::2])
            self._require(state, folded(rows, rows[::2]))

    def test_put_sets_values(self) -> None:
        """`multi_put` replaces values; of several rows of one key the last one counts, and a repetition changes nothing."""
        with self._open() as state:
            self._commit(state, 1, A)
            for _ in range(2):
                state.begin_commit(2)
                state.multi_put(batch(B))
                state.multi_put(batch([("c", 1, 9, 9.0, "last")]))
                state.commit(2)
            self._require(state, {**folded(A), **folded(B), ("c", 1): (9, 9.0, "last")})

    def test_rows_whose_arrays_are_filled_again_were_taken_before(self) -> None:
        """An updater may fill one NumPy array again in each of its calls."""
        n, at = np.zeros(1, np.int64), SCHEMA.get_field_index("n")
        with self._open() as state:
            state.begin_commit(1)
            for n[0], word in enumerate("ab"):
                rows = batch([(word, 1, 0, 0.0, "x")])
                state.multi_put(rows.set_column(at, SCHEMA.field(at), pa.array(n)))
            state.commit(1)
            self._require(state, {("a", 1): (0, 0.0, "x"), ("b", 1): (1, 0.0, "x")})

    # -- drivers that come and go ------------------------------------------------------------------------------------

    def test_another_driver_finds_it(self) -> None:
        """The next driver finds every value, and goes on."""
        with self._open() as state:
            self._commit(state, 1, A)
        with self._open(epoch=2) as state:
            self._require(state, folded(A))
            self._commit(state, 2, B)
            self._require(state, folded(A, B))

    def test_a_reader_finds_it_and_cannot_write(self) -> None:
        """A reader sees what is committed while a driver goes on, and cannot write."""
        with self._open() as state:
            self._commit(state, 1, A)
            with closing(self._made(self.make(), context().reading())) as reader:
                self._require(reader, folded(A))
                self._commit(state, 2, B)
            with closing(self._made(self.make(), context().reading())) as reader:
                self._require(reader, folded(A, B))
                with pytest.raises(UsageError):
                    reader.begin_commit(3)

    def test_the_factory_can_be_sent_to_an_executor(self) -> None:
        """A pickled factory opens the same store elsewhere."""
        if not self.picklable:
            pytest.skip("it stays in one process")
        with self._open() as state:
            self._commit(state, 1, A)
        sent: StateFactory = pickle.loads(pickle.dumps(self.make()))  # noqa: S301 - just made
        with closing(self._made(sent, context().reading())) as reader:
            self._require(reader, folded(A))

    def test_a_committed_txid_that_comes_again_changes_nothing(self) -> None:
        """A txid that was committed may be committed again, by the same driver or the next one, without effect."""
        self._skip_non_transactional()
        with self._open() as state:
            self._commit(state, 1, A)
            self._commit(state, 2, B)
            self._commit(state, 2, B)
        with self._open(epoch=2) as state:
            self._commit(state, 2, B)
            self._require(state, folded(A, B))
            self._commit(state, 3, B)
            self._require(state, folded(A, B, B))

    @pytest.mark.parametrize("same_driver", [False, True], ids=["new-driver", "same-driver"])
    def test_a_txid_cut_short_anywhere_comes_again_and_counts_once(self, same_driver: bool) -> None:
        """Wherever a txid is interrupted, its repetition counts its rows once."""
        self._skip_non_transactional()
        with self._open() as state:
            self._commit(state, 1, A)
        rows, truth = A + B, folded(A)
        for writes in range(self.writes_max):
            txid = 2 + writes
            truth = folded(*[A] * (2 + writes), *[B] * (1 + writes))
            with self._cut_short(txid, rows, writes, same_driver=same_driver) as state:
                self._commit(state, txid, rows)
                self._require(state, truth)
        with self._open(epoch=90) as state:
            self._require(state, truth)

    def test_opaque_takes_other_values_for_the_same_txid(self) -> None:
        """The rows of a repeated txid replace those of its first attempt, also where they are others."""
        if self.make().kind is not StateKind.OPAQUE:
            pytest.skip("only opaque maps take other rows")
        other: list[Row] = [(word, day, 100, -50.0, "zz") for word, day, *_ in B]
        with self._open() as state:
            self._commit(state, 1, A)
            self._commit(state, 2, B)
        with self._open(epoch=2) as state:
            self._commit(state, 2, other)
            self._require(state, folded(A, other))
            self._commit(state, 3, B)
            self._require(state, folded(A, other, B))

    def test_a_txid_that_is_behind_is_refused(self) -> None:
        """A txid below the last one is refused: it comes of a driver that was suspended, or of a restored ledger."""
        self._skip_non_transactional()
        with self._open() as state:
            self._commit(state, 1, A)
            self._commit(state, 3, B)
            with pytest.raises(PositionMismatch, match="txid 3"):
                self._commit(state, 2, B)
        with self._open() as state:
            self._require(state, folded(A, B))

    def test_numbers_of_another_life_say_nothing(self) -> None:
        """Another incarnation begins at txid 1 again, and its txids are new ones."""
        self._skip_non_transactional()
        with self._open() as state:
            self._commit(state, 1, A)
            self._commit(state, 2, A)
        with closing(self._made(self.make(), context(incarnation="life2"))) as state:
            assert not isinstance(state, SupportsEvidence) or state.held() is None
            self._commit(state, 1, A)
            self._commit(state, 2, B)
            self._require(state, folded(A, A, A, B))

    # -- what it remembers -------------------------------------------------------------------------------------------

    def test_it_says_its_last_txid(self) -> None:
        """`last_txid` is that of the last commit; a txid that was only begun does not count."""
        with self._open() as state:
            if not isinstance(state, SupportsLastTxid):
                pytest.skip("it remembers no txid")
            assert state.last_txid() is None
            self._commit(state, 3, A)
            assert state.last_txid() == 3
            state.begin_commit(4)
            state.multi_update(batch(B))
            assert state.last_txid() == 3
            state.commit(4)
        with self._open(epoch=2) as state:
            assert isinstance(state, SupportsLastTxid)
            assert state.last_txid() == 4

    def test_it_remembers_digest_and_rows(self) -> None:
        """A state with evidence has digest and rows of its last transaction, and perhaps of earlier ones."""
        with self._open() as state:
            if not isinstance(state, SupportsEvidence):
                pytest.skip("it remembers no transaction")
            for txid, previous in ((1, None), (4, 1)):
                state.announce(PreparedTransaction(txid, previous, f"digest {txid}", len(A), ()), checked=True)
                self._commit(state, txid, A)
            assert state.held() == Held(4, "digest 4")
            report = state.evidence(0, None)
            assert report.last_txid == 4
            assert (report.entries[-1].txid, report.entries[-1].digest, report.entries[-1].rows) == (4, "digest 4", 3)
            assert report.truncated or [entry.txid for entry in report.entries] == [1, 4]
            assert state.evidence(5, None).entries == ()
            assert state.other_incarnations() == ()

    def test_another_life_is_seen(self) -> None:
        """A new incarnation sees the one before it, already before it writes."""
        with self._open() as state:
            if not isinstance(state, SupportsEvidence):
                pytest.skip("it remembers no transaction")
            self._commit(state, 1, A)
        with closing(self._made(self.make(), context(incarnation="life2"))) as state:
            assert isinstance(state, SupportsEvidence)
            assert state.other_incarnations() == ("life1",)

    def test_another_topologys_map_is_refused(self) -> None:
        """A map that another topology writes is refused: one map has one writer."""
        with self._open() as state:
            if not isinstance(state, SupportsEvidence):
                pytest.skip("it remembers no owner")
            self._commit(state, 1, A)
        with pytest.raises(SinkRefused, match="one writer"):
            self._made(self.make(), context("another"))

    def test_an_older_epoch_is_fenced_out(self) -> None:
        """An older epoch cannot commit once a newer one has opened the map."""
        if not self.fences:
            pytest.skip("its store cannot fence")
        self._skip_non_transactional()
        with self._open() as old:
            self._commit(old, 1, A)
            with self._open(epoch=2) as new:
                self._commit(new, 2, B)
                with pytest.raises((Fenced, PositionMismatch, StoreUnavailable)):
                    self._commit(old, 2, A)
                self._require(new, folded(A, B))
            with pytest.raises((Fenced, PositionMismatch)):
                self._commit(old, 2, A)
        with self._open(epoch=3) as state:
            self._require(state, folded(A, B))

    # -- how the cases do it -----------------------------------------------------------------------------------------

    def _skip_non_transactional(self) -> None:
        if self.make().kind is StateKind.NON_TRANSACTIONAL:
            pytest.skip("it promises nothing about a txid that comes again")

    def _made(self, factory: StateFactory, for_: StateContext) -> MapState:
        return cast("MapState", factory.make(for_))

    def _open(self, epoch: int = 1) -> closing[MapState]:
        return closing(self._made(self.make(), context(epoch=epoch)))

    def _commit(self, state: MapState, txid: int, rows: Sequence[Row]) -> None:
        state.begin_commit(txid)
        state.multi_update(batch(rows))
        state.commit(txid)

    def _values(self, state: MapState, keys: Sequence[tuple[str, int]]) -> list[Value]:
        asked = pa.RecordBatch.from_arrays(
            [pa.array([k[0] for k in keys], pa.string()), pa.array([k[1] for k in keys], pa.int64())], names=[*KEYS]
        )
        found = state.multi_get(asked).to_pylist()
        assert len(found) == len(keys)
        return [(row["n"], row["low"], row["high"]) for row in found]

    def _require(self, state: MapState, truth: Mapping[tuple[str, int], Value]) -> None:
        assert dict(zip(truth, self._values(state, list(truth)), strict=True)) == truth

    def _cut_short(self, txid: int, rows: Sequence[Row], writes: int, *, same_driver: bool) -> closing[MapState]:
        """The state after a driver began the txid and was interrupted; the caller commits the txid again."""
        error: BaseException = StoreUnavailable("no answer") if same_driver else Interrupted()
        factory = self.interrupted(self.make(), writes, error)
        state = self._made(factory or self.make(), context(epoch=txid))
        done = False
        try:
            state.begin_commit(txid)
            for row in rows[:writes] if factory is None else rows:
                state.multi_update(batch([row]))
            if factory is not None:
                state.commit(txid)
                done = True
        except type(error):
            done = False
        if same_driver and not done:
            return closing(state)
        state.close()
        return self._open(epoch=txid + 1)


class _Dying:
    """Opens a `DyingStore`; picklable where `open_store` is."""

    def __init__(self, open_store: OpenStore, writes: int, error: BaseException) -> None:
        self._open_store = open_store
        self._writes = writes
        self._error = error

    def __call__(self) -> KeyValueStore:
        return DyingStore(self._open_store(), self._writes, self._error)


def _with_store(factory: M, open_store: OpenStore) -> M:
    return replace(factory, open_store=open_store)
