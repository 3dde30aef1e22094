"""Values that no sink takes fail their own messages before anything is staged, at every sink and state."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.operated import Operated
from support.sink_harness import SinkHarness
from support.topologies import MAX_ATTEMPTS

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.rows.limits import Limits
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.map import newest
from stormproof.trident.state.postgres import PostgresMap
from stormproof.trident.state.sink import StateSink

pytestmark = pytest.mark.sampled(0.25)

NAME: Final = "values"
SCHEMA: Final = "word string, amount decimal(38,2), day date, at timestamp"
TOO_WIDE: Final = 2**127 - 1
NO_YEAR: Final = 2**31 - 1


def made(lines: pa.Array) -> pa.RecordBatch:
    """Row by row from bytes, as arithmetic in Arrow might make them; nothing looks at them on the way."""
    words = [str(line.as_py(), "ascii") if isinstance(line.as_py(), bytes) else line.as_py() for line in lines]
    amounts = [TOO_WIDE if word == "wide" else 150 for word in words]
    data = b"".join(amount.to_bytes(16, "little", signed=True) for amount in amounts)
    days = [NO_YEAR if word == "day" else 0 for word in words]
    times = [-(2**63) if word == "infinite" else 0 for word in words]
    return pa.record_batch(
        [
            pa.array(["a\0b" if word == "nul" else word for word in words], pa.string()),
            pa.Array.from_buffers(pa.decimal128(38, 2), len(words), [None, pa.py_buffer(data)]),
            pa.array(days, pa.int32()).view(pa.date32()),
            pa.array(times, pa.int64()).view(pa.timestamp("us", tz="UTC")),
        ],
        names=["word", "amount", "day", "at"],
    )


def built(operated: Operated) -> tuple[Topology, MemorySink]:
    topology = Topology(NAME)
    queue = PostgresQueue(
        NAME, database=operated.cell.database, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001, backoff_max_s=0.001
    )
    rows = topology.stream("lines", queue).arrow(
        lambda batch: (made(batch.column(0)), pa.array(range(batch.num_rows))), "line", schema=SCHEMA
    )
    lake, memory = operated.cell.folder / "lake", MemorySink("memory")
    for sink in (memory, DeltaSink(lake / "rows", name="delta"), PostgresSink("rows", name="postgres")):
        rows.into(sink)
    merges: dict[str, Callable[..., Any]] = dict.fromkeys(("amount", "day", "at"), newest)
    for name, factory in (("in_delta", DeltaMap(lake / "map")), ("in_postgres", PostgresMap("map"))):
        rows.into(StateSink(name, factory, keys=("word",), merges=merges))
    return topology, memory


@pytest.mark.postgres
def test_each_such_message_is_a_dead_letter_and_the_rest_is_everywhere(operated: Operated) -> None:
    bad, good = ["wide", "day", "infinite", "nul"], ["a", "b", "c"]
    topology, memory = built(operated)
    operated.put(*[word.encode() for word in (*good, *bad)])
    operated.run(topology)
    dead = operated.sql("select reason, payload from stormproof.dead_letter")
    assert {reason for reason, _ in dead} == {"sink_error"}
    assert len(dead) == len(bad)
    for folder in ("rows", "map"):
        table = DeltaTable(operated.cell.folder / "lake" / folder)
        assert sorted(table.to_pyarrow_table()["word"].to_pylist()) == good
    for name in ("rows", "map"):
        assert [word for (word,) in operated.sql(f"select word from {name} order by word")] == good
    assert sorted(str(row["word"]) for row in memory.rows()) == good
    assert operated.verify(4)["violations"] == []  # what lies in memory cannot be told


def test_control_unchecked_a_delta_table_stores_39_digits(tmp_path: Any) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    schema = made(pa.array(["a"])).schema
    session = harness.sink.open(harness.identity, SinkInput(schema), 1)
    rows = made(pa.array(["wide"]))
    assert [row for row, _ in session.writer().check(rows)] == [0]
    assert Limits().check(made(pa.array(["a"]))) == []


def test_a_merge_that_would_store_39_digits_is_refused(tmp_path: Any) -> None:
    kind = pa.decimal128(38, 0)
    schema = pa.schema([pa.field("word", pa.string()), pa.field("n", kind)])
    harness = SinkHarness("delta-fold", tmp_path, None)
    harness.input = SinkInput.for_fold(schema, ("word",), {"n": Fold.SUM})
    session = harness.open()
    from stormproof.core.contract.sink import TaskContext, transaction_digest
    from stormproof.sinks.contract.protocol import PreparedTransaction

    def prepared(txid: int, n: int) -> PreparedTransaction:
        writer = session.writer().open_task(TaskContext("inc-1", txid, 1, 0), schema)
        writer.write(pa.record_batch([pa.array(["a"]), pa.array([Decimal(n)], kind)], schema=schema))
        files = tuple(writer.close())
        return PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), 1, files)

    session.commit(prepared(1, 6 * 10**37), checked=True)
    with pytest.raises(SinkRefused, match="it violates the range of its column 'n'"):
        session.commit(prepared(2, 6 * 10**37), checked=True)
    session.commit(prepared(2, 3 * 10**37), checked=True)
    assert DeltaTable(harness.delta_path).to_pyarrow_table()["n"].to_pylist() == [Decimal(9 * 10**37)]
