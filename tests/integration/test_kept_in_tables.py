"""A Postgres table that is there already, for aggregates that are kept in several columns."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from support.fold_harness import Folded, FoldHarness

from stormproof import collect_set, last
from stormproof.core.base.errors import SinkRefused
from stormproof.core.postgres.database import Database

KEPT = Folded(
    {},
    {
        "x": last("text", order_by="time"),
        "s": collect_set("text", at_most=2),
        "t": collect_set("time", at_most=2),
    },
)
FIT = {
    "x": "text",
    "x_time": "timestamp",
    "s": "text[]",
    "s_truncated": "boolean",
    "t": "timestamp[]",
    "t_truncated": "boolean",
}


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("column", "kind", "told"),
    [
        ("s", "text[]", None),
        ("x_time", None, "no column 'x_time'"),
        ("s_truncated", None, "no column 's_truncated'"),
        ("x", "varchar(9)[]", r"'x' is character varying\(9\)\[\]"),
        ("s", "text", "'s' is text in the table"),
        ("s", "varchar[]", r"'s' is character varying\[\] in the table"),
        ("t", "timestamp(3)[]", "rounds the values of a set; make it timestamp without time zone"),
    ],
    ids=str,
)
def test_a_table_without_the_columns_or_of_other_types_is_refused(
    database: Database, tmp_path: Path, column: str, kind: str | None, told: str | None
) -> None:
    columns = {**FIT, column: kind}
    made = ", ".join(f"{name} {of}" for name, of in columns.items() if of is not None)
    with psycopg.connect(database.conninfo) as connection:
        connection.execute(f"create table counts (key bigint primary key, {made})".encode())
    harness = FoldHarness("postgres-fold", tmp_path, database).take(KEPT)
    if told is None:
        with closing(harness.open()) as session:
            assert session.held() is None
        return
    with pytest.raises(SinkRefused, match=told):
        harness.open()
