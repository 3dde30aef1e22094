"""Rows of any schema through a sink, and what Arrow's edges of each type are."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.sinks.contract.protocol import PreparedTransaction, Sink, SinkIdentity

IDENTITY: Final = SinkIdentity("topology", "inc-1", "t")


def put(sink: Sink, rows: pa.Table, input_: SinkInput | None = None, *, txid: int = 1) -> None:
    """One transaction of these rows, through the checks of the writer stage, in a session of its own."""
    input_ = input_ or SinkInput(rows.schema)
    identity = SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, sink.name)
    with closing(sink.open(identity, input_, txid)) as session:
        writer = session.writer()
        task = writer.open_task(TaskContext(identity.incarnation, txid, 1, 0), rows.schema)
        for batch in rows.combine_chunks().to_batches():
            assert writer.check(batch) == []
            task.write(batch)
        files = tuple(task.close())
        held = session.held()
        previous = None if held is None else held.txid
        made = PreparedTransaction(txid, previous, transaction_digest(files), rows.num_rows, files)
        session.commit(made, checked=True)
        session.finished(made)


def decimals(precision: int, scale: int) -> pa.Array:
    """The greatest, the least, the smallest ones, zero and NULL."""
    digits = "9" * precision
    most, least = Decimal(f"{digits}E-{scale}"), Decimal(f"-{digits}E-{scale}")
    return pa.array([most, least, Decimal(f"1E-{scale}"), Decimal(0), None], pa.decimal128(precision, scale))


TIMES: Final = (
    dt.datetime(1, 1, 1),  # noqa: DTZ001 - Arrow takes them for UTC
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    dt.datetime(2026, 3, 29, 2, 30, 0, 1),  # noqa: DTZ001 - an hour that a zone may skip
    None,
)
DAYS: Final = (dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1582, 10, 10), dt.date(1969, 12, 31), None)
TEXTS: Final = ("", "\U0010ffff", 'q"\\\n\t\u2028', "ß" * 40, None)
FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, None)
_UTC: Final = pa.timestamp("us", tz="UTC")


def instants(*values: Any) -> pa.Array:
    return pa.array(values, pa.timestamp("us")).cast(_UTC)


EDGES: Final[Mapping[str, pa.Array]] = {
    "string": pa.array(TEXTS),
    "binary": pa.array([b"", b"\x00\xff", b"a" * 50, b"'\\", None]),
    "boolean": pa.array([True, False, None, True, None]),
    "tinyint": pa.array([-(2**7), 2**7 - 1, 0, -1, None], pa.int8()),
    "smallint": pa.array([-(2**15), 2**15 - 1, 0, -1, None], pa.int16()),
    "int": pa.array([-(2**31), 2**31 - 1, 0, -1, None], pa.int32()),
    "bigint": pa.array([-(2**63), 2**63 - 1, 2**53 + 1, -1, None], pa.int64()),
    "float": pa.array([*FLOATS[:4], 0.1], pa.float32()),
    "double": pa.array([*FLOATS[:4], 5e-324], pa.float64()),
    "decimal(38,0)": decimals(38, 0),
    "decimal(38,38)": decimals(38, 38),
    "decimal(38,10)": decimals(38, 10),
    "decimal(5,2)": decimals(5, 2),
    "date": pa.array(DAYS, pa.date32()),
    "timestamp": instants(*TIMES),
    "timestamp_ntz": pa.array(TIMES, pa.timestamp("us")),
    "array<string>": pa.array([["", None, "a,b"], [], None, ['"', "\\", "NULL"], ["{}"]]),
    "array<bigint>": pa.array([[2**63 - 1, None], [], None, [-(2**63)], [0]]),
    "array<timestamp>": pa.array(
        [[TIMES[0], None], [], None, [TIMES[1], TIMES[2], TIMES[3]], [None]], pa.list_(pa.timestamp("us"))
    ).cast(pa.list_(_UTC)),
    "array<array<int>>": pa.array(
        [[[1], [], None], [], None, [None], [[1, None], [2]]], pa.list_(pa.list_(pa.int32()))
    ),
    "map<string, double>": pa.array(
        [[("a", 1.5), ("", None)], [], None, [('"', -1.0)], [("b", 2.0)]], pa.map_(pa.string(), pa.float64())
    ),
    "struct<x: int, s: struct<t: string, d: date>>": pa.array(
        [
            {"x": 1, "s": {"t": 'a"', "d": DAYS[0]}},
            {"x": None, "s": None},
            None,
            {"x": 2, "s": {"t": None, "d": None}},
            {"x": 3, "s": {"t": "", "d": DAYS[1]}},
        ],
        pa.struct([("x", pa.int32()), ("s", pa.struct([("t", pa.string()), ("d", pa.date32())]))]),
    ),
    "array<struct<k: string, v: decimal(9,2)>>": pa.array(
        [[{"k": "a", "v": Decimal("1.50")}, None], [], None, [{"k": None, "v": None}], []],
        pa.list_(pa.struct([("k", pa.string()), ("v", pa.decimal128(9, 2))])),
    ),
}
"""Five rows of each type of a schema; the empty, the extreme and the odd values of it."""


def edge_table() -> pa.Table:
    """All of them as one table, with a number for each row."""
    columns = {f"c{i}": column for i, column in enumerate(EDGES.values())}
    return pa.table({"i": pa.array(range(5), pa.int32()), **columns})
