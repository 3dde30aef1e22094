"""Folds of every kind and type into any sink, beside what one batch of all rows would give."""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from stormproof.core.contract.fold import AnyFold, Fold
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.graph.aggregation import Aggregation, AggregationKind, GroupBy
from stormproof.core.graph.checks import fold_of
from stormproof.core.task.combine import combine, finish, merge
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity, SinkSession
from stormproof.trident.topology.aggregate import ReadyAggregate, kept_across_batches
from support.sink_harness import SinkHarness

NAN: Final = math.nan
NEGATIVE_NAN: Final = struct.unpack("<d", struct.pack("<Q", 0xFFF8 << 48))[0]
"""DataFusion orders it below all numbers, and NaN above them."""

TEXTS: Final = ["", "B", "a", "ab", "z", "\u00c4", "\uffff", "\U0001f600"]
"""By bytes; collations put "a" before "B", UTF-16 puts the last before the one before it."""

_FLOATS: Final = [NAN, NEGATIVE_NAN, math.inf, -math.inf, -0.25, 0.0, 1.5]
_DAY, _MICROSECOND = dt.timedelta(days=1), dt.timedelta(microseconds=1)
_NOON: Final = dt.datetime(1969, 12, 31, 12, tzinfo=dt.UTC)
_TIMES: Final = [_NOON - _DAY, _NOON, _NOON + _MICROSECOND, dt.datetime(2262, 5, 1, tzinfo=dt.UTC)]

VALUES: Final[Mapping[str, tuple[pa.DataType, Sequence[Any]]]] = {
    "int8": (pa.int8(), [-128, 0, 127]),
    "int16": (pa.int16(), [-(2**15), 0, 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), -1, 0, 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), -1, 0, 1, 2**53 + 1, 2**53, 2**63 - 1]),
    "float32": (pa.float32(), _FLOATS),
    "float64": (pa.float64(), [*_FLOATS, 0.1, 5e-324, 1.7976931348623157e308]),
    "text": (pa.string(), TEXTS),
    "bytes": (pa.binary(), [b"", b"\0", b"a", b"a\0", b"\x7f", b"\xff"]),
    "truth": (pa.bool_(), [False, True]),
    "day": (pa.date32(), [time.date() for time in _TIMES]),
    "time": (pa.timestamp("us"), [time.replace(tzinfo=None) for time in _TIMES]),
    "instant": (pa.timestamp("us", "UTC"), _TIMES),
    "price": (pa.decimal128(10, 2), [Decimal("-99999999.99"), Decimal("9.99"), Decimal("10.00")]),
    "exact": (pa.decimal128(38, 10), [Decimal("-" + "9" * 28), Decimal("1e-10"), Decimal("9" * 28)]),
}
"""Types that every sink folds, with values whose order is easily got wrong."""

GIVEN: Final = pa.schema([("key", pa.int64()), ("n", pa.int64()), *((n, t) for n, (t, _) in VALUES.items())])
_HOW: Final = {Fold.SUM: AggregationKind.SUM, Fold.MIN: AggregationKind.MIN, Fold.MAX: AggregationKind.MAX}


@dataclass(frozen=True)
class Folded:
    """Columns to fold: each by name, with the field that it is of and how."""

    columns: Mapping[str, tuple[str, Fold]]
    kept: Mapping[str, ReadyAggregate] = field(default_factory=dict[str, ReadyAggregate])
    """Aggregates that are kept in several columns."""

    @property
    def group(self) -> GroupBy:
        made = [Aggregation(name, _HOW[fold], of) for name, (of, fold) in self.columns.items()]
        kept = kept_across_batches([ready.named(name) for name, ready in self.kept.items()])
        made += [one for one in kept if isinstance(one, Aggregation)]
        schema = pa.schema([GIVEN.field("key"), *(a.result(GIVEN, "group") for a in made)])
        return GroupBy("group", ("key",), tuple(made), schema, GIVEN)

    @property
    def input(self) -> SinkInput:
        group = self.group
        return SinkInput.for_fold(group.schema, ("key",), {a.output: fold_of(a) for a in group.aggregations})

    def batch(self, rows: pa.RecordBatch, tasks: int = 2) -> pa.RecordBatch:
        """What a batch's job gives: combined in each task, merged behind the exchange."""
        group = self.group
        size = max(1, math.ceil(rows.num_rows / tasks))
        parts = [combine(group, rows.slice(start, size)) for start in range(0, rows.num_rows, size)]
        return finish(group, merge(group, parts or [group.partial.empty_table()]))


EVERYTHING: Final = Folded(
    {
        "total": ("n", Fold.SUM),
        **{f"{name}_lo": (name, Fold.MIN) for name in VALUES},
        **{f"{name}_hi": (name, Fold.MAX) for name in VALUES},
        "prices": ("price", Fold.SUM),
    }
)


def rows_of(rows: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as they are grouped; what is not given is NULL."""
    return pa.RecordBatch.from_pylist([{name: row.get(name) for name in GIVEN.names} for row in rows], GIVEN)


class FoldHarness(SinkHarness):
    """One sink that folds, and what it holds."""

    def take(self, folded: Folded, life: str = "inc-1") -> FoldHarness:
        """Fold these columns, in a life of this name."""
        self.input = folded.input
        self.identity = SinkIdentity("topology", life, "counts")
        return self

    def with_fold(self, **folds: AnyFold) -> None:
        """Break it: fold columns otherwise than asked."""
        self.input = replace(self.input, folds={**self.input.folds, **folds})

    def commit(self, session: SinkSession, txid: int, rows: pa.RecordBatch) -> None:
        """One batch's results as one transaction."""
        writer = session.writer().open_task(TaskContext(self.identity.incarnation, txid, 1, 0), rows.schema)
        assert session.writer().check(rows) == []
        if rows.num_rows:
            writer.write(rows)
        files = tuple(writer.close())
        transaction = PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), rows.num_rows, files)
        session.commit(transaction, checked=True)

    def commit_all(self, batches: Sequence[pa.RecordBatch]) -> dict[int, dict[str, Any]]:
        """Batch after batch; gives what is held in the end."""
        with closing(self.open()) as session:
            for txid, rows in enumerate(batches, start=1):
                self.commit(session, txid, rows)
        return self.content()

    def content(self) -> dict[int, dict[str, Any]]:
        """What the table holds now, by key."""
        found = self.values()
        assert len({row["key"] for row in found}) == len(found)
        return comparable(found)


def comparable(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows by key, with a NaN that equals itself."""
    return {
        row["key"]: {n: "NaN" if isinstance(v, float) and math.isnan(v) else v for n, v in row.items() if n != "key"}
        for row in rows
    }
