"""What commits by key with lineage columns record of their rows: a deep verify of a table that is right finds nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf as INF
from math import nan as NAN
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.typed_rows import IDENTITY, put

from stormproof import DeltaSink, PostgresSink
from stormproof.core.contract.fold import ByOrder, End, Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sink import Lineage
from stormproof.sinks.contract.protocol import Sink, SinkIdentity
from stormproof.sinks.contract.row_rule import with_lineage
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.rows.comparison import Comparison, RowsOnRecord, SupportsCompareRows

pytestmark = pytest.mark.postgres
TRACED: Final = Lineage(message=None)


@pytest.fixture(params=["delta", "postgres"])
def sink(request: pytest.FixtureRequest, tmp_path: Path, database: Database) -> Sink:
    told: dict[str, Any] = {"name": "t", "lineage": TRACED, "schema_contract": "evolve"}
    if request.param == "delta":
        return DeltaSink(tmp_path / "t", **told)
    return PostgresSink("t", database=database, staging=tmp_path / "staged", **told)


def upserted(sink: Sink, rows: Sequence[dict[str, Any]], txid: int, *columns: str) -> SinkInput:
    schema = pa.schema([("k", pa.string()), *((name, pa.int64()) for name in columns)])
    input_ = with_lineage(SinkInput.for_upsert(schema, ("k",)), TRACED, "t")
    put(sink, pa.Table.from_pylist([{**row, "_txid": txid} for row in rows], input_.schema), input_, txid=txid)
    return input_


def compared(sink: Sink, input_: SinkInput, epoch: int) -> Comparison:
    identity = SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, sink.name)
    with closing(sink.open(identity, input_, epoch)) as session:
        assert isinstance(session, SupportsCompareRows)
        return session.compare_rows(lambda: RowsOnRecord({}), 1, None, lambda done, of: None)


def test_columns_that_come_and_go_and_come_again_are_no_alarm(sink: Sink) -> None:
    upserted(sink, [{"k": "a", "n": 1}, {"k": "b", "n": 2}], 1, "n")
    input_ = upserted(sink, [{"k": "a", "n": 3, "more": 4}, {"k": "c", "n": 5, "more": 6}], 2, "n", "more")
    assert compared(sink, input_, 2).wrong == ()
    upserted(sink, [{"k": "a", "n": 7}], 3, "n")
    input_ = upserted(sink, [{"k": "b", "n": 8, "more": 9}], 4, "n", "more")
    assert compared(sink, input_, 4).wrong == ()


ALTERED: Final[Mapping[str, Sequence[str]]] = {
    "trigger": (
        "create function others() returns trigger language plpgsql as "
        "'begin update t set n = n + 1 where k <> new.k; return null; end'",
        "create trigger others after update on t for each row when (pg_trigger_depth() = 0) execute function others()",
    ),
    "reference": ("alter table t add unique (n), add foreign key (of) references t (n) on update cascade",),
}


@pytest.mark.parametrize("by", ALTERED)
def test_rows_that_the_table_itself_changes_beside_those_of_a_batch_are_no_alarm(
    database: Database, tmp_path: Path, by: str
) -> None:
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path, lineage=TRACED)
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        upserted(sink, [], 1, "n", "of")
        for statement in ALTERED[by]:
            connection.execute(statement.encode())
        upserted(sink, [{"k": "a", "n": 1}, {"k": "b", "n": 2, "of": 1}], 2, "n", "of")
        input_ = upserted(sink, [{"k": "a", "n": 5}], 3, "n", "of")
        assert connection.execute("select n, of from t where k = 'b'").fetchone() == (
            (3, 1) if by == "trigger" else (2, 5)
        )
    found = compared(sink, input_, 3)
    assert found.wrong == ()
    assert any("what each commit replaced is not on record" in text for text in found.left_out)


def test_what_another_writer_changed_is_no_alarm_where_the_log_has_been_cleaned_up(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", name="t", lineage=TRACED)
    upserted(sink, [{"k": "a", "n": 1}, {"k": "b", "n": 2}], 1, "n")
    DeltaTable(tmp_path / "t").update(predicate="k = 'a'", updates={"n": "7"})
    for txid in (2, 3):
        input_ = upserted(sink, [{"k": "b", "n": txid}], txid, "n")
    log, newest = DeltaLog(str(tmp_path / "t")), DeltaTable(tmp_path / "t").version()
    DeltaTable(tmp_path / "t", newest - 1).create_checkpoint()
    for version in range(newest - 1):
        Path(log.entry_path(version)).unlink()
    found = compared(sink, input_, 3)
    assert found.wrong == ()
    assert any("what each commit replaced is not on record" in text for text in found.left_out)


def test_a_fold_is_compared_with_its_lineage_column(sink: Sink) -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.int64()), ("low", pa.float64())])
    input_ = with_lineage(SinkInput.for_fold(schema, ("k",), {"n": Fold.SUM, "low": Fold.MIN}), TRACED, "t")
    for txid in (1, 2, 3):
        rows = [{"k": k, "n": txid, "low": 1.5 - txid, "_txid": txid} for k in ("a", "b")[: txid % 2 + 1]]
        put(sink, pa.Table.from_pylist(rows, input_.schema), input_, txid=txid)
    found = compared(sink, input_, 3)
    assert (found.wrong, found.left_out) == ((), ())
    assert any("the values of its 2 rows" in text for text in found.compared)


VALUES: Final[Mapping[str, tuple[pa.DataType, Sequence[Any]]]] = {
    "i": (pa.int32(), [None, 0, 1, -7]),
    "f": (pa.float64(), [None, NAN, INF, -INF, -0.0, 0.0, 0.1, 1e300]),
    "g": (pa.float32(), [None, NAN, -0.0, 0.0, 0.1, 3e38]),
    "d": (pa.decimal128(20, 3), [None, Decimal("0.000"), Decimal("-1.125"), Decimal("99999999999999.999")]),
    "t": (pa.string(), [None, "", "a", "\u00df", "\U0010ffff", "a "]),
    "b": (pa.bool_(), [None, True, False]),
    "y": (pa.binary(), [None, b"", b"\0\xff"]),
    "day": (pa.date32(), [None, date(1, 1, 1), date(2026, 1, 1)]),
    "at": (pa.timestamp("us", "UTC"), [None, datetime(1969, 12, 31, 23, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]),
}
SCHEMA: Final = pa.schema([("k", pa.string()), *((name, kind) for name, (kind, _) in VALUES.items())])


def only(*names: str) -> pa.Schema:
    return pa.schema([SCHEMA.field(name) for name in names])


ENDS: Final = ByOrder(End.LAST, ("at", "t"))
INPUTS: Final[Mapping[str, SinkInput]] = {
    "upsert": SinkInput.for_upsert(SCHEMA, ("k",), ("i",)),
    "upsert by a float": SinkInput.for_upsert(SCHEMA, ("k",), ("f",), keep=("t",)),
    "upsert without an order": SinkInput.for_upsert(SCHEMA, ("k",), delete_when="b"),
    "sums": SinkInput.for_fold(only("k", "i", "f", "g", "d"), ("k",), dict.fromkeys("ifgd", Fold.SUM)),
    "least": SinkInput.for_fold(SCHEMA, ("k",), dict.fromkeys(VALUES, Fold.MIN)),
    "greatest": SinkInput.for_fold(SCHEMA, ("k",), dict.fromkeys(VALUES, Fold.MAX)),
    "last": SinkInput.for_fold(only("k", "t", "at"), ("k",), {"t": ENDS, "at": ENDS}),
}


@pytest.mark.parametrize("how", INPUTS)
def test_rows_of_any_values_are_no_alarm(sink: Sink, how: str) -> None:
    rng, input_ = random.Random(1), with_lineage(INPUTS[how], TRACED, "t")
    for txid in range(1, 9):
        rows = [
            {name: rng.choice(values[name in input_.order_by :]) for name, (_, values) in VALUES.items()}
            | {"k": k, "_txid": txid}
            for k in rng.sample("abcd", rng.randint(1, 4))
        ]
        put(sink, pa.Table.from_pylist(rows, input_.schema), input_, txid=txid)
    found = compared(sink, input_, 8)
    assert found.wrong == ()
    assert any("the values of its 4 rows" in text for text in found.compared)
