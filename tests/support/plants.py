"""Changes that somebody makes to a sink's table by other means: rows, files and versions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from stormproof.core.base.arrow import pc
from support.operated import Operated

Plant = Callable[[Operated, str], None]
"""Changes the table of this name: a folder of the lake, or a table of the run's database."""


def delta_at(run: Operated, table: str) -> DeltaTable:
    return DeltaTable(run.cell.folder / "lake" / table)


def first_row(run: Operated, table: str) -> str:
    row = delta_at(run, table).to_pyarrow_table().sort_by([("k", "ascending"), ("at", "ascending")]).to_pylist()[0]
    return f"k = '{row['k']}' and at = {row['at']}"


def replaced_in_place(run: Operated, table: str) -> None:
    """One byte of a live file is another; of an upsert's, so that a key is read from it that is another."""
    found = delta_at(run, table)
    path = Path(found.table_uri.removeprefix("file://")) / sorted(found.get_add_actions().column("path").to_pylist())[0]
    content, rows = path.read_bytes(), pq.read_table(path)
    for at in range(4, len(content)) if "newest" in table else [len(content) // 3]:
        flipped = bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]])
        if "newest" not in table or _has_another_key(flipped, rows):
            path.write_bytes(flipped)
            return
    raise AssertionError(f"no byte of {path} changes a key")


def _has_another_key(content: bytes, rows: pa.Table) -> bool:
    try:
        found = pq.read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowException):
        return False
    return bool(found.schema.equals(rows.schema) and not found["k"].equals(rows["k"]))


def rewritten(run: Operated, table: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """A version that says that it changes no data replaces all files by one, whose rows are others."""
    found = delta_at(run, table)
    folder = Path(found.table_uri.removeprefix("file://"))
    rows = change(found.to_pyarrow_table())
    name = f"part-{time.time_ns()}.parquet"
    pq.write_table(rows, folder / name)
    version, now = found.version() + 1, time.time_ns() // 1_000_000
    actions = found.get_add_actions()
    entry: list[dict[str, object]] = [{"commitInfo": {"timestamp": now, "operation": "OPTIMIZE"}}]
    for path in actions.column("path").to_pylist():
        entry.append({"remove": {"path": path, "deletionTimestamp": now, "dataChange": False}})
    add = {"path": name, "partitionValues": {}, "size": os.path.getsize(folder / name), "modificationTime": now}
    entry.append({"add": {**add, "dataChange": False, "stats": json.dumps({"numRecords": rows.num_rows})}})
    text = "\n".join(map(json.dumps, entry))
    (folder / "_delta_log" / f"{version:020}.json").write_text(text)


def _with_change(rows: pa.Table) -> pa.Table:
    at = pc.if_else(pc.equal(pa.array(range(rows.num_rows)), 0), pc.add(rows.column("at"), 1), rows.column("at"))
    return rows.set_column(rows.schema.get_field_index("at"), "at", at)


def _with_double(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows.slice(0, rows.num_rows - 1), rows.slice(0, 1)])


def _appended(run: Operated, table: str, *, double: bool) -> None:
    found = delta_at(run, table)
    row = found.to_pyarrow_table().slice(0, 1)
    if not double:
        row = row.set_column(row.schema.get_field_index("at"), "at", pa.array([10**6], pa.int64()))
        row = row.set_column(0, "k", pa.array(["new"]))
    write_deltalake(found, row, mode="append")


DELTA: Final[Mapping[str, Plant]] = {
    "a row is changed": lambda run, table: void(
        delta_at(run, table).update(predicate=first_row(run, table), updates={"made": "'forged'"})
    ),
    "a row is deleted": lambda run, table: void(delta_at(run, table).delete(first_row(run, table))),
    "a row is added": lambda run, table: _appended(run, table, double=False),
    "a row is doubled": lambda run, table: _appended(run, table, double=True),
    "a file is replaced": replaced_in_place,
    "an OPTIMIZE changes a row": lambda run, table: rewritten(run, table, _with_change),
    "an OPTIMIZE doubles a row and drops another": lambda run, table: rewritten(run, table, _with_double),
    "an older version is restored": lambda run, table: void(
        delta_at(run, table).restore(delta_at(run, table).version() - 1)
    ),
}

_ONE: Final = "ctid = (select ctid from {0} order by at, k limit 1)"
POSTGRES: Final[Mapping[str, str]] = {
    "a row is changed": "update {0} set made = 'forged' where " + _ONE,
    "a row is deleted": "delete from {0} where " + _ONE,
    "a row is added": "insert into {0} (k, at, made) values ('new', 1000000, 'x')",
    "a row is doubled": "insert into {0} select * from {0} order by at, k limit 1",
    "a row is doubled and another deleted": (
        "with a as (delete from {0} where ctid = (select ctid from {0} order by at desc, k limit 1)) "
        "insert into {0} select * from {0} order by at, k limit 1"
    ),
    "two rows swap a value": (
        "update {0} t set made = case t.at when 0 then '10' else '0' end where t.at in (0, 10) and t.made in ('0', '10')"
    ),
    "an older copy is restored": "delete from {0} where made in ('9', '10', '11')",
}


def void(_: object) -> None:
    """Nothing: for what returns something."""


def plant(run: Operated, store: str, table: str, what: str) -> None:
    """Make one of the changes."""
    if store == "delta":
        DELTA[what](run, table)
    else:
        run.sql(POSTGRES[what].format(table))


TABLES: Final[Mapping[str, str]] = {
    "delta": "plain",
    "delta-lineage": "traced",
    "delta-upsert": "newest",
    "delta-upsert-lineage": "newest_traced",
    "postgres": "plain",
    "postgres-lineage": "traced",
    "postgres-upsert": "newest",
    "postgres-upsert-lineage": "newest_traced",
}
EVERY: Final = frozenset(TABLES)
APPENDS: Final = frozenset(name for name in TABLES if "upsert" not in name)
TRACED: Final = frozenset(name for name in TABLES if "lineage" in name)
DELTAS: Final = frozenset(name for name in TABLES if "delta" in name)
FOUND: Final[Mapping[str, frozenset[str]]] = {
    "a row is changed": APPENDS | DELTAS | TRACED,
    "a row is deleted": EVERY,
    "a row is added": EVERY,
    "a row is doubled": APPENDS | DELTAS,
    "a row is doubled and another deleted": APPENDS - DELTAS,
    "two rows swap a value": APPENDS - DELTAS,
    "a file is replaced": DELTAS,
    "an OPTIMIZE changes a row": (APPENDS | TRACED) & DELTAS,
    "an OPTIMIZE doubles a row and drops another": DELTAS,
    "an older version is restored": DELTAS,
    "an older copy is restored": EVERY - DELTAS,
}
"""The tables in which a change is found. Where it is not, the sink says so: what it did not compare."""


def can_be(what: str, name: str) -> bool:
    """Whether there is such a change in the table of this sink: a key is unique in Postgres, and of the two rows that swap
    a value an upsert has none.
    """
    plants = DELTA if name.startswith("delta") else POSTGRES
    return what in plants and not (("doubled" in what or "swap" in what) and name.startswith("postgres-upsert"))


MESSAGES: Final[Mapping[str, str]] = {
    "kept": "Postgres queue",
    "toy": "journal (NATS, Redis, RabbitMQ queues, Kestrel)",
    "texts": "files of lines",
    "parquets": "Parquet files",
}
"""The topologies whose sources still keep what was committed, and what the sources are."""
MESSAGES_FOUND: Final[Mapping[str, frozenset[str]]] = {
    "a message is altered": frozenset(MESSAGES),
    "a message is removed": frozenset({"kept", "toy", "texts"}),
    "two messages change places": frozenset({"kept", "toy", "texts"}),
    "a message is put between those that were read": frozenset({"texts"}),
    "a payload is emptied": frozenset({"toy"}),
}
"""The sources in which such a change is made, and found."""
