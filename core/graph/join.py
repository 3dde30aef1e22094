"""Joins of two streams within a batch: which rows of one side go with which of the other, and what anchors the pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.compute import pc
from stormproof.core.errors import TopologyError
from stormproof.core.graph.keyhash import can_be_key
from stormproof.core.tracking.anchors import Anchors, overlaid


class JoinKind(StrEnum):
    """What becomes of a row that has no partner."""

    INNER = "inner"
    """It is acked, and gives nothing."""
    LEFT = "left"
    """One of the left side goes on with NULLs; one of the right is acked."""
    RIGHT = "right"
    FULL = "full"
    """It goes on with NULLs, whichever side it is of."""


@dataclass(frozen=True, slots=True)
class JoinOn:
    """What is joined, and how. `keys` are the left side's fields and their partners on the right side.

    The result has the keys, by the left side's names, then the other fields of the left, then those of the right side.
    """

    kind: JoinKind
    keys: tuple[tuple[str, str], ...]
    left: pa.Schema
    right: pa.Schema
    schema: pa.Schema

    @classmethod
    def of(cls, component: str, kind: str, keys: Mapping[str, str], left: pa.Schema, right: pa.Schema) -> JoinOn:
        """A join that was checked.

        Raises:
            TopologyError: a key is unknown, cannot be one or has another type on the other side, or both sides have
                another field of one name.
        """
        where = f"component {component!r}"
        try:
            how = JoinKind(kind)
        except ValueError:
            known = ", ".join(JoinKind)
            raise TopologyError(f"{where}: no join {kind!r}; known: {known}", component=component) from None
        if not keys:
            raise TopologyError(
                f"{where}: a join needs at least one key; known: {', '.join(left.names)}", component=component
            )
        for names, schema, side in ((keys.keys(), left, "left"), (keys.values(), right, "right")):
            for name in names:
                if name not in schema.names:
                    known = ", ".join(schema.names)
                    raise TopologyError(
                        f"{where}: unknown field {name!r} on the {side} side; known: {known}",
                        component=component,
                        field=name,
                    )
            if len(set(names)) != len(names):
                raise TopologyError(f"{where}: a key of the {side} side stands twice", component=component)
        for one, other in keys.items():
            left_type, right_type = left.field(one).type, right.field(other).type
            if left_type != right_type:
                raise TopologyError(
                    f"{where}: key {one!r} is {left_type} on the left side, {other!r} is {right_type} on the right; make "
                    "them one type with map() before the join",
                    component=component,
                    field=one,
                )
            if not can_be_key(left_type):
                raise TopologyError(
                    f"{where}: field {one!r} is {left_type}, which can't be a key: its values do not compare alike "
                    "everywhere; use a string, an integer, a decimal, a date or a boolean",
                    component=component,
                    field=one,
                )
        fields: list[pa.Field] = []
        for one, other in keys.items():
            sides = [left.field(one)] if how not in _OPEN_LEFT else [right.field(other)]
            if how is JoinKind.FULL:
                sides.append(left.field(one))
            fields.append(left.field(one).with_nullable(any(f.nullable for f in sides)))
        fields += [f.with_nullable(f.nullable or how in _OPEN_LEFT) for f in left if f.name not in keys]
        used = set(keys.values())
        fields += [f.with_nullable(f.nullable or how in _OPEN_RIGHT) for f in right if f.name not in used]
        seen: set[str] = set()
        for field in fields:
            if field.name.lower() in seen:
                raise TopologyError(
                    f"{where}: both sides have a field {field.name!r}; give one of them another name before the join, "
                    f"with project(...), like .project('key', other_name={field.name!r})",
                    component=component,
                    field=field.name,
                )
            seen.add(field.name.lower())
        return cls(how, tuple(keys.items()), left, right, pa.schema(fields))

    def matches(self, left: pa.RecordBatch, right: pa.RecordBatch) -> tuple[Rows, Rows]:
        """The row numbers of each side in the result, left rows first and in order; -1 stands for no row.

        Keys are compared exactly; NULL matches nothing; duplicates multiply.
        """
        names = [f"k{i}" for i in range(len(self.keys))]
        one = pa.Table.from_arrays(
            [*(left.column(k) for k, _ in self.keys), pa.array(np.arange(left.num_rows))], names=[*names, "left"]
        )
        other = pa.Table.from_arrays(
            [*(right.column(k) for _, k in self.keys), pa.array(np.arange(right.num_rows))], names=[*names, "right"]
        )
        kind = {JoinKind.LEFT: "left outer", JoinKind.RIGHT: "right outer", JoinKind.FULL: "full outer"}.get(
            self.kind, "inner"
        )
        joined = one.join(other, keys=names, join_type=kind, use_threads=False)
        pairs = [pc.fill_null(joined.column(side), -1).to_numpy() for side in ("left", "right")]
        order = np.lexsort((pairs[1], np.where(pairs[0] < 0, left.num_rows, pairs[0])))
        return pairs[0][order], pairs[1][order]

    def rows(self, left: pa.RecordBatch, right: pa.RecordBatch, at: tuple[Rows, Rows]) -> pa.RecordBatch:
        """The joined rows."""
        one, other = (pa.array(rows, mask=rows < 0) for rows in at)
        columns: list[pa.Array] = []
        for left_key, right_key in self.keys:
            key = left.column(left_key).take(one)
            if self.kind in _OPEN_LEFT:
                key = pc.if_else(pa.array(at[0] < 0), right.column(right_key).take(other), key)
            columns.append(key)
        left_keys, right_keys = (set(names) for names in zip(*self.keys, strict=True))
        columns += [left.column(name).take(one) for name in self.left.names if name not in left_keys]
        columns += [right.column(name).take(other) for name in self.right.names if name not in right_keys]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


_OPEN_LEFT = frozenset({JoinKind.RIGHT, JoinKind.FULL})
"""Joins whose rows may lack the left side."""
_OPEN_RIGHT = frozenset({JoinKind.LEFT, JoinKind.FULL})


@dataclass(frozen=True, slots=True)
class Joined:
    """The result: rows, what each subscriber's are anchored to, and the anchors of rows that gave nothing."""

    rows: pa.RecordBatch
    deliveries: list[Anchors]
    unmatched: list[Anchors]


def join_rows(
    on: JoinOn, left: tuple[pa.RecordBatch, Anchors], right: tuple[pa.RecordBatch, Anchors], subscribers: int
) -> Joined:
    """Join both sides. A result row is anchored to both of its rows: each row's share is split over all the results that
    it is in, for all subscribers; so the shares of a row with no result are in `unmatched`, once.
    """
    at = on.matches(left[0], right[0])
    made = on.rows(left[0], right[0], at)
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
