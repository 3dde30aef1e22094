"""What a table by key must hold by the record of its commits: its number of rows, the sum of each column that is summed, and
the content of all rows.

Rows that are there twice, or that a file's removal left behind, are in none: so a table that has them differs. Contents add
up, so that of the table is what all commits put, less what they replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.folds import AnyFold, Fold
from stormproof.core.sink import PreparedFile
from stormproof.sinks.content import NOTHING, Content

_VERSION: Final = 2
"""Another one than that of `sinks.content`: a file has either."""
_EXACT: Final = Context(prec=200)
_WIDE_DIGITS: Final = 76
_HALF: Final = 32


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of a column's values, NULL being none: exact of integers and decimals. Of floats, `size` is the sum of their
    absolute values, by which the errors of rounding are bounded.
    """

    value: Decimal | float = Decimal(0)
    size: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        """The sum of both."""
        if isinstance(self.value, Decimal) and isinstance(other.value, Decimal):
            return Sum(_EXACT.add(self.value, other.value))
        return Sum(float(self.value) + float(other.value), self.size + other.size)

    def agrees(self, found: Sum, kind: pa.DataType, commits: int) -> bool | None:
        """Whether a table has this sum; None: its NaN or infinity does not tell. A float is rounded once in each commit."""
        if not isinstance(found.value, float):
            return self.value == found.value
        if not math.isfinite(found.value + self.size):
            return None
        precision = np.finfo(np.float32 if pa.types.is_float32(kind) else np.float64).eps
        return bool(abs(float(self.value) - found.value) <= (commits + _HALF) * precision * self.size)


@dataclass(frozen=True, slots=True)
class Totals:
    """Rows, sums and content after so many commits. None, or a column without a sum: it is not on record."""

    rows: int | None = 0
    sums: Mapping[str, Sum] = field(default_factory=dict[str, Sum])
    commits: int = 0
    content: Content | None = None

    def after(self, added: Mapping[str, Sum], inserted: int | None, change: Content | None = None) -> Totals:
        """After one more commit, which adds to these sums, and to the content what it put less what it replaced. The first
        one begins them, where the table was empty.
        """
        begins = not self.commits and self.rows == 0
        sums = added_up(added if begins else self.sums, dict.fromkeys(added, Sum()) if begins else added)
        before = NOTHING if begins else self.content
        content = None if before is None or change is None else _changed(before, change)
        return Totals(self.with_rows(inserted).rows, sums, self.commits + 1, content)

    def sum_of(self, name: str) -> Sum | None:
        """The sum of a column: 0 before the first commit to an empty table."""
        return Sum() if not self.commits and self.rows == 0 else self.sums.get(name)

    def with_rows(self, more: int | None) -> Totals:
        """With so many rows more; None: their number is not known."""
        return replace(self, rows=None if self.rows is None or more is None else self.rows + more)

    def to_text(self) -> str:
        """As a commit's evidence and a prepared file keep it."""
        sums = {
            name: [repr(one.value), repr(one.size)] if isinstance(one.value, float) else [str(one.value)]
            for name, one in self.sums.items()
        }
        content = {} if self.content is None else {"content": self.content.to_text()}
        return json.dumps({"v": _VERSION, "rows": self.rows, "commits": self.commits, "sums": sums, **content})

    @staticmethod
    def of_text(text: str | None) -> Totals | None:
        """The totals of such a text; None of any other."""
        said = json.loads(text) if text else None
        if not isinstance(said, dict) or said.get("v") != _VERSION:
            return None
        sums = {name: _sum_of(one) for name, one in said["sums"].items()}
        return Totals(said["rows"], sums, int(said["commits"]), Content.of_text(said.get("content")))


def _changed(before: Content, change: Content) -> Content | None:
    """None where the change does not cover a column, or by another type: the rows that it replaced were hashed with it."""
    if not change.kinds:  # no row
        return before
    return before + change if {*before.kinds} <= {*change.kinds} else None


def _sum_of(parts: Sequence[str]) -> Sum:
    return Sum(Decimal(parts[0])) if len(parts) == 1 else Sum(float(parts[0]), float(parts[1]))


def summed_columns(folds: Mapping[str, AnyFold]) -> list[str]:
    """The columns to which each batch adds."""
    return [name for name, fold in folds.items() if fold is Fold.SUM]


def sums_of(rows: pa.RecordBatch, names: Collection[str]) -> dict[str, Sum]:
    """The sums of a batch's columns."""
    return {name: _sum(rows.column(name)) for name in names}


def _sum(column: pa.Array) -> Sum:
    kind = column.type
    if pa.types.is_floating(kind):
        values = np.asarray(pc.fill_null(pc.cast(column, pa.float64()), 0.0))
        with np.errstate(all="ignore"):
            return Sum(float(values.sum()), float(np.abs(values).sum()))
    if pa.types.is_decimal(kind):
        found = pc.sum(pc.cast(column, pa.decimal256(_WIDE_DIGITS, kind.scale))).as_py()
        return Sum(Decimal(0) if found is None else found)
    # By halves, since Arrow's sum of 64 bits wraps.
    wide = pc.cast(column, pa.int64())
    high = pc.sum(pc.shift_right(wide, _HALF)).as_py() or 0
    low = pc.sum(pc.bit_wise_and(wide, (1 << _HALF) - 1)).as_py() or 0
    return Sum(Decimal((high << _HALF) + low))


def added_up(one: Mapping[str, Sum], other: Mapping[str, Sum]) -> dict[str, Sum]:
    """The sums of both, column by column, of the columns that both have."""
    return {name: found + other[name] for name, found in one.items() if name in other}


def sums_of_files(files: Collection[PreparedFile], names: Collection[str]) -> dict[str, Sum]:
    """What prepared files add; without the columns of which a file does not say it."""
    total = dict.fromkeys(names, Sum())
    for file in files:
        if file.rows:
            said = Totals.of_text(file.content)
            total = added_up(total, {} if said is None else said.sums)
    return total
