"""Joins of two streams within a batch: their kinds, and the columns of a joined row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.schema import refuse_twice, require_fields, require_key


class JoinKind(StrEnum):
    """What becomes of a row that has no partner."""

    INNER = "inner"
    """It is acked, and gives no row."""
    LEFT = "left"
    """A row of the left side goes on with NULLs; one of the right side is acked."""
    RIGHT = "right"
    """A row of the right side goes on with NULLs; one of the left side is acked."""
    FULL = "full"
    """It goes on with NULLs, whichever side it is from."""


OPEN_LEFT = frozenset({JoinKind.RIGHT, JoinKind.FULL})
"""Joins whose rows may lack the left side."""
OPEN_RIGHT = frozenset({JoinKind.LEFT, JoinKind.FULL})


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
        """A checked join.

        Raises:
            TopologyError: a key is unknown, cannot be a key or has another type on the other side, or both sides have a
                field of one name that is no key.
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
            require_fields(f"{where}, {side} side", component, list(names), schema)
            refuse_twice(f"{where}, {side} side", component, list(names))
        for one, other in keys.items():
            left_type, right_type = left.field(one).type, right.field(other).type
            if left_type != right_type:
                raise TopologyError(
                    f"{where}: key {one!r} is {left_type} on the left side, {other!r} is {right_type} on the right; make "
                    "them one type with map() before the join",
                    component=component,
                    field=one,
                )
            require_key(where, component, one, left_type)
        fields: list[pa.Field] = []
        for one, other in keys.items():
            sides = [left.field(one)] if how not in OPEN_LEFT else [right.field(other)]
            if how is JoinKind.FULL:
                sides.append(left.field(one))
            fields.append(left.field(one).with_nullable(any(f.nullable for f in sides)))
        fields += [f.with_nullable(f.nullable or how in OPEN_LEFT) for f in left if f.name not in keys]
        used = set(keys.values())
        fields += [f.with_nullable(f.nullable or how in OPEN_RIGHT) for f in right if f.name not in used]
        seen: set[str] = set()
        for f in fields:
            if f.name.lower() in seen:
                raise TopologyError(
                    f"{where}: both sides have a field {f.name!r}; give one of them another name before the join, "
                    f"with project(...), like .project('key', other_name={f.name!r})",
                    component=component,
                    field=f.name,
                )
            seen.add(f.name.lower())
        return cls(how, tuple(keys.items()), left, right, pa.schema(fields))
