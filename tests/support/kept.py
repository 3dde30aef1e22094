"""A topology of one sink over a queue, and what may befall the sink's table behind its back."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import deltalake

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.postgres import PostgresMap
from support.operated import Operated
from support.topologies import MAX_ATTEMPTS

NAME: Final = "identity"
STORES: Final = ("postgres-append", "postgres-fold", "postgres-map", "delta-append", "delta-fold", "delta-map")
LINES: Final = [f"a{i} b".encode() for i in range(9)]


@dataclass
class Kept:
    """A topology of one sink, `s`, and its table."""

    store: str
    operated: Operated

    @property
    def is_delta(self) -> bool:
        return self.store.startswith("delta")

    def folder(self, table: str) -> Path:
        return self.operated.cell.folder / "lake" / table

    def built(self, table: str = "counts", sink: str = "s") -> Topology:
        topology = Topology(NAME)
        queue = PostgresQueue(
            NAME,
            database=self.operated.cell.database,
            max_attempts=MAX_ATTEMPTS,
            backoff_base_s=0.001,
            backoff_max_s=0.001,
        )
        words = topology.stream("lines", queue).flat_map(str.split, "line", schema="word string")
        store = DeltaSink(self.folder(table), name=sink) if self.is_delta else PostgresSink(table, name=sink)
        if self.store.endswith("append"):
            words.into(store)
        elif self.store.endswith("fold"):
            words.group_by("word").persistent_aggregate(n=count()).into(store)
        else:
            state = DeltaMap(self.folder(table)) if self.is_delta else PostgresMap(table)
            words.group_by("word").persistent_aggregate(n=count(), state=state, state_name=sink)
        return topology

    def run(self, table: str = "counts", sink: str = "s", *, put: list[bytes] | None = None) -> None:
        if put is not None:
            self.operated.put(*put)
        self.operated.run(self.built(table, sink))

    def is_there(self, table: str = "counts") -> bool:
        if self.is_delta:
            folder = self.folder(table)
            return folder.exists() and any(folder.iterdir())
        return self.operated.sql(f"select to_regclass('{table}')") != [(None,)]

    def move(self, old: str, new: str) -> None:
        """The very table under another name."""
        if self.is_delta:
            self.folder(old).rename(self.folder(new))
        else:
            self.operated.sql(f"alter table {old} rename to {new}")

    def copy(self, old: str, new: str, *, rows: str = "true") -> None:
        """As a dump is restored: the rows (those for which `rows` is true) in a table that is another one to Postgres."""
        self.operated.sql(f"create table {new} (like {old} including all)")
        self.operated.sql(f"insert into {new} select * from {old} where {rows}")

    def empty(self, like: str, new: str = "counts") -> None:
        """Another table of the same columns."""
        if self.is_delta:
            deltalake.DeltaTable.create(self.folder(new), deltalake.DeltaTable(self.folder(like)).schema())
        else:
            self.copy(like, new, rows="false")

    def drop(self, table: str = "counts") -> None:
        if self.is_delta:
            shutil.rmtree(self.folder(table))
        else:
            self.operated.sql(f"drop table {table}")

    def counts(self, table: str = "counts") -> Counter[str]:
        if self.is_delta:
            rows: list[Any] = deltalake.DeltaTable(self.folder(table)).to_pyarrow_table().to_pylist()
        else:
            columns = "word" if self.store.endswith("append") else "word, n"
            names = columns.split(", ")
            rows = [dict(zip(names, row, strict=True)) for row in self.operated.sql(f"select {columns} from {table}")]
        found: Counter[str] = Counter()
        for row in rows:
            found[row["word"]] += row.get("n", 1)
        return found

    def command(self, *arguments: str, status: int = 0) -> Any:
        return self.operated.command(*arguments, status=status)

    def adopt(self, *arguments: str, status: int = 0) -> Any:
        return self.command("ledger", "adopt-table", NAME, "s", *arguments, status=status)

    def bound(self) -> str:
        ((table_id,),) = self.operated.sql("select table_id from stormproof.topology_sink where sink = 's'")
        return str(table_id)


def should(*lines: bytes) -> Counter[str]:
    return Counter(word for line in lines for word in line.decode().split())
