"""The schema contract: freeze, evolve and discard_value, at Delta and Postgres, by themselves and in a topology."""

from __future__ import annotations

import os
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from psycopg.rows import dict_row
from support.operated import Operated
from support.topologies import MAX_ATTEMPTS
from support.typed_rows import IDENTITY

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, Sink, SinkSession
from stormproof.sinks.contract.row_rule import SchemaContract
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.schema_changes import add_columns
from stormproof.sinks.postgres.schema_changes import changes_for
from stormproof.sinks.rows.limits import discarded_in

OLD = pa.table({"word": ["a"], "n": pa.array([1], pa.int32())})
NEW = pa.table(
    {"word": ["b"], "n": pa.array([2], pa.int32()), "more": [[1.5]], "at": pa.array([0], pa.timestamp("us"))}
)

NAME: Final = "contracts"
pytestmark = pytest.mark.postgres


def prepared(session: SinkSession, rows: pa.Table, txid: int) -> PreparedTransaction:
    task = session.writer().open_task(TaskContext(IDENTITY.incarnation, txid, 1, 0), rows.schema)
    for batch in rows.to_batches():
        task.write(batch)
    files = tuple(task.close())
    held = session.held()
    previous = None if held is None or held.txid == txid else held.txid
    return PreparedTransaction(txid, previous, transaction_digest(files), rows.num_rows, files)


@pytest.fixture(params=["delta", "postgres"])
def store(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Made:
    """The sink of one table, by its contract, and the table's rows."""

    def __init__(self, store: str, folder: Path, database: Database) -> None:
        self.store, self.folder, self.database = store, folder, database

    def sink(self, contract: SchemaContract | str = "freeze") -> Sink:
        if self.store == "delta":
            return DeltaSink(self.folder / "t", name="t", schema_contract=contract)
        staging = self.folder / "staged"
        return PostgresSink("t", name="t", database=self.database, staging=staging, schema_contract=contract)

    def put(self, rows: pa.Table, txid: int, contract: SchemaContract | str = "freeze") -> Any:
        with closing(self.sink(contract).open(IDENTITY, SinkInput(rows.schema), txid)) as session:
            return session.commit(prepared(session, rows, txid), checked=True)

    def rows(self) -> list[dict[str, Any]]:
        if self.store == "delta":
            found: list[dict[str, Any]] = DeltaTable(self.folder / "t").to_pyarrow_table().to_pylist()
            return sorted(found, key=lambda row: str(row["word"]))
        with psycopg.connect(self.database.conninfo) as connection, connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute("select * from t order by word").fetchall()


@pytest.fixture
def made(store: str, tmp_path: Path, database: Database) -> Made:
    made = Made(store, tmp_path, database)
    made.put(OLD, 1)
    return made


def test_freeze_refuses_a_new_column_by_name(made: Made) -> None:
    with pytest.raises(SinkRefused, match="no column 'more'"):
        made.put(NEW, 2)
    assert [row["word"] for row in made.rows()] == ["a"]


def test_evolve_adds_columns_with_the_batch_that_has_them(made: Made) -> None:
    result = made.put(NEW, 2, "evolve")
    assert len(result.changed) == 2
    assert "added column 'more'" in result.changed[0]
    old, new = made.rows()
    assert (old["more"], new["more"]) == (None, [1.5])
    assert made.put(NEW, 3, "evolve").changed == ()


def test_opening_alone_changes_nothing(made: Made) -> None:
    made.sink("evolve").open(IDENTITY, SinkInput(NEW.schema), 2).close()
    assert set(made.rows()[0]) == {"word", "n"}


def test_evolve_is_repeated_after_a_crash_and_still_says_what_it_did(made: Made) -> None:
    with closing(made.sink("evolve").open(IDENTITY, SinkInput(NEW.schema), 2)) as session:
        transaction = prepared(session, NEW, 2)
        if made.store == "delta":  # the driver died between the table's change and the batch
            assert add_columns(DeltaTable(made.folder / "t"), SinkInput(NEW.schema), IDENTITY.application_id, 2)
    with closing(made.sink("evolve").open(IDENTITY, SinkInput(NEW.schema), 3)) as session:
        first = session.commit(transaction, checked=True)
        again = session.commit(transaction, checked=True)
    assert (first.outcome, again.outcome) == (CommitOutcome.APPLIED, CommitOutcome.ALREADY_HELD)
    assert first.changed == again.changed
    assert len(first.changed) == 2
    assert len(made.rows()) == 2


def test_a_fold_that_another_driver_commits_behind_the_new_columns_is_folded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pa.table({"word": ["a"], "n": [1]}), pa.table({"word": ["a"], "n": [1], "more": [1]})
    inputs = [SinkInput.for_fold(t.schema, ("word",), dict.fromkeys(t.schema.names[1:], Fold.SUM)) for t in (old, new)]
    sink = DeltaSink(tmp_path / "t", name="t", schema_contract="evolve")
    with closing(sink.open(IDENTITY, inputs[0], 1)) as session:
        session.commit(prepared(session, old, 1), checked=True)
    with closing(sink.open(IDENTITY, inputs[1], 2)) as session, closing(sink.open(IDENTITY, inputs[1], 2)) as other:
        transaction = prepared(session, new, 2)

        def and_then_the_other(*given: Any) -> Any:
            changed = add_columns(*given)
            monkeypatch.undo()
            other.commit(transaction, checked=True)
            return changed

        monkeypatch.setattr("stormproof.sinks.delta.schema_changes.add_columns", and_then_the_other)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist() == [{"word": "a", "n": 2, "more": 1}]


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "after a crash behind the change"])
def test_the_version_that_adds_columns_is_synced_with_the_first_batch(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeltaTable.create(tmp_path / "t", Schema.from_arrow(OLD.schema))
    sink = DeltaSink(tmp_path / "t", name="t", schema_contract="evolve")
    session = sink.open(IDENTITY, SinkInput(NEW.schema), 1)
    if killed:
        add_columns(DeltaTable(tmp_path / "t"), SinkInput(NEW.schema), IDENTITY.application_id, 1)
    transaction = prepared(session, NEW, 1)
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.path.realpath(f"/proc/self/fd/{fd}")))
    for _ in range(2):  # found after a crash, they are synced again
        synced.clear()
        session.commit(transaction, checked=True)
        assert {DeltaLog(str(tmp_path / "t")).entry_path(version) for version in (1, 2)} <= synced


def test_postgres_widens_types_with_the_batch_that_needs_it(database: Database, tmp_path: Path) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create table t (word text, n smallint, r real, d numeric(5,2), v varchar(9))")
    made = Made("postgres", tmp_path, database)
    rows = pa.table(
        {
            "word": ["b"],
            "n": [2**40],
            "r": [0.1],
            "d": pa.array([12345], pa.int64()).cast(pa.decimal128(20, 1)),
            "v": ["abc"],
        }
    )
    result = made.put(rows, 1, "evolve")
    assert [text.rpartition(" to ")[2] for text in result.changed] == ["bigint", "double precision", "numeric(21,2)"]
    assert made.rows() == [{"word": "b", "n": 2**40, "r": 0.1, "d": rows["d"][0].as_py(), "v": "abc"}]
    with psycopg.connect(database.conninfo) as connection:
        recorded = connection.execute(
            "select txid, change from stormproof_sink.schema_change order by number"
        ).fetchall()
    assert [txid for txid, _ in recorded] == [1, 1, 1]


@pytest.mark.parametrize("at", ["begin", "take_over"])
def test_evolve_takes_another_writers_change_into_account(
    at: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table changes between the look at its columns and our own change: nothing is narrowed, or added twice."""
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create table t (word text, d numeric(5,2))")
        made = Made("postgres", tmp_path, database)
        rows = pa.table({"word": ["b"], "d": pa.array([Decimal("1.00")], pa.decimal128(10, 2)), "more": [1.5]})
        looks = 0

        def changed_behind(*given: Any) -> Any:
            nonlocal looks
            found, looks = changes_for(*given), looks + 1
            if looks == (1 if at == "take_over" else 2):
                connection.execute("alter table t alter d type numeric(12,4), add more double precision")
                connection.execute("insert into t values ('a', 1.2345)")
            return found

        monkeypatch.setattr("stormproof.sinks.postgres.transactional_table.changes_for", changed_behind)
        assert made.put(rows, 1, "evolve").changed == ()
        assert [(row["word"], row["d"], row["more"]) for row in made.rows()] == [
            ("a", Decimal("1.2345"), None),
            ("b", Decimal("1.0000"), 1.5),
        ]


def test_a_txid_that_is_written_again_may_need_further_changes(database: Database, tmp_path: Path) -> None:
    made = Made("postgres", tmp_path, database)
    made.put(OLD, 1)
    more = OLD.append_column("more", pa.array([1.5]))
    for rows in (more, more.append_column("yet", pa.array(["x"]))):
        with closing(made.sink("evolve").open(IDENTITY, SinkInput(rows.schema), 2)) as session:
            result = session.commit(prepared(session, rows, 2), checked=False)
    assert result.changed == ("added column 'more' double precision", "added column 'yet' text")


def test_evolve_refuses_what_it_cannot_widen(made: Made) -> None:
    with pytest.raises(SinkRefused, match=r"column 'n' is int\w* in the table and (text|string)"):
        made.put(OLD.set_column(1, "n", pa.array(["x"])), 2, "evolve")


def test_a_key_column_is_never_added(tmp_path: Path, database: Database) -> None:
    made = Made("postgres", tmp_path, database)
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create table t (n int)")
    sink = made.sink("evolve")
    with pytest.raises(SinkRefused, match="no column 'word'"):
        sink.open(IDENTITY, SinkInput.for_upsert(OLD.schema, ("word",)), 1)


def test_discard_value_stores_null_and_counts(made: Made) -> None:
    far = pa.array([2**31 - 1, 0, 2**31 - 1], pa.int32()).view(pa.date32())
    text = ["x\0y" if made.store == "postgres" else "x", "y", "z"]
    rows = pa.table({"word": ["p", "q", "r"], "n": pa.array([1, 2, 3], pa.int32()), "day": far, "text": text})
    made.put(rows.slice(1, 1), 2, "evolve")
    with closing(made.sink("discard_value").open(IDENTITY, SinkInput(rows.schema), 3)) as session:
        assert session.writer().check(rows.to_batches()[0]) == []
        transaction = prepared(session, rows, 3)
        session.commit(transaction, checked=True)
    discarded = {"day": 2} | ({"text": 1} if made.store == "postgres" else {})
    assert discarded_in(transaction.files) == discarded
    found = {row["word"]: row["day"] for row in made.rows() if row["n"] != 2}
    assert found == {"a": None, "p": None, "r": None}


def test_what_takes_no_null_is_not_discarded(database: Database, tmp_path: Path) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create table t (word varchar(2) not null, n int)")
    made = Made("postgres", tmp_path, database)
    rows = pa.table({"word": ["abc", "a"], "n": [2**40, 2**40]})
    with closing(made.sink("discard_value").open(IDENTITY, SinkInput(rows.schema), 1)) as session:
        assert [row for row, _ in session.writer().check(rows.to_batches()[0])] == [0]


def test_a_contract_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="'melt' is none of 'freeze', 'evolve', 'discard_value', 'discard_row'"):
        DeltaSink(tmp_path / "t", schema_contract="melt")


def words(lines: pa.Array) -> pa.RecordBatch:
    texts = [str(line.as_py(), "ascii") if isinstance(line.as_py(), bytes) else line.as_py() for line in lines]
    return pa.record_batch([pa.array(texts), pa.array([t.replace("!", "\0") for t in texts])], names=["line", "more"])


def test_a_topology_records_what_its_contracts_did(operated: Operated) -> None:
    operated.sql("create table evolving (line text)")
    operated.sql("create table discarding (line text, more text)")
    topology = Topology(NAME)
    queue = PostgresQueue(
        NAME, database=operated.cell.database, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001, backoff_max_s=0.001
    )
    rows = topology.stream("lines", queue).arrow(
        lambda batch: (words(batch.column(0)), pa.array(range(batch.num_rows))),
        "line",
        schema="line string, more string",
    )
    rows.into(DeltaSink(operated.cell.folder / "lake", name="delta", schema_contract="evolve"))
    rows.into(PostgresSink("discarding", name="discarding", schema_contract="discard_value"))
    DeltaTable.create(operated.cell.folder / "lake", pa.schema([("line", pa.string())]))
    operated.put(b"a", b"b!", b"c!")
    operated.run(topology)
    found = operated.sql(
        "select kind, sink, txid, reason, detail from stormproof.event where kind in "
        "('schema_changed', 'values_discarded') order by kind"
    )
    assert found == [
        ("schema_changed", "delta", 1, "added column 'more' string", None),
        ("values_discarded", "discarding", 1, None, {"columns": {"more": 2}}),
    ]
    assert operated.sql("select line, more from discarding order by line") == [("a", "a"), ("b!", None), ("c!", None)]
    assert operated.sql("select count(*) from stormproof.dead_letter") == [(0,)]
    assert operated.verify(0)["violations"] == []
