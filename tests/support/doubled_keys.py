"""Tables by key as an earlier version wrote them: each key has several rows, and files have bounds that exclude rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction

from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import Repair, SinkIdentity
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.rows.comparison import Comparison, RowProblem, RowsOnRecord
from support import duck
from support.typed_rows import IDENTITY

LARGE: Final = [Decimal("12345678901234567891"), Decimal("98765432109876543219")]
KIND: Final = pa.decimal128(20, 0)
FOLD: Final = {"n": Fold.SUM, "low": Fold.MIN, "high": Fold.MAX}


def of_keys(n: int, keys: list[Decimal] = LARGE) -> pa.Table:
    numbers = [pa.array([n] * len(keys), pa.int64())] * 3
    return pa.table([pa.array(keys, KIND), *numbers], names=["k", "n", "low", "high"])


def input_of(how: str) -> SinkInput:
    schema = of_keys(1).schema
    if how == "append":
        return SinkInput(schema)
    return SinkInput.for_fold(schema, ("k",), FOLD) if how == "fold" else SinkInput.for_upsert(schema, ("k",), ("n",))


def opened(path: Path | str, how: str, options: Mapping[str, str] | None = None) -> DeltaSession:
    session = DeltaSink(path, name="t", storage_options=options).open(
        SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_of(how), 9
    )
    assert isinstance(session, DeltaSession)
    return session


def compared(path: Path | str, how: str) -> Comparison:
    with closing(opened(path, how)) as session:
        return session.compare_rows(lambda: RowsOnRecord({}), 1, None, lambda done, of: None)


def repaired(path: Path | str, how: str, *, dry_run: bool = False) -> Repair:
    with closing(opened(path, how)) as session:
        return session.repair(dry_run=dry_run)


def problems(path: Path | str, how: str) -> list[RowProblem]:
    return [wrong.problem for wrong in compared(path, how).wrong]


def written_before(path: Path | str, how: str, batches: int = 3, options: Mapping[str, str] | None = None) -> None:
    """As an earlier version wrote it: a MERGE that reads the bounds which delta-rs took."""
    told = None if options is None else dict(options)
    DeltaTable.create(path, of_keys(1).schema, storage_options=told)
    for txid, (n, key) in enumerate(product(range(1, batches + 1), LARGE), 1):
        rows = of_keys(n, [key])
        merge = DeltaTable(path, storage_options=told).merge(
            rows,
            "t.k = s.k",
            source_alias="s",
            target_alias="t",
            streamed_exec=False,
            commit_properties=CommitProperties(
                custom_metadata={
                    "stormproof.application": IDENTITY.application_id,
                    "stormproof.txid": str(txid),
                    "stormproof.digest": "d",
                    "stormproof.rows": str(rows.num_rows),
                    "stormproof.epoch": "1",
                    "stormproof.checked": "true",
                },
                app_transactions=[Transaction(IDENTITY.application_id, txid)],
            ),
        )
        changed = {"n": "t.n + s.n", "low": "least(t.low, s.low)", "high": "greatest(t.high, s.high)"}
        merge.when_not_matched_insert_all().when_matched_update(changed if how == "fold" else {"n": "s.n"}).execute()


def by_filters(path: Path) -> list[int]:
    """How many rows DuckDB and delta-rs find of each key."""
    dataset, connection = DeltaTable(path).to_pyarrow_dataset(), duck.connected()
    asked = f"select count(*) from delta_scan('{path}') where k = ?::decimal(20, 0)"
    return [
        *(connection.execute(asked, [str(key)]).fetchone()[0] for key in LARGE),
        *(dataset.count_rows(filter=ds.field("k") == pa.scalar(key, KIND)) for key in LARGE),
    ]
