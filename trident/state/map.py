"""Maps by key over a store, in three kinds: what is stored for each key, and what a txid that comes again does with it.

And how values are merged: a column's held values with added ones, and the rows of one key with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from stormproof.core.base.arguments import require_function
from stormproof.core.base.arrow import copy_of, pc
from stormproof.core.base.errors import PositionMismatch, SinkRefused, TopologyError, UsageError
from stormproof.core.user_code.functions import refuse_unfit_call
from stormproof.sinks.contract.protocol import EvidenceReport, Held, PreparedTransaction, StoreRecord
from stormproof.sinks.rows.content import Content, ContentSum, kinds_of
from stormproof.sinks.rows.limits import Limits
from stormproof.trident.state.protocol import Merge, StateContext, StateKind


def total(held: pa.Array, added: pa.Array) -> pa.Array:
    """The sum; NULL adds nothing. A sum that does not fit is an error, never a wrapped number."""
    if pa.types.is_decimal(held.type):  # a sum may have one digit more than the type holds
        wide = pa.decimal256(held.type.precision, held.type.scale)
        summed = pc.cast(pc.add_checked(pc.cast(held, wide), pc.cast(added, wide)), held.type)
    else:
        summed = pc.add_checked(held, added)
    return pc.coalesce(summed, held, added)


def minimum(held: pa.Array, added: pa.Array) -> pa.Array:
    """The smaller one; NULL is ignored."""
    return pc.min_element_wise(held, added) if _ordered(held.type) else _chosen(pc.less(added, held), held, added)


def maximum(held: pa.Array, added: pa.Array) -> pa.Array:
    """The greater one; NULL is ignored."""
    return pc.max_element_wise(held, added) if _ordered(held.type) else _chosen(pc.greater(added, held), held, added)


def newest(held: pa.Array, added: pa.Array) -> pa.Array:
    """The added one, also where it is NULL."""
    return added


def _ordered(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind)) and not pa.types.is_boolean(kind)


def _chosen(better: pa.Array, held: pa.Array, added: pa.Array) -> pa.Array:
    return pc.if_else(pc.or_kleene(pc.is_null(held), pc.fill_null(better, False)), added, held)


@dataclass(frozen=True, slots=True)
class RowMerge:
    """A plain function of two values as a merge. It is called row by row, and never with NULL (None)."""

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        where = "RowMerge"
        require_function(where, "function", self.function, "f(held, added)")
        refuse_unfit_call(where, where, self.function, ("held", "added"), "write one of two values")

    def __call__(self, held: pa.Array, added: pa.Array) -> pa.Array:
        """The function's results, as an array of the columns' type."""
        pairs = zip(held.to_pylist(), added.to_pylist(), strict=True)
        values = [b if a is None else a if b is None else self.function(a, b) for a, b in pairs]
        return pa.array(values, held.type)


MERGES: Final[Mapping[str, Merge]] = {"sum": total, "count": total, "min": minimum, "max": maximum}
"""The ready-made merges, by the name of the fold or aggregate that they serve. Partial counts are summed."""


def merge_columns(
    held: Mapping[str, pa.Array], added: Mapping[str, pa.Array], merges: Mapping[str, Merge], where: str
) -> dict[str, pa.Array]:
    """Each added column merged with the held one.

    Raises:
        SinkRefused: a value does not fit its column, or a merge did not return a column of that type and length.
    """
    merged: dict[str, pa.Array] = {}
    for name, column in added.items():
        try:
            new: Any = merges[name](held[name], column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SinkRefused(
                f"{where}: column {name!r} ({column.type}) cannot hold a merged value: {error}", column=name
            ) from error
        if isinstance(new, pa.ChunkedArray):
            new = new.combine_chunks()
        if not isinstance(new, pa.Array) or new.type != column.type or len(new) != len(column):
            shown = f"{len(new)} of {new.type}" if isinstance(new, pa.Array) else type(new).__name__
            raise SinkRefused(
                f"{where}: the merge of column {name!r} gave {shown} for {len(column)} of {column.type}", column=name
            )
        merged[name] = new
    return merged


def one_row_a_key(rows: pa.RecordBatch, keys: Sequence[str], merges: Mapping[str, Merge], where: str) -> pa.RecordBatch:
    """Merge the rows of equal keys with each other, in pairs of neighbours; a column is merged at most log2(n) times.

    The earlier row of a pair is the held one. Rows whose keys all differ are returned as they are. Keys must not be NULL.
    """
    if rows.num_rows < 2:
        return rows
    order = pc.sort_indices(pa.Table.from_batches([rows]), sort_keys=[(key, "ascending") for key in keys])
    ordered = rows.take(order)
    differs = np.zeros(rows.num_rows - 1, np.bool_)
    for key in keys:
        column = ordered.column(key)
        differs |= pc.not_equal(column.slice(1), column.slice(0, rows.num_rows - 1)).to_numpy(zero_copy_only=False)
    if differs.all():
        return rows
    first = np.concatenate([[True], differs])
    values = {name: ordered.column(name) for name in rows.schema.names if name not in keys}
    place = np.flatnonzero(first)
    kept = place  # the rows of `ordered` from which the result takes its keys
    group = np.cumsum(first) - 1
    while len(group) > len(kept):
        rank = np.arange(len(group)) - place[group]
        left = np.flatnonzero(rank % 2 == 0)
        paired = (left + 1 < len(group)) & (group[np.minimum(left + 1, len(group) - 1)] == group[left])
        alone, with_next = left[~paired], left[paired]
        merged = merge_columns(
            {name: column.take(pa.array(with_next)) for name, column in values.items()},
            {name: column.take(pa.array(with_next + 1)) for name, column in values.items()},
            merges,
            where,
        )
        back = pa.array(np.argsort(np.concatenate([alone, with_next]), kind="stable"))
        values = {
            name: pa.concat_arrays([column.take(pa.array(alone)), merged[name]]).take(back)
            for name, column in values.items()
        }
        group = group[left]
        place = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    keys_once = ordered.take(pa.array(kept))
    return pa.RecordBatch.from_arrays(
        [keys_once.column(n) if n in keys else values[n] for n in rows.schema.names], schema=rows.schema
    )


TXID: Final = "txid"
LIFE: Final = "life"
"""The incarnation that wrote a txid: the txids of a topology's different lives cannot be compared."""
PREVIOUS: Final = "previous_"

BUFFERED_ROWS_MAX: Final = 262_144
"""Buffered rows from which on they are merged with each other: this bounds memory by the number of keys."""
WRITTEN_ROWS_MAX: Final = 65_536
"""Keys that are read and written at once."""


def stored_schema(context: StateContext, kind: StateKind) -> pa.Schema:
    """The columns stored for a key: its value, and what tells a txid that comes again from a new one."""
    fields = [f.with_nullable(True) for f in context.value_schema]
    if kind is StateKind.OPAQUE:
        fields += [pa.field(PREVIOUS + f.name, f.type) for f in context.value_schema]
    if kind is not StateKind.NON_TRANSACTIONAL:
        fields += [pa.field(LIFE, pa.string()), pa.field(TXID, pa.int64())]
    return pa.schema(fields)


def check_map_columns(schema: pa.Schema, keys: Sequence[str], merged: Sequence[str], where: str) -> None:
    """Refuse rows that no map can hold.

    Raises:
        TopologyError: there is no key or no value, a value has no merge, or a column has the name of one of the map's own.
    """
    values = [name for name in schema.names if name not in keys]
    if not keys or not values:
        raise TopologyError(f"{where}: a map needs at least one key column and one value column")
    for name in values:
        if name not in merged:
            raise TopologyError(f"{where}: nothing says how column {name!r} is folded; pass merges={{{name!r}: ...}}")
    own = {LIFE, TXID, *(PREVIOUS + name for name in values)}
    for name in schema.names:
        if name.lower() in own:
            raise TopologyError(f"{where}: a map has a column {name!r} of its own; call this one otherwise", field=name)


def change_of(keys: pa.RecordBatch, stored: pa.RecordBatch, held: pa.RecordBatch) -> Content:
    """What these rows add to the content of a map's table, less the rows that were held in their place."""
    schema = pa.schema([*keys.schema, *stored.schema])
    put, replaced = ContentSum(kinds_of(schema)), ContentSum(kinds_of(schema))
    put.add(pa.RecordBatch.from_arrays([*keys.columns, *stored.columns], schema=schema))
    before = pa.RecordBatch.from_arrays([*keys.columns, *held.columns], schema=schema)
    replaced.add(before.filter(held.column(TXID).is_valid()))
    return put.content + -replaced.content


class Backing(Protocol):
    """What stores a map's rows. It need not be transactional: a crash may leave some of a txid's keys written.

    An implementation inherits it.
    """

    @property
    def record(self) -> StoreRecord:
        """What the store itself records of the map: whose it is, and which txid it holds."""
        ...

    @property
    def limits(self) -> Limits:
        """What its columns can hold, for the check before anything is staged."""
        ...

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """What follows belongs to this transaction, until `end`."""
        ...

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The stored columns of these keys, row by row; all NULL for a key that is not stored. Earlier writes are seen."""
        ...

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch, held: pa.RecordBatch) -> None:
        """Store these rows, each under its key; each key once. `held` is what `read` gave of them."""
        ...

    def end(self) -> None:
        """Make what was written durable; and then, or together with it, that the transaction is held."""
        ...

    def close(self) -> None:
        """Close connections; what was begun and not ended may be undone."""
        ...

    def keep_held(self) -> None:
        """Check that the last transaction is whole, and make it outlive a power loss, where the store's commit does not.

        Raises:
            SinkRefused: files of it are lost.
        """
        return

    @property
    def may_lose_files(self) -> bool:
        """Whether a power loss may take files of a transaction that it holds."""
        return False


class StoredMap:
    """A map over a backing.

    Guarantee:
        Transactional: a txid's rows are merged into a key once, however often the txid comes with the same rows, and
        wherever earlier tries were cut short. Opaque: a key's value is its value before the txid, merged with the rows of
        the txid's last try; a key that only earlier tries had keeps their value. Non-transactional: each try counts.

    Not guaranteed:
        That two drivers can write at once. Where a store cannot refuse an older epoch, a paused driver may overwrite what
        was written between its read and its write.
    """

    def __init__(self, context: StateContext, kind: StateKind, backing: Backing) -> None:
        self._context = context
        self._kind = kind
        self._backing = backing
        self._where = f"state {context.identity.sink!r} of topology {context.identity.topology!r}"
        self._values = context.value_schema.names
        self._keys = list(context.keys)
        self._stored = stored_schema(context, kind)
        self._next: tuple[PreparedTransaction, bool] | None = None
        self._txid: int | None = None
        self._updates: list[pa.RecordBatch] = []
        self._puts: list[pa.RecordBatch] = []
        self._buffer_max = BUFFERED_ROWS_MAX

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        return self._kind

    @property
    def context(self) -> StateContext:
        """What it was made for."""
        return self._context

    @property
    def backing(self) -> Backing:
        """Where its rows are stored."""
        return self._backing

    # -- a txid ------------------------------------------------------------------------------------------------------

    def announce(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Announce the transaction of the next `begin_commit`."""
        self._next = transaction, checked

    def begin_commit(self, txid: int) -> None:
        """Begin a txid; what was begun before and not committed is forgotten."""
        if self._context.epoch is None:
            raise UsageError(f"{self._where} was opened for reading only")
        transaction, checked = self._next or (PreparedTransaction(txid, None, "", 0, ()), False)
        if transaction.txid != txid:
            raise UsageError(f"{self._where} was told of txid {transaction.txid}, and not of {txid}")
        self._next = None
        self._updates, self._puts, self._buffer_max = [], [], BUFFERED_ROWS_MAX
        self._txid = None
        self._backing.begin(transaction, checked=checked)
        self._txid = txid

    def commit(self, txid: int) -> None:
        """Write the buffered rows, and make all of the txid durable."""
        if txid != self._txid:
            raise UsageError(f"{self._where}: txid {txid} is not the one that was begun ({self._txid})")
        if self._puts and self._updates:
            raise UsageError(f"{self._where}: txid {txid} has both updates and puts; use one of them in a txid")
        if self._puts:
            self._write_all(self._puts, dict.fromkeys(self._values, newest))
        if self._updates:
            self._write_all(self._updates, self._context.merges)
        self._updates, self._puts = [], []
        self._backing.end()
        self._txid = None

    # -- rows --------------------------------------------------------------------------------------------------------

    def multi_get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The value columns of these keys, row by row; NULLs for a key that is not stored.

        Within a txid, what it put or updated before is seen, in whichever call (but for `each_once`).
        """
        keys = _cast(keys.select(self._keys), self._context.key_schema)
        found = self._backing.read(keys)
        columns = {name: found.column(name) for name in self._values}
        if self._txid is not None and self._kind is StateKind.OPAQUE:
            columns = self._before(found, self._same(found), columns)
        if self._puts:
            self._puts = [self._once(self._puts, dict.fromkeys(self._values, newest))]
            columns = self._with_own(keys, columns, self._puts[0], dict.fromkeys(self._values, newest))
        if self._updates:
            self._updates = [self._once(self._updates, self._context.merges)]
            columns = self._with_own(keys, columns, self._updates[0], self._context.merges)
        return pa.RecordBatch.from_arrays(
            list(columns.values()), schema=pa.schema([self._stored.field(name) for name in self._values])
        )

    def multi_update(self, rows: pa.RecordBatch, *, each_once: bool = False) -> None:
        """Merge the rows' values into the values of their keys."""
        rows = self._checked(rows)
        if each_once:
            self._write(rows, self._context.merges)
            return
        self._updates.append(rows)
        if sum(part.num_rows for part in self._updates) > self._buffer_max:
            merged = self._once(self._updates, self._context.merges)
            self._updates, self._buffer_max = [merged], max(BUFFERED_ROWS_MAX, 2 * merged.num_rows)

    def multi_put(self, rows: pa.RecordBatch) -> None:
        """Set the values of these keys; not allowed in a txid that has updates. `multi_get` sees them from now on."""
        self._puts.append(self._checked(rows))

    def _with_own(
        self, keys: pa.RecordBatch, held: dict[str, pa.Array], own: pa.RecordBatch, merges: Mapping[str, Merge]
    ) -> dict[str, pa.Array]:
        """The values of these keys after this txid's own rows, of which there is one a key."""
        names = [f"k{i}" for i in range(len(self._keys))]
        asked = pa.table([*keys.columns, pa.array(range(keys.num_rows), pa.int64())], [*names, "asked"])
        mine = pa.table([*own.select(self._keys).columns, pa.array(range(own.num_rows), pa.int64())], [*names, "own"])
        at = asked.join(mine, keys=names, join_type="left outer").sort_by("asked").column("own").combine_chunks()
        added = {name: own.column(name).take(at) for name in self._values}
        merged = merge_columns(held, added, merges, self._where)
        return {name: pc.if_else(pc.is_valid(at), merged[name], column) for name, column in held.items()}

    def _checked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self._txid is None:
            raise UsageError(f"{self._where}: rows come between begin_commit and commit only")
        rows = _cast(rows.select(self._context.schema.names), self._context.schema)
        for name in self._keys:
            if rows.column(name).null_count:
                raise SinkRefused(f"{self._where}: key column {name!r} holds NULL, which is no key", column=name)
        return copy_of(rows)

    def _once(self, parts: Sequence[pa.RecordBatch], merges: Mapping[str, Merge]) -> pa.RecordBatch:
        rows = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
        return one_row_a_key(rows, self._keys, merges, self._where)

    def _write_all(self, parts: Sequence[pa.RecordBatch], merges: Mapping[str, Merge]) -> None:
        rows = self._once(parts, merges)
        for start in range(0, rows.num_rows, WRITTEN_ROWS_MAX):
            self._write(rows.slice(start, WRITTEN_ROWS_MAX), merges)

    def _write(self, rows: pa.RecordBatch, merges: Mapping[str, Merge]) -> None:
        """Merge and write rows whose keys all differ."""
        if rows.num_rows == 0:
            return
        keys = rows.select(self._keys)
        held = self._backing.read(keys)
        added = {name: rows.column(name) for name in self._values}
        base = {name: held.column(name) for name in self._values}
        if self._kind is StateKind.NON_TRANSACTIONAL:
            self._backing.write(keys, self._batch(merge_columns(base, added, merges, self._where)), held)
            return
        same = self._same(held)
        self._refuse_later(keys, held)
        if self._kind is StateKind.TRANSACTIONAL:
            if pc.any(same).as_py():
                fresh = pc.invert(same)
                keys, held = keys.filter(fresh), held.filter(fresh)
                base = {name: column.filter(fresh) for name, column in base.items()}
                added = {name: column.filter(fresh) for name, column in added.items()}
                if keys.num_rows == 0:
                    return
            self._backing.write(keys, self._batch(merge_columns(base, added, merges, self._where)), held)
            return
        base = self._before(held, same, base)
        merged = merge_columns(base, added, merges, self._where)
        self._backing.write(keys, self._batch({**merged, **{PREVIOUS + name: c for name, c in base.items()}}), held)

    def _batch(self, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        rows = len(next(iter(columns.values())))
        own: dict[str, pa.Array] = {}
        if self._kind is not StateKind.NON_TRANSACTIONAL:
            own = {
                LIFE: pa.repeat(self._context.identity.incarnation, rows),
                TXID: pa.repeat(pa.scalar(self._txid, pa.int64()), rows),
            }
        found = {**columns, **own}
        return pa.RecordBatch.from_arrays([found[f.name] for f in self._stored], schema=self._stored)

    def _mine(self, held: pa.RecordBatch) -> pa.Array:
        return pc.fill_null(pc.equal(held.column(LIFE), self._context.identity.incarnation), False)

    def _same(self, held: pa.RecordBatch) -> pa.Array:
        """Marks the keys that an earlier try at this txid wrote."""
        return pc.and_(self._mine(held), pc.fill_null(pc.equal(held.column(TXID), self._txid), False))

    def _before(self, held: pa.RecordBatch, same: pa.Array, values: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """The values before this txid."""
        return {name: pc.if_else(same, held.column(PREVIOUS + name), column) for name, column in values.items()}

    def _refuse_later(self, keys: pa.RecordBatch, held: pa.RecordBatch) -> None:
        later = pc.and_(self._mine(held), pc.fill_null(pc.greater(held.column(TXID), self._txid), False))
        if pc.any(later).as_py():
            row = pc.index(later, True).as_py()
            raise PositionMismatch(
                f"{self._where}: key {keys.slice(row, 1).to_pylist()[0]!r} holds txid {held.column(TXID)[row]}, which "
                f"is later than txid {self._txid}: another driver went on, or the ledger was restored. Inspect with: "
                f"stormproof audit verify {self._context.identity.topology}",
                txid=self._txid,
                held=held.column(TXID)[row].as_py(),
            )

    # -- what it remembers -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let connections go."""
        self._txid = None
        self._backing.close()


class EvidencedMap(StoredMap):
    """A map that remembers what it committed: every kind but the non-transactional one."""

    @property
    def table_id(self) -> str:
        """What tells this store from another of the same name."""
        return self._backing.record.table_id

    def last_txid(self) -> int | None:
        """The txid of the last commit that it holds."""
        held = self.held()
        return None if held is None else held.txid

    def held(self) -> Held | None:
        """The last transaction that it holds for this context's identity."""
        return self._backing.record.held()

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives of this topology's name that committed to it."""
        return self._backing.record.other_incarnations()

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What it remembers of txids from `first` to `last`."""
        return self._backing.record.evidence(first, last)


def make_map(context: StateContext, kind: StateKind, backing: Backing) -> StoredMap:
    """A map of this kind."""
    return (StoredMap if kind is StateKind.NON_TRANSACTIONAL else EvidencedMap)(context, kind, backing)


def _cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if rows.schema.types == schema.types:
        return rows
    return pa.RecordBatch.from_arrays(
        [pc.cast(c, f.type) for c, f in zip(rows.columns, schema, strict=True)], schema=schema
    )
