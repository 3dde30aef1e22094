"""Trident's usual updater of a state: get the keys, compute, put them. A txid's rows come to it in several calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from support.queues import prepared_database, put

from stormproof import DeltaMap, PostgresMap, PostgresQueue, Topology
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.state import State, StateKind
from stormproof.trident.state.protocol import MapState, StateFactory
from stormproof.trident.state.sink import ROWS_AT_ONCE

pytestmark = pytest.mark.postgres

LINES, WORDS = 2_000, "a b c d e " * 10


class AddUp:
    calls = 0

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        AddUp.calls += 1
        seen = Counter(rows.column("word").to_pylist())
        keys = pa.record_batch({"word": pa.array(list(seen), pa.string())})
        held = cast("MapState", state).multi_get(keys).column("n").to_pylist()
        new = pa.array([(h or 0) + n for h, n in zip(held, seen.values(), strict=True)], pa.int64())
        cast("MapState", state).multi_put(pa.record_batch([keys.column("word"), new], names=["word", "n"]))


@pytest.mark.parametrize("kind", [StateKind.OPAQUE, StateKind.TRANSACTIONAL])
@pytest.mark.parametrize("store", ["postgres", "delta"])
def test_an_updater_that_gets_and_puts_counts_each_row_once(
    store: str, kind: StateKind, database: Database, tmp_path: Path
) -> None:
    prepared_database(database)
    put(database, "lines", [WORDS.encode()] * LINES)
    made: StateFactory = PostgresMap("counts", kind) if store == "postgres" else DeltaMap(tmp_path / "counts", kind)
    t = Topology("counts")
    lines = t.stream("lines", PostgresQueue("lines", schema="line string", database=database))
    words = lines.flat_map(str.split, "line", schema="word string").map(lambda w: (w, 1), schema="word string, n long")
    words.partition_by("word").partition_persist("counts", made, AddUp(), keys=("word",))
    AddUp.calls = 0
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"))
    t.run("exactly-once", engine="inline", until_idle=True, settings=settings)
    assert LINES * 50 > ROWS_AT_ONCE
    assert AddUp.calls > 1
    if store == "postgres":
        with connect(database, application_name="tests") as connection:
            counted = dict(connection.execute("select word, n from counts").fetchall())
    else:
        from deltalake import DeltaTable

        rows = DeltaTable(tmp_path / "counts").to_pyarrow_table().to_pylist()
        counted = {row["word"]: row["n"] for row in rows}
    assert counted == dict.fromkeys("abcde", LINES * 10)
