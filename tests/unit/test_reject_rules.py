"""Which messages a commit rejects, how many it may reject, and what a run does with them; in memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.memory_run import World
from support.named_rows import with_messages

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import MESSAGE_COLUMNS, SinkInput, SinkMode, TaskContext
from stormproof.core.tracking.share import MANY, Anchors, MetMessages
from stormproof.sinks.contract.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.prepare.rejected_messages import Rejects, RowMessages
from stormproof.sinks.prepare.staging import prepared_batches
from stormproof.sinks.prepare.writer import FileWriter, WritesNothing
from stormproof.sinks.stores.memory import FaultPoint
from stormproof.trident.driver.batch_records import ALWAYS, WINDOW, RejectLimit
from stormproof.trident.ledger import tables as t

SCHEMA = pa.schema([("n", pa.int64())])
APPEND = SinkInput(SCHEMA)


def table_of(*ids: int) -> MetMessages:
    messages = MetMessages()
    messages.append(np.array(ids, np.int64), np.array([100 + id_ for id_ in ids], np.int64))
    return messages


def prepared(folder: Path, rows: pa.RecordBatch, task: int = 0) -> PreparedTransaction:
    writer = FileWriter("s", str(folder), names_messages=True).open_task(TaskContext("i", 1, 1, task), rows.schema)
    writer.write(rows)
    files = tuple(writer.close())
    return PreparedTransaction(1, None, "d", rows.num_rows, files)


def numbers(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)


def rows_of(pairs: list[tuple[int, int]], rows: int) -> Anchors:
    """Anchors by (row, place of the message in the table)."""
    row, message = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    return Anchors(rows, row, message, None)


def refuse(transaction: PreparedTransaction, row: int) -> RefusedRow:
    return RefusedRow(transaction.files[0].path, row, "{}", "23514", "no")


def left_out(folder: Path, transaction: PreparedTransaction, *rows: int, most: int = 9) -> tuple[list[int], Rejects]:
    rejects = Rejects(str(folder), transaction, most, "here", APPEND)
    for row in rows:
        rejects.add(refuse(transaction, row))
    rejects.close()
    return [one.row for one in rejects.rows()], rejects


def test_each_row_names_its_messages(tmp_path: Path) -> None:
    messages = table_of(7, 8, 9)
    single = with_messages(numbers(1, 2, 3), Anchors(3, None, np.array([0, 2, MANY]), None), messages)
    assert single.schema.names == ["n", *MESSAGE_COLUMNS.names]
    assert single.column(1).to_pylist() == [7, 9, None]
    assert single.column(2).to_pylist() == [107, 109, -1]
    several = with_messages(numbers(1, 2, 3), rows_of([(0, 0), (0, 1), (0, 2), (2, 1)], 3), messages)
    assert several.column(1).to_pylist() == [7, None, 8]
    assert several.column(3).to_pylist() == [[8, 108, 9, 109], None, None]
    found = RowMessages(str(tmp_path), prepared(tmp_path, several).files)
    assert [found.of_row(row) for row in range(3)] == [((7, 107), (8, 108), (9, 109)), (), ((8, 108),)]
    assert not found.unnamed.any()


def test_the_numbers_are_no_columns_of_the_rows(tmp_path: Path) -> None:
    rows = with_messages(numbers(1, 2), Anchors(2, None, np.array([0, 0]), None), table_of(7))
    transaction = prepared(tmp_path, rows)
    assert [batch.schema.names for batch in prepared_batches(str(tmp_path), transaction.files)] == [["n"]]
    assert "_stormproof" not in transaction.files[0].statistics


def test_a_message_goes_whole_and_takes_those_that_share_rows(tmp_path: Path) -> None:
    """Rows 0 and 1 are message 7's; row 2 is 7's and 8's; row 3 is 8's; row 4 is 9's; row 5 has no message."""
    pairs = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 2)]
    transaction = prepared(tmp_path, with_messages(numbers(*range(6)), rows_of(pairs, 6), table_of(7, 8, 9)))
    rows, rejects = left_out(tmp_path, transaction, 0)
    assert (rows, rejects.messages) == ([0, 1, 2, 3], {7, 8})
    assert [one.goes_with_others for one in rejects.rows()] == [False, True, True, True]
    assert left_out(tmp_path, transaction, 5)[0] == [5]
    assert left_out(tmp_path, transaction, 4)[1].messages == {9}


def test_what_was_taken_is_taken_back(tmp_path: Path) -> None:
    transaction = prepared(
        tmp_path, with_messages(numbers(1, 2, 3), rows_of([(0, 0), (1, 0), (2, 1)], 3), table_of(7, 8))
    )
    rejects = Rejects(str(tmp_path), transaction, 9, "here", APPEND)
    assert [kept.rows.num_rows for kept in rejects.kept()] == [3]
    rejects.add(refuse(transaction, 1))
    assert rejects.close()  # row 0 was taken, and goes with row 1
    assert [kept.numbers.tolist() for kept in rejects.kept()] == [[2]]
    assert not rejects.close()


def test_more_messages_than_may_be_rejected_refuse_the_transaction(tmp_path: Path) -> None:
    rows = with_messages(numbers(1, 2), Anchors(2, None, np.array([0, 1]), None), table_of(7, 8))
    transaction = prepared(tmp_path, rows)
    left_out(tmp_path, transaction, 0, most=1)
    with pytest.raises(SinkRefused, match="more than 1 messages") as caught:
        left_out(tmp_path, transaction, 0, 1, most=1)
    assert caught.value.details["problem"] == "too_many_rejects"


def test_a_row_of_a_group_refuses_the_transaction(tmp_path: Path) -> None:
    transaction = prepared(tmp_path, with_messages(numbers(1), Anchors(1, None, np.array([MANY]), None), MetMessages()))
    with pytest.raises(SinkRefused, match="stands for several messages"):
        left_out(tmp_path, transaction, 0)
    rejects = Rejects(str(tmp_path), transaction, 9, "here", APPEND, row_by_row=True)
    rejects.add(refuse(transaction, 0))
    assert [one.messages for one in rejects.rows()] == [()]


def test_the_limit_counts_the_newest_messages() -> None:
    assert RejectLimit(0.0).of_batch(1_000_000) is None
    limit = RejectLimit(0.1)
    assert (limit.of_batch(1), limit.of_batch(5_000), limit.of_batch(10**6)) == (ALWAYS, 500, 1_000)
    for _ in range(ALWAYS):
        assert limit.of_batch(1)
        limit.note(1, 1)
    assert limit.of_batch(1) == 0  # small batches are no way around it
    limit.note(WINDOW, 0)
    limit.note(WINDOW, 0)
    assert limit.of_batch(1) == 100


def test_a_sink_that_a_retry_is_not_for_writes_nothing(tmp_path: Path) -> None:
    writer = WritesNothing("s", FileWriter("s", str(tmp_path), names_messages=True))
    task = writer.open_task(TaskContext("i", 1, 1, 0), SCHEMA)
    task.write(numbers(1))
    assert (task.close(), writer.check(numbers(1)), writer.names_messages, writer.sink) == ((), (), False, "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["k", "row"])
def test_a_superseded_row_takes_the_place_of_a_refused_one(tmp_path: Path, key: str) -> None:
    """Rows 1, 3 and 5 of messages 7, 9 and 8 have one key: 5 is refused, then 3; row 2 is alone, and 4 message 8's, too."""
    schema = pa.schema([(key, pa.string()), ("v", pa.int64())])
    input_ = SinkInput(schema, (key,), mode=SinkMode.UPSERT, order_by=("v",))
    rows = pa.record_batch([pa.array(["a", "b", "a", "c", "a"]), pa.array([1, 2, 3, 4, 5], pa.int64())], schema=schema)
    named = with_messages(rows, Anchors(5, None, np.array([0, 0, 2, 1, 1]), None), table_of(7, 8, 9))
    task = FileWriter("s", str(tmp_path), input=input_, names_messages=True).open_task(
        TaskContext("i", 1, 1, 0), named.schema
    )
    task.write(named)
    files = tuple(task.close())
    assert [(file.rows, file.superseded) for file in files] == [(3, 2)]
    (kept,) = prepared_batches(str(tmp_path), files)
    assert kept.column("v").to_pylist() == [2, 4, 5]

    rejects = Rejects(str(tmp_path), PreparedTransaction(1, None, "d", 3, files), 9, "here", input_)
    given = list[list[int]]()
    for part in rejects.kept():
        given.append(part.rows.column("v").to_pylist())
        for place, v in enumerate(given[-1]):
            if v in (3, 5):
                rejects.add(part.row(place).refused("23514", "no"))
    assert given == [[2, 4, 5], [3], [1]]
    assert rejects.close()  # row 4 was taken, and goes with row 5
    assert [part.rows.column("v").to_pylist() for part in rejects.kept()] == [[2], [1]]
    assert not rejects.close()
    assert [(r.row, r.goes_with_others) for r in rejects.rows()] == [(1, False), (3, True), (4, False)]
    assert rejects.messages == {8, 9}
    assert rejects.reinstated == 2  # one of them is refused


# -- a whole topology whose sink in memory has a rule of its own -------------------------------------------------------


def refusing_world(folder: Path) -> World:
    world = World([b"a b", b"bad c", b"a", b"d bad", b"e"], folder, fold=False, sinks=2, batch_messages=5)
    world.sinks[0].refuse = lambda row: "no bad words" if row["word"] == "bad" else None
    return world


def test_a_sink_in_memory_rejects_messages_by_its_own_rule(tmp_path: Path) -> None:
    world = refusing_world(tmp_path)
    done = world.run(rejects_max_share=1.0)
    assert (done.messages, done.rejected) == (3, 2)
    assert world.counts(0) == Counter("aabe")
    assert world.counts(1) == Counter(["a", "b", "bad", "c", "a", "d", "bad", "e"])


def test_what_was_rejected_is_recorded_once_where_the_answer_is_lost(tmp_path: Path) -> None:
    world = refusing_world(tmp_path)
    world.sinks[0].store.fail(FaultPoint.AFTER, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.run(rejects_max_share=1.0)
    (recovery,) = world.run(rejects_max_share=1.0).recoveries
    assert (recovery.rolled_forward, recovery.rejected) == ((1,), 2)
    assert world.counts(0) == Counter("aabe")
    with world.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
        rejected = connection.execute(sa.select(t.reject.c.message, t.reject.c.sink).order_by("message")).all()
    assert [tuple(row) for row in rejected] == [("1", "counts0"), ("3", "counts0")]


def test_without_rejects_a_refused_row_blocks_the_batch(tmp_path: Path) -> None:
    world = refusing_world(tmp_path)
    with pytest.raises(SinkRefused, match="no bad words"):
        world.run(rejects_max_share=0.0)
    assert world.counts(0) == Counter()
