"""Maps over users' own key-value stores: bytes by key, a bounded cache in front, nothing assumed of transactions."""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Protocol

import pyarrow as pa

from stormproof.core.arguments import require_function, require_object, require_text, require_whole
from stormproof.core.errors import Fenced, Json, PositionMismatch, SinkRefused, TopologyError
from stormproof.core.forks import OneProcess
from stormproof.core.postgres.database import Database
from stormproof.core.sink import TableKey, shared_table
from stormproof.core.user_functions import refuse_unfit_call
from stormproof.sinks.limits import Limits
from stormproof.sinks.protocol import Evidence, EvidenceReport, Held, PreparedTransaction, SinkIdentity, StoreRecord
from stormproof.trident.state.abilities import SupportsStoreIdentity
from stormproof.trident.state.checks import as_state_kind
from stormproof.trident.state.map import Backing, StoredMap, make_map, stored_schema
from stormproof.trident.state.protocol import StateContext, StateKind

POSITION_KEY: Final = b"stormproof:position"
"""Where a map remembers its last txid and whose it is. No row's key looks like it: those are JSON arrays."""

CHUNK_KEYS: Final = 1_000
"""Keys per call to the store."""

CACHE_KEYS: Final = 100_000

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone has none
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)


class KeyValueStore(Protocol):
    """A user's store: bytes by key. Not assumed to be transactional: a call that fails may have written some keys.

    One thread at a time calls it, and not always the same one: with several batches in flight a batch is committed on
    another thread than the one that opened the store. Errors that may pass are to be raised as `TransientError`
    (`StoreUnavailable`), others as `SinkRefused`.
    """

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of these keys, in their order; None where there is none. Every write that returned is seen."""
        ...

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """Store these values; when it returns they are durable."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...


class MemoryStore:
    """A key-value store in this process's memory: for tests, and for states that need not outlive it.

    Threads: any number may use one object. Forks: one that writes to its parent's is refused, for it has a copy.
    """

    def __init__(self) -> None:
        self._guard = OneProcess("a MemoryStore")
        self.items: dict[bytes, bytes] = {}

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of these keys."""
        return [self.items.get(key) for key in keys]

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """Store these values."""
        with self._guard:
            self.items.update(items)

    def close(self) -> None:
        """Nothing to let go."""


class CachedStore:
    """The most recently used keys of a store, of which this is the only writer.

    Guarantee:
        The cache never holds what the store may lack: it is filled after a write returned, and emptied when a call
        fails, since then nobody knows what was written.
    """

    def __init__(self, store: KeyValueStore, keys_max: int = CACHE_KEYS) -> None:
        self._store = store
        self._keys_max = keys_max
        self._cache: OrderedDict[bytes, bytes | None] = OrderedDict()

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """From the cache, and what it lacks from the store."""
        missing = [key for key in keys if key not in self._cache]
        if missing:
            self._keep(dict(zip(missing, self._asked(missing), strict=True)), keep_all=True)
        found = [self._cache[key] for key in keys]
        for key in keys:
            self._cache.move_to_end(key)
        self._trim()
        return found

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """To the store first."""
        done = False
        try:
            self._store.multi_put(items)
            done = True
        finally:
            if not done:
                self._cache.clear()
        self._keep(items, keep_all=False)

    def close(self) -> None:
        """Close the store."""
        self._cache.clear()
        self._store.close()

    def __len__(self) -> int:
        return len(self._cache)

    def _asked(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        done = False
        try:
            found = self._store.multi_get(keys)
            done = True
        finally:
            if not done:
                self._cache.clear()
        if len(found) != len(keys):
            raise SinkRefused(f"the key-value store gave {len(found)} values for {len(keys)} keys")
        return found

    def _keep(self, items: Mapping[bytes, bytes | None], *, keep_all: bool) -> None:
        self._cache.update(items)
        for key in items:
            self._cache.move_to_end(key)
        if not keep_all:
            self._trim()

    def _trim(self) -> None:
        while len(self._cache) > self._keys_max:
            self._cache.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Position:
    """What a map remembers of itself: whose it is, and the last transaction that it holds."""

    identity: SinkIdentity
    epoch: int
    txid: int | None = None
    digest: str | None = None
    rows: int = 0

    def to_bytes(self) -> bytes:
        i = self.identity
        return _dumps(
            {
                "topology": i.topology,
                "incarnation": i.incarnation,
                "sink": i.sink,
                "epoch": self.epoch,
                "txid": self.txid,
                "digest": self.digest,
                "rows": self.rows,
            }
        )

    @classmethod
    def of(cls, value: bytes) -> _Position:
        read = json.loads(value)
        identity = SinkIdentity(read["topology"], read["incarnation"], read["sink"])
        return cls(identity, read["epoch"], read["txid"], read["digest"], read["rows"])


class KeyValueBacking(Backing, StoreRecord):
    """A map's rows as JSON in a key-value store; the position is written after all of a txid's keys."""

    def __init__(
        self,
        context: StateContext,
        kind: StateKind,
        store: KeyValueStore,
        *,
        cache_keys: int,
        target: str = "key-value store",
    ) -> None:
        self._context = context
        self._target = target
        self._kind = kind
        self._schema = stored_schema(context, kind)
        self._plain = store
        self._cached = CachedStore(store, cache_keys)
        self._where = f"state {context.identity.sink!r} of topology {context.identity.topology!r}"
        self._begun: PreparedTransaction | None = None
        self._columns = [(f.name, *_codec(f.type)) for f in self._schema]
        self._key_columns = [(f.name, _codec(f.type)[0]) for f in context.key_schema]
        if kind is not StateKind.NON_TRANSACTIONAL:
            self._take()

    @property
    def record(self) -> StoreRecord:
        """The position that it keeps."""
        return self

    @property
    def table_id(self) -> str:
        """A store has none: its name is all that is known."""
        return f"key-value/{self._context.identity.sink}"

    @property
    def store_key(self) -> TableKey:
        """What the store says of itself; else the object."""
        store = self._plain
        return ("store", store.store_identity) if isinstance(store, SupportsStoreIdentity) else ("object", id(store))

    @property
    def limits(self) -> Limits:
        """None: it is all text."""
        return Limits()

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Look once more whether the store is ours."""
        if self._kind is not StateKind.NON_TRANSACTIONAL:
            position = self._position()
            if position is not None and position.txid is not None:
                self._require_one_writer(position.identity)
            if position is not None and position.epoch > self._epoch and position.identity == self._context.identity:
                raise Fenced(f"{self._where}: epoch {position.epoch} holds it, this is epoch {self._epoch}")
            held = None if position is None or position.identity != self._context.identity else position.txid
            if checked and held not in (transaction.previous, transaction.txid):
                raise PositionMismatch(
                    f"{self._where} holds txid {held}, the ledger expects {transaction.previous} before txid "
                    f"{transaction.txid}; inspect with: stormproof audit verify {self._context.identity.topology}",
                    held=held,
                )
        self._begun = transaction

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """What is stored of these keys."""
        named = self._names(keys)
        found: list[bytes | None] = []
        for start in range(0, len(named), CHUNK_KEYS):
            found += self._cached.multi_get(named[start : start + CHUNK_KEYS])
        rows = [None if value is None else json.loads(value) for value in found]
        columns = [
            pa.array([None if row is None else read(row.get(name)) for row in rows], self._schema.field(name).type)
            for name, _, read in self._columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch) -> None:
        """Store these rows, in chunks."""
        named = self._names(keys)
        columns = [(name, [shown(v) for v in stored.column(name).to_pylist()]) for name, shown, _ in self._columns]
        values = [
            _dumps({name: column[i] for name, column in columns if column[i] is not None}) for i in range(len(named))
        ]
        for start in range(0, len(named), CHUNK_KEYS):
            stop = start + CHUNK_KEYS
            self._cached.multi_put(dict(zip(named[start:stop], values[start:stop], strict=True)))

    def end(self) -> None:
        """Remember the transaction, after its keys."""
        transaction, self._begun = self._begun, None
        if transaction is None or self._kind is StateKind.NON_TRANSACTIONAL:
            return
        before = self._position()
        txid, digest, rows = transaction.txid, transaction.digest, transaction.rows
        if before is not None and before.identity == self._context.identity and (before.txid or 0) > txid:
            txid, digest, rows = before.txid or 0, before.digest or "", before.rows  # unchecked, and late
        position = _Position(self._context.identity, self._epoch, txid, digest, rows)
        self._plain.multi_put({POSITION_KEY: position.to_bytes()})

    def held(self) -> Held | None:
        """The last transaction, read afresh."""
        position = self._position()
        if position is None or position.identity != self._context.identity or position.txid is None:
            return None
        return Held(position.txid, position.digest)

    def other_incarnations(self) -> tuple[str, ...]:
        """The life that wrote to it last, where that is not this one."""
        position = self._position()
        if position is None or position.txid is None or position.identity == self._context.identity:
            return ()
        return (position.identity.incarnation,)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The last transaction; those before it left no trace of their own."""
        position = self._position()
        if position is None or position.identity != self._context.identity or position.txid is None:
            return EvidenceReport(self.table_id, (), None)
        txid = position.txid
        entries = (Evidence(txid, position.digest or "", position.rows),)
        shown = entries if txid >= first and (last is None or txid <= last) else ()
        return EvidenceReport(self.table_id, shown, txid, truncated=True)

    def close(self) -> None:
        """Close the store."""
        self._cached.close()

    @property
    def _epoch(self) -> int:
        return self._context.epoch or 0

    def _position(self) -> _Position | None:
        value = self._plain.multi_get([POSITION_KEY])[0]
        return None if value is None else _Position.of(value)

    def _take(self) -> None:
        """Refuse another writer's store, and an older epoch; from here on older epochs are refused, and other sinks."""
        if self._context.epoch is None:
            return
        mine, position = self._context.identity, self._position()
        if position is not None and position.txid is not None:
            self._require_one_writer(position.identity)
        if position is not None and position.identity == mine and position.epoch > self._epoch:
            raise Fenced(f"{self._where}: epoch {position.epoch} holds it, this is epoch {self._epoch}")
        if position is not None and position.txid is not None and position.identity != mine:
            return  # an older life's: whether this one may go on there is a person's to say
        if position is not None and position.txid is None:
            self._require_own_claim(position)
        held = position if position is not None and position.identity == mine else _Position(mine, self._epoch)
        moved = replace(held, epoch=self._epoch)
        if moved != position:
            self._plain.multi_put({POSITION_KEY: moved.to_bytes()})

    def _require_one_writer(self, theirs: SinkIdentity) -> None:
        """Refuse a store that another state committed to."""
        mine = self._context.identity
        if (theirs.topology, theirs.sink) != (mine.topology, mine.sink):
            raise SinkRefused(
                f"{self._where}: the store holds state {theirs.sink!r} of topology {theirs.topology!r}; a map has one "
                "writer: use another store, or other keys in it"
            )

    def _require_own_claim(self, position: _Position) -> None:
        """Refuse a store that another sink of this very run has opened; what an earlier run only opened is free."""
        mine, theirs = self._context.identity, position.identity
        same_run = (theirs.topology, theirs.incarnation, position.epoch) == (
            mine.topology,
            mine.incarnation,
            self._epoch,
        )
        if same_run and theirs.sink != mine.sink:
            raise shared_table(mine.topology, theirs.sink, mine.sink, (self._target, self._target))

    def _names(self, keys: pa.RecordBatch) -> list[bytes]:
        columns = [[shown(v) for v in keys.column(name).to_pylist()] for name, shown in self._key_columns]
        return [_dumps(list(key)) for key in zip(*columns, strict=True)]


OpenStore = Callable[[], KeyValueStore]


@dataclass(frozen=True)
class KeyValueMap:
    """What the three kinds have in common: `open_store` opens the store, in the driver and in executors that read.

    Threads: a description, which any number of threads may share; each driver opens a store of its own, and one thread at
    a time uses that. Forks: may use the description; connections that `open_store` made are the user's to keep apart.
    """

    open_store: OpenStore
    name: str = "key-value store"
    cache_keys: int = CACHE_KEYS
    state_kind: StateKind = field(default=StateKind.OPAQUE, init=False)

    def __post_init__(self) -> None:
        where = type(self).__name__
        require_function(where, "open_store", self.open_store, "open_store(), which opens the store")
        instead = "write one without parameters, which opens the store"
        refuse_unfit_call(where, f"{where}: open_store", self.open_store, (), instead)
        require_text(where, "name", self.name, "redis")
        require_whole(where, "cache_keys", self.cache_keys, 0)

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        return self.state_kind

    @property
    def target(self) -> str:
        """The store's name, for people."""
        return self.name

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for a column that has no form in JSON here."""
        for column in schema:
            _codec(column.type, f"{where}: column {column.name!r}")

    def make(self, context: StateContext) -> StoredMap:
        """Open the store.

        Raises:
            SinkRefused: the store is another topology's.
            Fenced: a newer epoch holds it.
        """
        backing = KeyValueBacking(context, self.kind, self.open_store(), cache_keys=self.cache_keys, target=self.target)
        return make_map(context, self.kind, backing)


@dataclass(frozen=True)
class NonTransactionalMap(KeyValueMap):
    """The value alone is stored of each key. Rows that come again count again, so it serves at-least-once at best.

    Threads, forks: as `KeyValueMap`.
    """

    state_kind: StateKind = field(default=StateKind.NON_TRANSACTIONAL, init=False)


@dataclass(frozen=True)
class TransactionalMap(KeyValueMap):
    """Value and txid are stored of each key; a key that holds the txid already is skipped.

    Threads, forks: as `KeyValueMap`.
    """

    state_kind: StateKind = field(default=StateKind.TRANSACTIONAL, init=False)


@dataclass(frozen=True)
class OpaqueMap(KeyValueMap):
    """Value, previous value and txid are stored of each key; the same txid begins again from the previous value.

    Threads, forks: as `KeyValueMap`.
    """

    state_kind: StateKind = field(default=StateKind.OPAQUE, init=False)


class MemoryMap:
    """A map in this process's memory, for tests: what it holds outlives drivers, and is lost with the process.

    It stands where the driver is, so executors in other processes cannot query it.

    Threads: as its `MemoryStore`; a map has one writer, so a second topology on it is refused. Forks: a fork that writes
    is refused.
    """

    def __init__(
        self, kind: StateKind | str = StateKind.OPAQUE, *, store: MemoryStore | None = None, name: str = "memory"
    ) -> None:
        self._kind = as_state_kind(kind, "MemoryMap")
        if store is not None:
            require_object("MemoryMap", "store", store, MemoryStore, "stormproof.MemoryStore()")
        require_text("MemoryMap", "name", name, "totals")
        self.store = MemoryStore() if store is None else store
        self._name = name

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        return self._kind

    @property
    def target(self) -> str:
        """Where it is, for people."""
        return f"memory:{self._name}"

    def table_key(self, database: Database | None) -> TableKey:
        """The store, which is an object of this process."""
        del database
        return "memory map", id(self.store)

    def find_table(self, database: Database | None) -> TableKey:
        """The same."""
        return self.table_key(database)

    def description(self, database: Database | None) -> dict[str, Json]:
        """Nothing: it is lost with the process."""
        del database
        return {}

    def make(self, context: StateContext) -> StoredMap:
        """Open it."""
        backing = KeyValueBacking(context, self._kind, self.store, cache_keys=CACHE_KEYS, target=self.target)
        return make_map(context, self._kind, backing)

    def items(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """What is stored of each key."""
        return {
            tuple(json.loads(key)): json.loads(value) for key, value in self.store.items.items() if key != POSITION_KEY
        }


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


Shown = Callable[[Any], Any]


def _codec(kind: pa.DataType, where: str = "column") -> tuple[Shown, Shown]:
    """How a type's values go to JSON and come back.

    Raises:
        TopologyError: they have no form there that comes back as it was.
    """
    if pa.types.is_floating(kind):
        return _float_shown, _float_read
    if pa.types.is_decimal(kind):
        return _none_or(str), _none_or(Decimal)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _none_or(lambda v: base64.b64encode(v).decode("ascii")), _none_or(base64.b64decode)
    if pa.types.is_date32(kind):
        return _none_or(lambda v: v.isoformat()), _none_or(date.fromisoformat)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        zero = _EPOCH if kind.tz is None else _EPOCH_UTC
        return (
            _none_or(lambda v: (v - zero) // timedelta(microseconds=1)),
            _none_or(lambda v: zero + timedelta(microseconds=v)),
        )
    if any(
        matches(kind)
        for matches in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    ):
        return _as_is, _as_is
    raise TopologyError(f"{where} is {kind}, which a key-value map cannot hold; use another type, or PostgresMap")


def _as_is(value: Any) -> Any:
    return value


def _none_or(function: Shown) -> Shown:
    def shown(value: Any) -> Any:
        return None if value is None else function(value)

    return shown


def _float_shown(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else repr(value)


def _float_read(value: float | str | None) -> float | None:
    """JSON has no NaN and no infinity: those are texts."""
    return None if value is None else float(value)
