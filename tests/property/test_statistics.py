"""No file that is written for a Delta table has statistics that exclude a row of it, whatever its schema and rows."""

from __future__ import annotations

import tempfile
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, reject, settings
from support.random_tables import batches
from support.typed_rows import IDENTITY, put

from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.fold import ByOrder, End
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import Repair, SinkIdentity
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.table import check_types

HOW: Final = ("append", "merge", "fold", "compact")


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=batches())
def test_no_file_has_statistics_that_exclude_a_row(how: str, made: list[pa.Table]) -> None:
    rows = [table for table in made if table.num_rows] or [made[0].schema.empty_table()]
    schema = rows[0].schema
    try:
        check_types(schema, "table 't'")
    except TopologyError:
        reject()
    newest = {name: ByOrder(End.LAST, ("i",)) for name in schema.names if name != "i"}
    inputs = {"merge": SinkInput.for_upsert(schema, ("i",)), "fold": SinkInput.for_fold(schema, ("i",), newest)}
    input_ = inputs.get(how, SinkInput(schema))
    with tempfile.TemporaryDirectory() as folder:
        sink = DeltaSink(Path(folder) / "t", name="t")
        for txid, table in enumerate(rows, 1):
            put(sink, table, input_, txid=txid)
        with closing(sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_, 9)) as session:
            assert isinstance(session, DeltaSession)
            if how == "compact":
                session.compact()
            assert session.repair(dry_run=True) == Repair(None, [], 0, 0, [])


def test_a_field_of_a_struct_that_has_the_name_of_a_column_has_no_bounds_of_its_own(tmp_path: Path) -> None:
    schema = pa.schema([("i", pa.int32()), ("a", pa.struct([("price", pa.decimal128(19, 19))])), ("price", pa.int32())])
    table = pa.Table.from_pylist([{"i": 0, "a": {"price": Decimal("1E-19")}, "price": 1}], schema)
    input_ = SinkInput.for_upsert(schema, ("i",))
    sink = DeltaSink(tmp_path / "t", name="t")
    put(sink, table, input_, txid=1)
    with closing(sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_, 9)) as session:
        assert isinstance(session, DeltaSession)
        assert session.repair(dry_run=True) == Repair(None, [], 0, 0, [])
