"""The content digest of rows: equal for the same rows in any order, any files and any batches.

The digest of a multiset of rows is the sum, modulo 2^64, of a 64-bit hash of each row, with the number of rows beside it:
the multiset hash by addition of Clarke, Devadas, van Dijk, Gassend and Suh (ASIACRYPT 2003, MSet-Add-Hash). A sum sees a row
that comes twice, to which an XOR is blind. Digests of disjoint sets of rows add up, so rows may be moved from file to file.

A row's hash is made of its values in order of their columns' names: a NULL is passed over, so that a column which the table
got later changes no digest, nor does the order of the columns. The values are hashed in columns: each step is a bijection of
its value, so that a change of a single value of 8 bytes always changes the row's hash. The finaliser of splitmix64 (Steele,
Lea and Flood, OOPSLA 2014) ends it.

An accidental change goes unnoticed with a probability of about 2^-64. The hash has no secret key: the digest is no defence
against somebody who computes rows to fit it.

What a table by key must hold by the record of its commits (`Totals`) is its number of rows, the sum of each column that is
summed, and the content of all rows. Rows that are there twice, or that a file's removal left behind, are in none: so a table
that has them differs. Contents add up, so that of the table is what all commits put, less what they replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.contract.fold import AnyFold, Fold
from stormproof.core.contract.sink import PreparedFile
from stormproof.core.tracking.share import GAMMA, mix64
from stormproof.sinks.rows.limits import is_bytes, is_string, plain

MODULUS: Final = 1 << 64
_FACTOR: Final = np.uint64(0xD1B54A32D192ED03)
BLOCK_ROWS: Final = 16 * 1024
"""Rows that are hashed at once: their columns stay in the processor's cache."""
_WORDS_MAX: Final = 64
"""Words of 8 bytes of a text that are hashed in columns. What a text has beyond them is hashed by BLAKE2b."""
_HALF: Final = np.uint64(32)
_THREE: Final = np.uint64(3)
_SEVEN: Final = np.uint64(7)
_WORD_BITS: Final = np.uint64(64)
_SHIFTS: Final = np.array([0, *range(56, -1, -8)], np.uint64)
"""By how much a word is shifted that has so many bytes of a text: the others are not its own."""
_DECIMAL: Final = re.compile(r"decimal\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Content:
    """How many rows, the sum of their hashes, and the kinds of the columns that they were hashed by."""

    rows: int
    total: int
    kinds: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Rows and sum as a text; equal texts, equal contents, where the columns are the same."""
        return f"{self.rows}:{self.total:016x}"

    def to_text(self) -> str:
        """All of it, as the ledger and a sink's evidence keep it."""
        return json.dumps({"v": 1, "rows": self.rows, "sum": f"{self.total:016x}", "columns": dict(self.kinds)})

    @staticmethod
    def of_text(text: str | None) -> Content | None:
        """The content of such a text; None of an empty one, and of one of another version."""
        if not text:
            return None
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("v") != 1:
            return None
        return Content(int(found["rows"]), int(found["sum"], 16), tuple(sorted(found["columns"].items())))

    def __add__(self, other: Content) -> Content:
        """The content of both.

        Raises:
            ValueError: a column is of one kind here and of another there.
        """
        kinds = self.kinds if self.kinds == other.kinds else joined(self.kinds, other.kinds)
        return Content(self.rows + other.rows, (self.total + other.total) % MODULUS, kinds)

    def __neg__(self) -> Content:
        """What is added to a content to take this one away."""
        return Content(-self.rows, -self.total % MODULUS, self.kinds)


NOTHING: Final = Content(0, 0)
"""The content of no rows."""


def joined(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The columns of two contents.

    Raises:
        ValueError: a column is of one kind here and of another there.
    """
    found = dict(one)
    for name, kind in other:
        if found.setdefault(name, kind) != kind:
            raise ValueError(f"column {name!r} was {found[name]}, and is {kind}")
    return tuple(sorted(found.items()))


def kind_of(type_: pa.DataType) -> str | None:
    """The kind of a column of this type; None where its values cannot be hashed."""
    if isinstance(type_, pa.BaseExtensionType):
        return None
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_boolean(type_) or (pa.types.is_integer(type_) and not pa.types.is_uint64(type_)):
        return "integer"
    if pa.types.is_floating(type_):
        return "float"
    if is_string(type_):
        return "text"
    if is_bytes(type_):
        return "bytes"
    if pa.types.is_date(type_):
        return "date"
    if pa.types.is_timestamp(type_):
        return "timestamp"
    if pa.types.is_decimal128(type_) and type_.scale >= 0:
        return f"decimal({type_.scale})"
    return None


def kinds_of(schema: pa.Schema, columns: Sequence[str] | None = None) -> tuple[tuple[str, str], ...]:
    """The columns of a schema that a digest covers, in order of their names, with their kinds."""
    kinds = ((field.name, kind_of(field.type)) for field in schema if columns is None or field.name in columns)
    return tuple(sorted((name, kind) for name, kind in kinds if kind is not None))


class ContentSum:
    """Adds up the content of record batches."""

    def __init__(self, kinds: Sequence[tuple[str, str]]) -> None:
        self._kinds = tuple(sorted(kinds))
        self._rows = self._total = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the rows of a batch.

        Raises:
            ArrowInvalid: a value cannot be brought into its column's kind.
        """
        for at in range(0, rows.num_rows, BLOCK_ROWS):
            block = rows.slice(at, BLOCK_ROWS)
            self._rows += block.num_rows
            self._total = (self._total + int(row_hashes(block, self._kinds).sum())) % MODULUS

    @property
    def content(self) -> Content:
        """The content of the rows so far."""
        return Content(self._rows, self._total, self._kinds)


def content_of(rows: pa.Table, kinds: Sequence[tuple[str, str]]) -> Content:
    """The content of a table's rows."""
    total = ContentSum(kinds)
    for batch in rows.to_batches():
        total.add(batch)
    return total.content


def content_by(rows: pa.RecordBatch, kinds: Sequence[tuple[str, str]], by: str) -> dict[int | None, Content]:
    """The content of a batch's rows for each value of a column of integers."""
    column = pc.cast(rows.column(by), pa.int64())
    unknown = np.asarray(column.is_null())
    values, group = np.unique(np.asarray(column.fill_null(-1)), return_inverse=True)
    group = np.where(unknown, len(values), group)
    kinds = tuple(sorted(kinds))
    names: list[int | None] = [*map(int, values), None]
    totals, counts = np.zeros(len(names), np.uint64), np.bincount(group, minlength=len(names))
    for at in range(0, rows.num_rows, BLOCK_ROWS):
        block = rows.slice(at, BLOCK_ROWS)
        np.add.at(totals, group[at : at + block.num_rows], row_hashes(block, kinds))
    return {
        name: Content(int(count), int(total), kinds)
        for name, count, total in zip(names, counts, totals, strict=True)
        if count
    }


def row_hashes(rows: pa.RecordBatch, kinds: Sequence[tuple[str, str]]) -> Words:
    """A hash of each row. A column that the rows lack is NULL in all of them. `kinds` are in order of their names."""
    hashes = np.full(rows.num_rows, GAMMA, np.uint64)
    names = rows.schema.names
    for name, kind in kinds:
        if name not in names:
            continue
        column = rows.column(name)
        if column.null_count == len(column):
            continue
        words = _words_of(column, kind)
        before = hashes.copy() if column.null_count else None
        factor, start = _keys(name)
        words ^= start
        hashes ^= words
        _step(hashes, factor, words)
        if before is not None:  # the value in a NULL's place is arbitrary
            hashes = np.where(np.asarray(column.is_null()), before, hashes)
    return mix64(hashes)


def _step(hashes: Words, factor: np.uint64, scratch: Words) -> None:
    """Multiply and fold, in place: a bijection."""
    hashes *= factor
    np.right_shift(hashes, _HALF, out=scratch)
    hashes ^= scratch


@cache
def _keys(name: str) -> tuple[np.uint64, np.uint64]:
    """An odd factor and a start for a column, by its name."""
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u8")
    return np.uint64(words[0] | np.uint64(1)), np.uint64(words[1])


def _words_of(column: pa.Array, kind: str) -> Words:
    """A word for each value, a new array; that of a NULL is arbitrary."""
    if kind in ("text", "bytes"):
        return _texts(column)
    column = plain(column)
    if kind == "float":
        numbers = np.asarray(pc.fill_null(pc.cast(column, pa.float64()), 0.0)) + 0.0  # -0.0 is 0.0
        unordered = np.isnan(numbers)
        if unordered.any():
            numbers[unordered] = np.nan
        return numbers.view(np.uint64)
    if (scale := _DECIMAL.fullmatch(kind)) is not None:
        return _decimals(pc.cast(column, pa.decimal128(38, int(scale[1]))))
    if kind == "date":
        column = pc.cast(pc.cast(column, pa.date32()), pa.int32())
    elif kind == "timestamp":
        column = pc.cast(pc.cast(column, pa.timestamp("us", column.type.tz)), pa.int64())
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    if column.null_count:
        column = pc.fill_null(column, 0)
    return np.array(column, dtype=np.int64).view(np.uint64)


def _decimals(column: pa.Array) -> Words:
    halves = np.frombuffer(column.buffers()[1], np.uint64)
    pairs = halves[2 * column.offset : 2 * (column.offset + len(column))].reshape(-1, 2)
    return mix64(pairs[:, 0]) + pairs[:, 1] * _FACTOR


def _texts(column: pa.Array) -> Words:
    if pa.types.is_dictionary(column.type):
        if not len(column.dictionary):
            return np.zeros(len(column), np.uint64)
        places: Rows = np.asarray(column.indices.fill_null(0)).astype(np.int64)
        return _texts(column.dictionary)[places]
    column = plain(column)
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32)[column.offset :][: len(column) + 1]
    first, size = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
    # Whole words, and one more, since a text may begin at any byte of one.
    padded = np.empty(size // 8 + 2, np.uint64)
    padded[-2:] = 0
    if size and data is not None:
        padded.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)[first : first + size]
    return _bytes(padded, (offsets[:-1] - first).astype(np.int64), np.diff(offsets).astype(np.int64))


def _bytes(data: Words, starts: Rows, lengths: Rows) -> Words:
    """A hash of each value's bytes, by words of 8 bytes."""
    hashes = lengths.view(np.uint64) * GAMMA
    rows: Rows | None = None  # the rows that have bytes left, where those are not all
    at, left, down = starts >> 3, lengths, (starts.view(np.uint64) & _SEVEN) << _THREE
    here = data.take(at, mode="clip")
    for _ in range(_WORDS_MAX):
        shortest = int(left.min(initial=8))
        if shortest <= 0:
            chosen = np.flatnonzero(left > 0)
            if not len(chosen):
                return hashes
            rows = chosen if rows is None else rows[chosen]
            at, left, down, here, shortest = at[chosen], left[chosen], down[chosen], here[chosen], 1
        at = at + 1
        following = data.take(at, mode="clip")
        word = here >> down
        word |= following << (_WORD_BITS - down)  # a shift by all bits gives 0
        here = following
        if shortest < 8:
            word <<= _SHIFTS.take(left, mode="clip")
        if rows is None:
            hashes ^= word
            _step(hashes, _FACTOR, word)
        else:
            word ^= hashes[rows]
            _step(word, _FACTOR, np.empty_like(word))
            hashes[rows] = word
        left = left - 8
    starts = starts + 8 * _WORDS_MAX
    for i in np.flatnonzero(left > 0):
        row = i if rows is None else rows[i]
        text = data.view(np.uint8)[starts[row] : starts[row] + left[i]]
        rest = np.frombuffer(hashlib.blake2b(text.tobytes(), digest_size=8).digest(), "<u8")
        hashes[row] = mix64(hashes[row : row + 1] ^ rest)[0]
    return hashes


_VERSION: Final = 2
"""Another one than that of `sinks.rows.content`: a file has either."""
_EXACT: Final = Context(prec=200)
_WIDE_DIGITS: Final = 76
_HALF_BITS: Final = 32


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
        return bool(abs(float(self.value) - found.value) <= (commits + _HALF_BITS) * precision * self.size)


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
    high = pc.sum(pc.shift_right(wide, _HALF_BITS)).as_py() or 0
    low = pc.sum(pc.bit_wise_and(wide, (1 << _HALF_BITS) - 1)).as_py() or 0
    return Sum(Decimal((high << _HALF_BITS) + low))


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


def content_of_files(files: Collection[PreparedFile]) -> Content | None:
    """The content of prepared files; None where one of them has no digest, or their columns differ in kind."""
    total: Content | None = None
    for file in files:
        if not file.rows:
            continue
        content = Content.of_text(file.content)
        if content is None:
            return None
        try:
            total = content if total is None else total + content
        except ValueError:
            return None
    return Content(0, 0) if total is None else total
