"""Joins two sides whose rows are all there: the joined rows, and their anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.graph.join import OPEN_LEFT, JoinKind, JoinOn
from stormproof.core.tracking.share import Anchors, overlaid


@dataclass(frozen=True, slots=True)
class Joined:
    """The joined rows, their anchors for each subscriber, and the anchors of input rows that are in no result."""

    rows: pa.RecordBatch
    deliveries: list[Anchors]
    unmatched: list[Anchors]


def join_rows(
    on: JoinOn, left: tuple[pa.RecordBatch, Anchors], right: tuple[pa.RecordBatch, Anchors], subscribers: int
) -> Joined:
    """Join both sides.

    A joined row is anchored to both of its rows. Each input row's share is split over all joined rows that it is in, for all
    subscribers; the share of one that is in none is in `unmatched`.
    """
    at = matches(on, left[0], right[0])
    made = joined_rows(on, left[0], right[0], at)
    number = made.num_rows
    parts: list[list[tuple[Anchors, Rows]]] = [[] for _ in range(subscribers)]
    unmatched: list[Anchors] = []
    for (rows, anchors), of_side in zip((left, right), at, strict=True):
        there = np.flatnonzero(of_side >= 0)
        counts = np.bincount(of_side[there], minlength=rows.num_rows)
        unmatched.append(anchors.only(counts == 0))
        # The children of a row lie one after the other, in the order of the result.
        place = there[np.argsort(of_side[there], kind="stable")]
        for mine, given in zip(parts, anchors.deliveries(counts, subscribers), strict=True):
            mine.append((given, place))
    return Joined(made, [overlaid(number, mine) for mine in parts], unmatched)


def matches(on: JoinOn, left: pa.RecordBatch, right: pa.RecordBatch) -> tuple[Rows, Rows]:
    """The row number of each side for every joined row, in order of the left rows; -1 stands for no row.

    Keys are compared exactly. NULL matches nothing. Of duplicate keys each row is joined with each.
    """
    names = [f"k{i}" for i in range(len(on.keys))]
    one = pa.Table.from_arrays(
        [*(left.column(k) for k, _ in on.keys), pa.array(np.arange(left.num_rows))], names=[*names, "left"]
    )
    other = pa.Table.from_arrays(
        [*(right.column(k) for _, k in on.keys), pa.array(np.arange(right.num_rows))], names=[*names, "right"]
    )
    kind = {JoinKind.LEFT: "left outer", JoinKind.RIGHT: "right outer", JoinKind.FULL: "full outer"}.get(
        on.kind, "inner"
    )
    joined = one.join(other, keys=names, join_type=kind, use_threads=False)
    pairs = [pc.fill_null(joined.column(side), -1).to_numpy() for side in ("left", "right")]
    order = np.lexsort((pairs[1], np.where(pairs[0] < 0, left.num_rows, pairs[0])))
    return pairs[0][order], pairs[1][order]


def joined_rows(on: JoinOn, left: pa.RecordBatch, right: pa.RecordBatch, at: tuple[Rows, Rows]) -> pa.RecordBatch:
    """The joined rows."""
    one, other = (pa.array(rows, mask=rows < 0) for rows in at)
    columns: list[pa.Array] = []
    for left_key, right_key in on.keys:
        key = left.column(left_key).take(one)
        if on.kind in OPEN_LEFT:
            key = pc.if_else(pa.array(at[0] < 0), right.column(right_key).take(other), key)
        columns.append(key)
    left_keys, right_keys = (set(names) for names in zip(*on.keys, strict=True))
    columns += [left.column(name).take(one) for name in on.left.names if name not in left_keys]
    columns += [right.column(name).take(other) for name in on.right.names if name not in right_keys]
    return pa.RecordBatch.from_arrays(columns, schema=on.schema)
