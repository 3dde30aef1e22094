"""Values merged in columns equal the same merged one by one, for any rows and any cut into batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.trident.state.key_value import MemoryMap
from stormproof.trident.state.map import RowMerge, maximum, minimum, newest, one_row_a_key, total
from stormproof.trident.state.protocol import Merge, StateContext, StateKind

SCHEMA = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("j", pa.int32()),
        pa.field("total", pa.int64()),
        pa.field("low", pa.float64()),
        pa.field("high", pa.string()),
        pa.field("joined", pa.string()),
    ]
)
KEYS = ("k", "j")
FOLDS: dict[str, Any] = {
    "total": lambda a, b: a + b,
    "low": min,
    "high": max,
    "joined": lambda a, b: a + b,
}
MERGES: dict[str, Merge] = {"total": total, "low": minimum, "high": maximum, "joined": RowMerge(FOLDS["joined"])}

texts = st.text(st.sampled_from("ab\u00e9"), max_size=2)
numbers = st.integers(-(10**6), 10**6)
row = st.tuples(
    texts, st.integers(0, 2), st.none() | numbers, st.none() | numbers.map(float), st.none() | texts, st.none() | texts
)
rows = st.lists(row, max_size=40)


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def plain(rows: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    held: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for k, j, *values in rows:
        before = held.get((k, j), (None,) * len(values))
        held[k, j] = tuple(
            b if a is None else a if b is None else FOLDS[name](a, b)
            for name, a, b in zip(FOLDS, before, values, strict=True)
        )
    return held


def found(table: pa.RecordBatch) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {(r["k"], r["j"]): tuple(r[name] for name in FOLDS) for r in table.to_pylist()}


@given(rows)
def test_one_row_a_key_is_the_fold_of_its_rows_in_order(given_rows: list[tuple[Any, ...]]) -> None:
    merged = one_row_a_key(batch(given_rows), KEYS, MERGES, "here")
    assert merged.schema == SCHEMA
    assert merged.num_rows == len({r[:2] for r in given_rows})
    assert found(merged) == plain(given_rows)


@given(rows)
def test_the_newest_of_each_key_wins(given_rows: list[tuple[Any, ...]]) -> None:
    merged = one_row_a_key(batch(given_rows), KEYS, dict.fromkeys(FOLDS, newest), "here")
    assert found(merged) == {r[:2]: r[2:] for r in given_rows}


@given(st.lists(rows, max_size=4), st.sampled_from(list(StateKind)), st.integers(1, 9))
def test_a_map_is_the_fold_of_its_txids(txids: list[list[tuple[Any, ...]]], kind: StateKind, cut: int) -> None:
    context = StateContext(SinkIdentity("t", "life", "s"), SCHEMA, KEYS, MERGES, epoch=1)
    state = MemoryMap(kind).make(context)
    for txid, given_rows in enumerate(txids, start=1):
        state.begin_commit(txid)
        for start in range(0, len(given_rows), cut):
            state.multi_update(batch(given_rows[start : start + cut]))
        state.commit(txid)
    truth = plain([r for given_rows in txids for r in given_rows])
    keys = pa.RecordBatch.from_arrays(
        [pa.array([k for k, _ in truth], pa.string()), pa.array([j for _, j in truth], pa.int32())], names=["k", "j"]
    )
    values = [tuple(r.values()) for r in state.multi_get(keys).to_pylist()]
    assert values == list(truth.values())
