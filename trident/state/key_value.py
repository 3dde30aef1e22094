"""Maps over a user's own key-value store: rows as JSON under their keys, and the last transaction under a key of its own.

What such a store has to do, one in memory, and the cache in front of each.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from stormproof.core.base.arguments import require_function, require_object, require_text, require_whole
from stormproof.core.base.errors import Fenced, Json, PositionMismatch, SinkRefused, TopologyError
from stormproof.core.base.process import OneProcess
from stormproof.core.contract.sink import TableKey, shared_table
from stormproof.core.postgres.database import Database
from stormproof.core.user_code.functions import refuse_unfit_call
from stormproof.sinks.contract.protocol import (
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    StoreRecord,
)
from stormproof.sinks.rows.limits import Limits
from stormproof.trident.state.map import Backing, StoredMap, make_map, stored_schema
from stormproof.trident.state.matrix import SupportsStoreIdentity, as_state_kind
from stormproof.trident.state.protocol import StateContext, StateKind


class KeyValueStore(Protocol):
    """A user's store: bytes by key. Not assumed to be transactional: a call that fails may have written some keys.

    One thread at a time calls it, and not always the same one: with several batches in flight, a batch is committed on
    another thread than the one that opened the store. It raises errors that may pass as `TransientError`
    (`StoreUnavailable`), and others as `SinkRefused`.
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

    Threads: any number may use one object. Forks: a fork that writes to its parent's store is refused: it has a copy.
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


OpenStore: TypeAlias = Callable[[], KeyValueStore]


class CachedStore:
    """A store, with its most recently used keys in memory. It must be the store's only writer.

    Guarantee:
        The cache never holds what the store may lack: a write enters it after the store's call has returned, and a call
        that fails empties it, since nobody knows what that call has written.
    """

    def __init__(self, store: KeyValueStore, keys_max: int) -> None:
        self._store = store
        self._keys_max = keys_max
        self._cache: OrderedDict[bytes, bytes | None] = OrderedDict()

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """From the cache, and what it lacks from the store."""
        missing = [key for key in keys if key not in self._cache]
        if missing:
            try:
                found = self._store.multi_get(missing)
            except BaseException:
                self._cache.clear()
                raise
            if len(found) != len(missing):
                raise SinkRefused(
                    f"{type(self._store).__name__}.multi_get gave {len(found)} values for {len(missing)} keys; it must "
                    "give one for each, None where there is none"
                )
            self._cache.update(zip(missing, found, strict=True))
        values = [self._cache[key] for key in keys]
        self._used(keys)
        return values

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """To the store first."""
        try:
            self._store.multi_put(items)
        except BaseException:
            self._cache.clear()
            raise
        self._cache.update(items)
        self._used(items)

    def close(self) -> None:
        """Close the store."""
        self._cache.clear()
        self._store.close()

    def __len__(self) -> int:
        return len(self._cache)

    def _used(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._cache.move_to_end(key)
        while len(self._cache) > self._keys_max:
            self._cache.popitem(last=False)


Convert: TypeAlias = Callable[[Any], Any]
"""Of one value that is not NULL."""

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone has none
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)


def codec(kind: pa.DataType, where: str = "column") -> tuple[Convert, Convert]:
    """How a type's values go to JSON, and how they come back.

    Raises:
        TopologyError: they have no form in JSON that comes back as it was.
    """
    if pa.types.is_floating(kind):
        return _float_to_json, float
    if pa.types.is_decimal(kind):
        return str, Decimal
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return lambda v: base64.b64encode(v).decode("ascii"), base64.b64decode
    if pa.types.is_date32(kind):
        return date.isoformat, date.fromisoformat
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        zero = _EPOCH if kind.tz is None else _EPOCH_UTC
        return lambda v: (v - zero) // timedelta(microseconds=1), lambda v: zero + timedelta(microseconds=v)
    as_is = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    if any(matches(kind) for matches in as_is):
        return lambda v: v, lambda v: v
    raise TopologyError(f"{where} is {kind}, which a key-value map cannot hold; use another type, or PostgresMap")


def converted(values: Iterable[Any], convert: Convert) -> list[Any]:
    """The values converted; NULL (None) stays."""
    return [None if value is None else convert(value) for value in values]


def dumps(value: Any) -> bytes:
    """A value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _float_to_json(value: float) -> float | str:
    """JSON has no NaN and no infinity: those are texts."""
    return value if math.isfinite(value) else repr(value)


POSITION_KEY: Final = b"stormproof:position"
"""Where a map keeps its last txid and its owner. No row's key looks like it: those are JSON arrays."""

CHUNK_KEYS: Final = 1_000
"""Keys per call to the store."""

CACHE_KEYS: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Position:
    """What a map remembers of itself: whose it is, and the last transaction that it holds."""

    identity: SinkIdentity
    epoch: int
    txid: int | None = None
    digest: str | None = None
    rows: int = 0

    def to_bytes(self) -> bytes:
        own = {"epoch": self.epoch, "txid": self.txid, "digest": self.digest, "rows": self.rows}
        return dumps({**asdict(self.identity), **own})

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
        self._columns = [(f.name, *codec(f.type)) for f in self._schema]
        self._key_columns = [(f.name, codec(f.type)[0]) for f in context.key_schema]
        if kind is not StateKind.NON_TRANSACTIONAL:
            self._take()

    @property
    def record(self) -> StoreRecord:
        """The position that it keeps in the store."""
        return self

    @property
    def table_id(self) -> str:
        """The sink's name: a key-value store has no id of its own."""
        return f"key-value/{self._context.identity.sink}"

    @property
    def store_key(self) -> TableKey:
        """The identity that the store itself names; else the object's."""
        store = self._plain
        return ("store", store.store_identity) if isinstance(store, SupportsStoreIdentity) else ("object", id(store))

    @property
    def limits(self) -> Limits:
        """None: whatever the type, a value is stored as text."""
        return Limits()

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Check once more whose the store is, and which txid it holds."""
        if self._kind is not StateKind.NON_TRANSACTIONAL:
            own = self._own(self._position())
            held = None if own is None else own.txid
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
            pa.array(
                converted((None if row is None else row.get(name) for row in rows), from_json),
                self._schema.field(name).type,
            )
            for name, _, from_json in self._columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch, held: pa.RecordBatch) -> None:
        """Store these rows, in chunks."""
        named = self._names(keys)
        columns = [(name, converted(stored.column(name).to_pylist(), to_json)) for name, to_json, _ in self._columns]
        values = [
            dumps({name: column[i] for name, column in columns if column[i] is not None}) for i in range(len(named))
        ]
        for start in range(0, len(named), CHUNK_KEYS):
            stop = start + CHUNK_KEYS
            self._cached.multi_put(dict(zip(named[start:stop], values[start:stop], strict=True)))

    def end(self) -> None:
        """Write the position, after all of the transaction's keys."""
        transaction, self._begun = self._begun, None
        if transaction is None or self._kind is StateKind.NON_TRANSACTIONAL:
            return
        before = self._committed()
        if before is not None and (before.txid or 0) > transaction.txid:  # unchecked, and late
            position = replace(before, epoch=self._epoch)
        else:
            identity = self._context.identity
            position = _Position(identity, self._epoch, transaction.txid, transaction.digest, transaction.rows)
        self._plain.multi_put({POSITION_KEY: position.to_bytes()})

    def held(self) -> Held | None:
        """The last transaction, read afresh."""
        committed = self._committed()
        return None if committed is None or committed.txid is None else Held(committed.txid, committed.digest)

    def other_incarnations(self) -> tuple[str, ...]:
        """The life that committed last, where that is not this one."""
        position = self._position()
        if position is None or position.txid is None or position.identity == self._context.identity:
            return ()
        return (position.identity.incarnation,)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The last transaction; those before it left no trace of their own."""
        held = self._committed()
        if held is None or held.txid is None:
            return EvidenceReport(self.table_id, (), None)
        asked = held.txid >= first and (last is None or held.txid <= last)
        entries = (Evidence(held.txid, held.digest or "", held.rows),) if asked else ()
        return EvidenceReport(self.table_id, entries, held.txid, truncated=True)

    def close(self) -> None:
        """Close the store."""
        self._cached.close()

    @property
    def _epoch(self) -> int:
        return self._context.epoch or 0

    def _position(self) -> _Position | None:
        value = self._plain.multi_get([POSITION_KEY])[0]
        return None if value is None else _Position.of(value)

    def _committed(self) -> _Position | None:
        """The position, where this sink of this life has committed."""
        position = self._position()
        if position is None or position.identity != self._context.identity or position.txid is None:
            return None
        return position

    def _own(self, position: _Position | None) -> _Position | None:
        """The position, where this sink of this life has opened the store.

        Raises:
            SinkRefused: another state has committed to the store.
            Fenced: a newer epoch holds it.
        """
        if position is not None and position.txid is not None:
            self._require_one_writer(position.identity)
        if position is None or position.identity != self._context.identity:
            return None
        if position.epoch > self._epoch:
            raise Fenced(f"{self._where}: epoch {position.epoch} holds it, this is epoch {self._epoch}")
        return position

    def _take(self) -> None:
        """Have the store name this sink and this epoch: from here on it refuses older epochs and other sinks."""
        if self._context.epoch is None:
            return
        position = self._position()
        own = self._own(position)
        if own is None and position is not None:
            if position.txid is not None:
                return  # it holds another life's rows: a person has to say whether this life may go on there
            self._require_own_claim(position)
        moved = replace(own or _Position(self._context.identity, self._epoch), epoch=self._epoch)
        if moved != own:
            self._plain.multi_put({POSITION_KEY: moved.to_bytes()})

    def _require_one_writer(self, theirs: SinkIdentity) -> None:
        """Refuse a store to which another state has committed."""
        mine = self._context.identity
        if (theirs.topology, theirs.sink) != (mine.topology, mine.sink):
            raise SinkRefused(
                f"{self._where}: the store holds state {theirs.sink!r} of topology {theirs.topology!r}; a map has one "
                "writer: use another store, or other keys in it"
            )

    def _require_own_claim(self, position: _Position) -> None:
        """Refuse a store that another sink of this very run has opened. What an earlier run opened and left is free."""
        mine, theirs = self._context.identity, position.identity
        same_run = replace(theirs, sink=mine.sink) == mine and position.epoch == self._epoch
        if same_run and theirs.sink != mine.sink:
            raise shared_table(mine.topology, theirs.sink, mine.sink, (self._target, self._target))

    def _names(self, keys: pa.RecordBatch) -> list[bytes]:
        columns = [converted(keys.column(name).to_pylist(), to_json) for name, to_json in self._key_columns]
        return [dumps(list(key)) for key in zip(*columns, strict=True)]


@dataclass(frozen=True)
class KeyValueMap:
    """What the three kinds of maps have in common: `open_store` opens the store, in the driver and in executors that read.

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
            codec(column.type, f"{where}: column {column.name!r}")

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

    Executors in other processes cannot query it.

    Threads: as its `MemoryStore`; a map has one writer, so a second topology on it is refused. Forks: a fork that writes
    is refused.
    """

    def __init__(
        self, kind: StateKind | str = StateKind.OPAQUE, *, store: MemoryStore | None = None, name: str = "memory"
    ) -> None:
        self._kind = as_state_kind(kind, "MemoryMap")
        if store is not None:
            require_object("MemoryMap", "store", store, MemoryStore, "stormproof.state.MemoryStore()")
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
        return "memory map", id(self.store)

    def find_table(self, database: Database | None) -> TableKey:
        """The same."""
        return self.table_key(database)

    def description(self, database: Database | None) -> dict[str, Json]:
        """Nothing: it is lost with the process."""
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
