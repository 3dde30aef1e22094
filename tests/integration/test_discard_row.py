"""`schema_contract="discard_row"`: a row that its column cannot hold rejects its message at that sink."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.queues import put
from support.topologies import source_of
from support.typed_rows import IDENTITY

from stormproof import DeltaSink, MemorySink, PostgresSink, Topology, count, exactly_once
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.contract.sink import MESSAGE_COLUMNS, SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, Sink, SinkSession
from stormproof.sinks.prepare import rejected_messages
from stormproof.sinks.prepare.staging import Misfits

pytestmark = pytest.mark.sampled(0.5)

NAME = "discarding"
STRICT = pa.schema([pa.field("word", pa.string(), nullable=False), ("n", pa.int64())])
ROWS = pa.schema([("word", pa.string()), ("n", pa.int64())])
APPEND = SinkInput(ROWS)
UPSERT = SinkInput.for_upsert(ROWS, ("n",), ("word",))
BAD: str | None = None


def named(rows: list[tuple[str | None, int]], messages: list[int]) -> pa.RecordBatch:
    columns = [pa.array([word for word, _ in rows], pa.string()), pa.array([n for _, n in rows], pa.int64())]
    columns += [pa.array(messages, pa.int64()), pa.array([0] * len(rows), pa.int64())]
    columns.append(pa.nulls(len(rows), MESSAGE_COLUMNS.field(2).type))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*ROWS, *MESSAGE_COLUMNS]))


def prepared(
    session: SinkSession,
    txid: int,
    rows: list[tuple[str | None, int]],
    messages: list[int],
    *,
    tasks: int = 1,
    most: int = 9,
) -> PreparedTransaction:
    files: list[Any] = []
    for task in range(tasks):
        batch = named(rows[task::tasks], messages[task::tasks])
        assert session.writer().check(batch) == ()
        writer = session.writer().open_task(TaskContext(IDENTITY.incarnation, txid, 1, task), batch.schema)
        writer.write(batch)
        files += writer.close()
    held = session.held()
    previous = None if held is None or held.txid == txid else held.txid
    total = sum(file.rows for file in files)
    return PreparedTransaction(txid, previous, transaction_digest(files), total, tuple(files), rejects_max=most)


class Made:
    """A sink of each kind over a table whose column `word` is NOT NULL (in memory: a key), and what the table holds."""

    def __init__(self, kind: str, folder: Path, database: Database | None) -> None:
        self.store, _, how = kind.partition("-")
        self.input = APPEND if how == "append" else UPSERT
        self.folder, self.database = folder, database
        upsert: dict[str, Any] = {} if how == "append" else {"mode": "upsert", "key": "n", "order_by": "word"}
        self.sink = self._made(upsert)

    def _made(self, upsert: dict[str, Any]) -> Sink:
        match self.store:
            case "memory":
                return MemorySink("t", schema_contract="discard_row", staging=self.folder / "staged", **upsert)
            case "postgres":
                assert self.database is not None
                self.sql("drop table if exists t; create table t (word text not null, n bigint unique)")
                return PostgresSink(
                    "t",
                    name="t",
                    database=self.database,
                    staging=self.folder / "staged",
                    schema_contract="discard_row",
                    **upsert,
                )
            case _:
                DeltaTable.create(self.folder / "t", Schema.from_arrow(STRICT))
                return DeltaSink(self.folder / "t", name="t", schema_contract="discard_row", **upsert)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        assert self.database is not None
        with connect(self.database, application_name="test", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def open(self, epoch: int = 1) -> SinkSession:
        return self.sink.open(IDENTITY, self.input, epoch)

    def rows(self) -> Counter[tuple[str, int]]:
        if self.store == "postgres":
            return Counter(self.sql("select word, n from t"))
        found: list[Any] = (
            self.sink.rows()
            if isinstance(self.sink, MemorySink)
            else DeltaTable(self.folder / "t").to_pyarrow_table().to_pylist()
        )
        return Counter((row["word"], row["n"]) for row in found)


KINDS = ["memory-upsert", "postgres-append", "postgres-upsert", "delta-append", "delta-upsert"]
"""A table in memory takes NULL but in keys and in the order of an upsert."""


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    kind: str = request.param
    database: Database | None = request.getfixturevalue("database") if kind.startswith("postgres") else None
    return Made(kind, tmp_path, database)


@pytest.mark.postgres
@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_a_row_that_does_not_fit_takes_its_message_and_no_other(made: Made, tasks: int) -> None:
    session = made.open()
    transaction = prepared(session, 1, [("a", 1), (BAD, 2), ("c", 3), ("d", 4)], [10, 20, 20, 30], tasks=tasks)
    first = session.commit(transaction, checked=True)
    assert made.rows() == Counter([("a", 1), ("d", 4)])
    (row,) = Misfits.of(transaction.files).rows
    assert (row.messages, row.sqlstate) == (((20, 0),), None)
    assert "column 'word': NULL, and the column takes none" in row.error
    assert [(one.messages, one.goes_with_others) for one in first.refused] == [(((20, 0),), True)]
    (entry,) = session.evidence(0, None).entries
    assert entry.rows + entry.rejected == transaction.rows + entry.reinstated
    again = session.commit(transaction, checked=True)
    assert (again.outcome, again.refused) == (CommitOutcome.ALREADY_HELD, first.refused)
    session.finished(transaction)
    session.close()


@pytest.mark.postgres
def test_a_batch_of_nothing_but_misfits_is_committed(made: Made) -> None:
    with closing(made.open()) as session:
        transaction = prepared(session, 1, [(BAD, 1), (BAD, 2)], [10, 20])
        assert (transaction.rows, len(Misfits.of(transaction.files).rows)) == (0, 2)
        session.commit(transaction, checked=True)
        session.finished(transaction)
        session.commit(prepared(session, 2, [("a", 1)], [30]), checked=True)
        assert made.rows() == Counter([("a", 1)])
        left = list((made.folder / "t").glob("*.parquet")) if made.store == "delta" else []
        assert len(left) <= 2  # the table's own file, and its second name


@pytest.mark.postgres
def test_more_messages_than_may_be_rejected_refuse_the_batch(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(made.open()) as session:
        rows: list[tuple[str | None, int]] = [(BAD, n) for n in range(5)]
        for most in (4, 0):
            with pytest.raises(SinkRefused, match=f"more than {most} messages"):
                session.commit(prepared(session, 1, [*rows, ("a", 9)], [*range(5), 9], most=most), checked=True)
        monkeypatch.setattr(rejected_messages, "MESSAGES_MAX", 3)
        with pytest.raises(SinkRefused, match="so many messages do not fit"):
            session.commit(prepared(session, 1, rows, [*range(5)]), checked=True)
        assert made.rows() == Counter()


@pytest.mark.postgres
def test_an_earlier_row_takes_the_place_of_one_that_does_not_fit(made: Made) -> None:
    """The later row of the key is of a message that another row of it rejects."""
    if made.input is APPEND:
        pytest.skip("an append keeps every row")
    with closing(made.open()) as session:
        transaction = prepared(session, 1, [("a", 1), ("b", 1), (BAD, 2)], [10, 20, 20])
        session.commit(transaction, checked=True)
        assert made.rows() == Counter([("a", 1)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["a", "b", BAD]), st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=12
    ),
    tasks=st.integers(1, 3),
)
@pytest.mark.parametrize("kind", ["memory-upsert", "delta-append"])
def test_a_table_holds_the_messages_without_a_misfit(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rows: list[tuple[str | None, int, int]], tasks: int
) -> None:
    made = Made(kind, tmp_path_factory.mktemp("discard"), None)
    bad = {message for word, _, message in rows if word is None}
    kept = [(word, n) for word, n, message in rows if message not in bad]
    with closing(made.open()) as session:
        pairs, messages = [(word, n) for word, n, _ in rows], [message for *_, message in rows]
        # The rows of a key come to one task.
        transaction = prepared(session, 1, pairs, messages, tasks=1 if made.input is UPSERT else tasks)
        session.commit(transaction, checked=True)
        found = made.rows()
    if made.input is APPEND:
        assert found == Counter(kept)
    else:
        assert found == Counter((word, n) for n, word in {n: word for word, n in sorted(kept, key=str)}.items())
    assert {number for row in Misfits.of(transaction.files).rows for number, _ in row.messages} == bad


@pytest.mark.postgres
def test_control_where_only_the_row_is_left_out_the_message_is_half_there(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misfits, "of", lambda _: Misfits())
    with closing(made.open()) as session:
        session.commit(prepared(session, 1, [("a", 1), (BAD, 2), ("c", 3)], [10, 20, 20]), checked=True)
    assert made.rows()[("c", 3)] == 1


def test_a_table_in_memory_has_no_other_contract() -> None:
    with pytest.raises(TopologyError, match="takes 'freeze' or 'discard_row'"):
        MemorySink("m", schema_contract="evolve")


def test_a_micro_batch_is_one_message() -> None:
    with pytest.raises(TopologyError, match=r"'discard_row'.*one message.*feed\(\) a topology"):
        exactly_once(MemorySink("m", schema_contract="discard_row"), name="daily")


# -- a topology --------------------------------------------------------------------------------------------------------


def build(cell: Cell) -> Topology:
    """Words into a table for short ones, into one for all, and their numbers by word into one for short ones."""
    t = Topology(NAME)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(str.split, "line", schema="word string")
    words.into(
        PostgresSink("short_words", name="short", database=cell.database, schema_contract="discard_row"),
        PostgresSink("all_words", name="all", database=cell.database),
    )
    words.group_by("word").agg(n=count()).into(
        PostgresSink("short_counts", name="counts", database=cell.database, schema_contract="discard_row")
    )
    return t


LINES = [b"a b", b"toolong c", b"d", b"e toolong toolong f", b"a c"]
GOOD = Counter(["a", "b", "d", "a", "c"])


@pytest.fixture
def discarding(operated: Operated) -> Operated:
    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=100))
    operated.sql(
        "create table short_words (word varchar(3) not null); create table short_counts (word varchar(3), n bigint)"
    )
    return operated


def held(discarding: Operated, query: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for word, n in discarding.sql(query):
        found[word] += n
    return found


@pytest.mark.postgres
def test_a_topology_rejects_what_does_not_fit(discarding: Operated) -> None:
    discarding.put(*LINES)
    ran = discarding.run(build(discarding.cell))
    assert (ran.rejected, ran.messages, ran.failed) == (2, 3, 0)
    assert held(discarding, "select word, 1 from short_words") == GOOD
    assert held(discarding, "select word, n from short_counts") == GOOD
    assert held(discarding, "select word, 1 from all_words") == Counter(b" ".join(LINES).decode().split())
    found = discarding.sql("select sink, payload, sqlstate, error from stormproof.reject order by sink, number")
    assert [row[:3] for row in found] == [
        (sink, payload, None) for sink in ("counts", "short") for payload in (LINES[1], LINES[3])
    ]
    assert all("column 'word': 'toolong' has 7 characters, too many for" in error for *_, error in found)
    assert set(discarding.kinds("notices", discarding.verify())) == {"rejected"}


@pytest.mark.postgres
def test_too_many_misfits_are_given_up_on_record(discarding: Operated) -> None:
    """Of the words, each message that has one; of their numbers, the row of the group alone: its messages are not named."""
    lines = [b"toolong %d" % n for n in range(11)] + [b"a"] * 19
    discarding.put(*lines)
    for sink in ("short", "counts"):
        with pytest.raises(SinkRefused, match="more than 10 messages"):
            discarding.run(build(discarding.cell))
        found = discarding.sql("select state, cause from stormproof.txn")
        assert found == [("blocked", "too_many_rejects")]
        discarding.command("ledger", "skip", NAME, "1", sink, "--rows", "--by", "Ada", "--why", "known")
    assert discarding.run(build(discarding.cell)).rejected == 11
    assert held(discarding, "select word, 1 from short_words") == Counter(a=19)
    numbers = Counter(str(n) for n in range(11))
    assert held(discarding, "select word, n from short_counts") == Counter(a=19) + numbers
    found = discarding.sql("select sink, count(message), sum(rows) from stormproof.reject group by sink order by sink")
    assert found == [("counts", 0, 0), ("short", 11, 11)]
    assert discarding.verify()["violations"] == []


POINTS = [
    *("prepare.after", "postgres.after_guard", "postgres.after_rejects", "recount.after", "commit.after_sink"),
    *("finish.before", "finish.before_commit", "finish.after"),
]


@pytest.mark.postgres
@pytest.mark.sampled(0.25)
def test_misfits_are_recorded_once_wherever_a_driver_dies(discarding: Operated) -> None:
    assert set(POINTS) <= FAILPOINTS.keys()
    cell = replace(discarding.cell, rejects_max_share=1.0)
    lines: list[bytes] = []
    for number, point in enumerate(POINTS):
        more = [b"a%d b" % number, b"toolong b", b"c"]
        put(cell.database, cell.queue, more)
        lines += more
        assert run_driver(cell, f"{point}=kill") == KILLED, point
    assert run_driver(cell) == 0
    good = Counter(b" ".join(line for line in lines if b"toolong" not in line).decode().split())
    assert held(discarding, "select word, 1 from short_words") == good
    assert held(discarding, "select word, n from short_counts") == good
    bad = [line for line in lines if b"toolong" in line]
    for sink in ("short", "counts"):
        found = discarding.sql(f"select payload from stormproof.reject where sink = '{sink}' order by number")
        assert [bytes(payload) for (payload,) in found] == bad
    discarding.verify()
