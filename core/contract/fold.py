"""How a column's new value is merged with the one that a sink holds for its key; and rows of groups in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import Json


class Fold(StrEnum):
    """A fold that looks at its own column alone."""

    SUM = "sum"
    """Added; counts are sums of ones."""
    MIN = "min"
    """The smaller one; NULL is none."""
    MAX = "max"
    """The greater one; NULL is none."""
    OWN = "own"
    """By a function of the user's, which only a state can call."""


class End(StrEnum):
    """Which of two rows is meant."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class ByOrder:
    """The column's value in the first or the last of two rows, by the columns `compared`, the weightiest first. All columns
    of one result are compared alike, so they come from one row.

    NULL and NaN are at the far end, NULL behind NaN: neither is first or last where there is another value. Rows that are
    equal in all columns `compared` are equal in all columns of the result.
    """

    end: End
    compared: tuple[str, ...]

    def __str__(self) -> str:
        """For people."""
        return f"{self.end} by {', '.join(self.compared)}"


@dataclass(frozen=True, slots=True)
class SetUnion:
    """The `at_most` least values of both sets, as a sorted array without NULL."""

    at_most: int

    def __str__(self) -> str:
        """For people."""
        return f"union of sets of at most {self.at_most}"


@dataclass(frozen=True, slots=True)
class SetTruncated:
    """Whether the set in the column `of` had more than `at_most` values, so that the greatest were left out."""

    of: str
    at_most: int

    def __str__(self) -> str:
        """For people."""
        return f"mark that {self.of} has more than {self.at_most} values"


AnyFold: TypeAlias = Fold | ByOrder | SetUnion | SetTruncated


def fold_to_json(fold: AnyFold) -> Json:
    """A fold as ledger and graph keep it."""
    match fold:
        case Fold():
            return fold.value
        case ByOrder():
            return {"fold": fold.end.value, "compared": [*fold.compared]}
        case SetUnion():
            return {"fold": "set", "at_most": fold.at_most}
        case SetTruncated():
            return {"fold": "truncated", "of": fold.of, "at_most": fold.at_most}


def fold_from_json(found: Json) -> AnyFold:
    """The fold that `fold_to_json` described.

    Raises:
        ValueError: it is none that this version knows.
    """
    if not isinstance(found, dict):
        return Fold(str(found))
    match found:
        case {"fold": "set", "at_most": int(at_most)}:
            return SetUnion(at_most)
        case {"fold": "truncated", "of": str(of), "at_most": int(at_most)}:
            return SetTruncated(of, at_most)
        case {"fold": ("first" | "last") as end, "compared": list(compared)}:
            return ByOrder(End(str(end)), tuple(str(name) for name in compared))
        case _:
            raise ValueError(f"this version knows no fold {found!r}; a newer one recorded it")


def row_of_groups(group_of_row: Rows, compared: Sequence[pa.Array | pa.ChunkedArray], end: End) -> Rows:
    """The number of one row for each group that has rows, in the order of the groups' numbers. See `ByOrder`."""
    names = [str(number) for number in range(len(compared))]
    table = pa.Table.from_arrays([pa.array(group_of_row), *compared], names=["group", *names])
    # Arrow puts NULL and NaN behind all other values, whatever the direction.
    direction = "ascending" if end is End.FIRST else "descending"
    order = pc.sort_indices(
        table, sort_keys=[("group", "ascending"), *((name, direction) for name in names)]
    ).to_numpy()
    groups = group_of_row[order]
    begins = np.concatenate(([True], groups[1:] != groups[:-1])) if len(groups) else np.zeros(0, np.bool_)
    found: Rows = order[begins].astype(np.int64)
    return found


def sets_of_groups(group_of_row: Rows, values: pa.Array, groups: int, at_most: int | None = None) -> pa.ListArray:
    """The distinct values of each group as a sorted list without NULL; only the `at_most` least ones."""
    table = pa.table({"group": pa.array(group_of_row), "value": values})
    if values.null_count:
        table = table.filter(values.is_valid())
    distinct = table.group_by(["group", "value"], use_threads=False).aggregate([])
    distinct = distinct.sort_by([("group", "ascending"), ("value", "ascending")])
    found = distinct.column("group").to_numpy()
    starts = np.searchsorted(found, np.arange(groups + 1))
    if at_most is not None:
        rank = np.arange(len(found)) - starts[found]
        distinct = distinct.filter(pa.array(rank < at_most))
        starts = np.concatenate(([0], np.cumsum(np.minimum(np.diff(starts), at_most))))
    flat = distinct.column("value").combine_chunks()
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), flat)
