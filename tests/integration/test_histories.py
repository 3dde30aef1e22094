"""Stores with another history than the ledger's, and topologies that are not what they were: refused by name, or handled.

Restored backups, dropped tables, renamed and doubled topologies, changed graphs. Real Postgres, real Delta tables.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace

import psycopg
import pytest
from deltalake import DeltaTable
from support.contents import content
from support.crashes import KILLED, ended, paused_driver, resume, run_driver
from support.operated import Operated
from support.topologies import MAX_ATTEMPTS, SinkMode, expected, messages, table_of

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count, max_
from stormproof.core.base.errors import Fenced, PositionMismatch
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.postgres

NAME = "histories"


def name_of(database: Database) -> str:
    return dict(database.parameters)["dbname"]


class Backup:
    """A whole database at one moment, as a file-level backup has it."""

    def __init__(self, server: EmbeddedPostgres, database: Database) -> None:
        self._server, self._name = server, name_of(database)
        self._leave(self._name)
        self._do(f"create database {self._name}_kept template {self._name}")

    def restore(self) -> None:
        """As a dump is restored: the rows are the same, their tables are others to Postgres."""
        self._do(f"drop database {self._name} with (force)")
        self._do(f"create database {self._name} template {self._name}_kept")

    def drop(self) -> None:
        self._do(f"drop database {self._name}_kept with (force)")

    def _leave(self, name: str) -> None:
        self._do(f"select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = '{name}'")

    def _do(self, statement: str) -> None:
        with psycopg.connect(self._server.database.conninfo, autocommit=True) as connection:
            connection.execute(statement.encode())


def sized(word: str) -> tuple[str, int]:
    return word, len(word)


def words(
    operated: Operated,
    *sinks: DeltaSink | PostgresSink,
    name: str = NAME,
    source: str = NAME,
    key: str = "word",
    counted: str = "n",
    longest: bool = False,
) -> Topology:
    """Word counts into these sinks; or words' lengths, of which a table keeps the largest."""
    t = Topology(name)
    queue = PostgresQueue(
        source,
        database=operated.cell.database,
        max_attempts=MAX_ATTEMPTS,
        backoff_base_s=0.001,
        backoff_max_s=0.001,
    )
    stream = t.stream("lines", queue).flat_map(str.split, "line", schema=f"{key} string")
    if longest:
        lengths = stream.map(sized, "word", schema="word string, n long").group_by("word")
        lengths.persistent_aggregate(n=max_("n")).into(*sinks)
        return t
    grouped = stream.group_by(key)
    folded = grouped.persistent_aggregate(n=count()) if counted == "n" else grouped.persistent_aggregate(m=count())
    folded.into(*sinks)
    return t


def delta(operated: Operated, name: str = "delta", path: str = "counts") -> DeltaSink:
    return DeltaSink(operated.cell.folder / "lake" / path, name=name)


def counts(operated: Operated, table: str, where: Database | None = None) -> Counter[str]:
    with psycopg.connect((where or operated.cell.database).conninfo) as connection:
        return Counter(dict(connection.execute(f"select word, n from {table}".encode()).fetchall()))


LINES = [f"a{i} b".encode() for i in range(9)]


def should(lines: list[bytes]) -> Counter[str]:
    return Counter(word for line in lines for word in line.decode().split())


# -- restored backups ----------------------------------------------------------------------------------------------------


def test_a_ledger_restored_from_an_old_backup_is_refused(operated: Operated, postgres: EmbeddedPostgres) -> None:
    operated.put(*LINES)
    operated.run(words(operated, delta(operated)))
    backup = Backup(postgres, operated.cell.database)
    table = operated.cell.folder / "lake" / "counts"
    try:
        operated.put(*LINES)
        operated.run(words(operated, delta(operated)))
        backup.restore()
        before = DeltaTable(str(table)).version()
        operated.put(b"more words")
        with pytest.raises(PositionMismatch, match=r"'delta' .* holds txid \d+ .* ledger says txid \d+ .*audit verify"):
            operated.run(words(operated, delta(operated)))
        assert DeltaTable(str(table)).version() == before
        assert "evidence_unknown_txid" in operated.kinds("violations", operated.verify(status=1))
    finally:
        backup.drop()


def test_a_ledger_set_back_below_a_sinks_fence_is_no_take_over(operated: Operated, postgres: EmbeddedPostgres) -> None:
    """The sink's own database knows a newer epoch: nobody took over, and status 3 would send the operator astray."""
    elsewhere = operated.cell.database.with_name(f"{name_of(operated.cell.database)}_sink")
    with psycopg.connect(postgres.database.conninfo, autocommit=True) as connection:
        connection.execute(f"create database {name_of(elsewhere)} template template0".encode())
    built = [words(operated, PostgresSink("counts", name="pg", database=elsewhere)) for _ in range(7)]
    operated.put(*LINES)
    operated.run(built.pop())
    ledger = Backup(postgres, operated.cell.database)
    sink = Backup(postgres, elsewhere)
    try:
        for line in (b"c", b"d", b"e"):
            operated.put(line)
            operated.run(built.pop())
        ledger.restore()
        with pytest.raises(PositionMismatch, match=r"epoch 4 holds it.* epoch 2 is the newest.*restored") as refused:
            operated.run(built.pop())
        assert not isinstance(refused.value, Fenced)
        # The way out that the error names: both at the same moment.
        ledger.restore()
        sink.restore()
        operated.put(b"c", b"d")
        with pytest.raises(PositionMismatch, match=rf"replaced.*ledger adopt-table {NAME} pg"):
            operated.run(built.pop())
        operated.command("ledger", "adopt-table", NAME, "pg", "--why", "restored, as the ledger was")
        operated.run(built.pop())
        assert counts(operated, "counts", elsewhere) == should([*LINES, b"c", b"d"])
        operated.verify()
    finally:
        ledger.drop()
        sink.drop()
        with psycopg.connect(postgres.database.conninfo, autocommit=True) as connection:
            connection.execute(f"drop database {name_of(elsewhere)} with (force)".encode())


def test_a_postgres_sink_restored_from_an_old_backup_is_refused(operated: Operated, postgres: EmbeddedPostgres) -> None:
    elsewhere = operated.cell.database.with_name(f"{name_of(operated.cell.database)}_sink")
    with psycopg.connect(postgres.database.conninfo, autocommit=True) as connection:
        connection.execute(f"create database {name_of(elsewhere)} template template0".encode())
    built = [words(operated, PostgresSink("counts", name="pg", database=elsewhere)) for _ in range(3)]
    operated.put(*LINES)
    operated.run(built.pop())
    backup = Backup(postgres, elsewhere)
    try:
        operated.put(*LINES)
        operated.run(built.pop())
        backup.restore()
        operated.put(b"more words")
        with pytest.raises(PositionMismatch, match=rf"replaced.*ledger adopt-table {NAME} pg"):
            operated.run(built.pop())
        refused = operated.command("ledger", "adopt-table", NAME, "pg", status=1)
        assert refused["error"]["kind"] == "position_mismatch"
        assert re.search(r"holds txid 3 .* ledger says txid 6", refused["error"]["message"])
        assert counts(operated, "counts", elsewhere) == should(LINES)
        assert {"guard", "evidence_missing", "table_replaced"} <= {
            *operated.kinds("violations", operated.verify(status=1))
        }
    finally:
        backup.drop()
        with psycopg.connect(postgres.database.conninfo, autocommit=True) as connection:
            connection.execute(f"drop database {name_of(elsewhere)} with (force)".encode())


def test_a_delta_table_restored_from_an_old_copy_is_refused(operated: Operated) -> None:
    table = operated.cell.folder / "lake" / table_of(SinkMode.DELTA_FOLD, NAME)
    operated.put(*messages(3))
    operated.run()
    shutil.copytree(table, table.with_name("kept"))
    operated.put(*messages(3, "later"))
    operated.run()
    shutil.rmtree(table)
    table.with_name("kept").rename(table)
    operated.put(b"more words")
    with pytest.raises(
        PositionMismatch, match=r"'delta-fold' .* holds txid \d+ .* ledger says txid \d+ .*audit verify"
    ):
        operated.run()
    assert "evidence_missing" in operated.kinds("violations", operated.verify(status=1))


def test_a_dropped_postgres_table_is_not_made_anew_in_silence(operated: Operated) -> None:
    operated.put(*messages(3))
    operated.run()
    operated.sql(f"drop table {table_of(SinkMode.POSTGRES_APPEND, NAME)}")
    operated.put(b"more words")
    with pytest.raises(PositionMismatch, match=r"'postgres-append'.* is gone.*Nothing was made.*adopt-table"):
        operated.run()
    assert operated.sql(f"select to_regclass('{table_of(SinkMode.POSTGRES_APPEND, NAME)}')") == [(None,)]
    assert "table_replaced" in operated.kinds("violations", operated.verify(status=1))


# -- one table, one life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["delta", "postgres"])
def test_a_renamed_topology_does_not_write_everything_again(operated: Operated, store: str) -> None:
    def built(name: str) -> Topology:
        sink = delta(operated) if store == "delta" else PostgresSink("counts", name="pg")
        return words(operated, sink, name=name)

    operated.put(*LINES)
    operated.run(built(NAME))
    with pytest.raises(
        PositionMismatch, match=rf"topology '{NAME}' .*new name.*ledger adopt renamed ({NAME}/\w+)"
    ) as refused:
        operated.run(built("renamed"))
    life = str(refused.value).rpartition(" ")[2]
    ((own,),) = operated.sql("select incarnation from stormproof.topology where name = 'renamed'")
    for wrong in ("anything at all", life.partition("/")[0], own, ""):
        error = operated.command("ledger", "adopt", "renamed", wrong, status=2)["error"]["message"]
        assert f"{wrong!r} names no incarnation other than that of renamed ({own})" in error
    # Two topologies that share a table on purpose: each counts once, beside the other.
    operated.command("ledger", "adopt", "renamed", life, "--why", "both count here")
    operated.run(built("renamed"))
    operated.command("audit", "verify", "renamed")
    operated.verify()
    if store == "postgres":
        assert counts(operated, "counts") == should([*LINES, *LINES])
    operated.put(b"c")
    operated.run(built(NAME))  # the first one is not asked again
    operated.verify()


def test_a_second_driver_with_another_graph_is_refused_and_fences_nobody(operated: Operated) -> None:
    operated.put(*messages(3))
    with paused_driver(operated.cell, "open.after") as first:
        other = words(operated, delta(operated, SinkMode.DELTA_FOLD, table_of(SinkMode.DELTA_FOLD, NAME)), longest=True)
        with pytest.raises(PositionMismatch, match=r"has changed since its last run.*accept-change"):
            operated.run(other)
        resume(first)
        assert ended(first, "the first") == 0
    for mode in SinkMode:
        assert content(mode, NAME, operated.cell.folder, operated.cell.database) == expected(messages(3)), mode
    operated.verify()


# -- changed graphs ------------------------------------------------------------------------------------------------------


def test_control_a_sinks_row_that_is_missing_from_a_run_that_had_the_sink_is_a_violation(operated: Operated) -> None:
    for line in LINES[:3]:
        operated.put(line)
        operated.run(words(operated, PostgresSink("counts", name="pg"), delta(operated)))
    operated.sql("delete from stormproof.txn_sink where txid = 3 and sink = 'delta'")
    assert "sink_row_missing" in operated.kinds("violations", operated.verify(status=1))


def test_a_sink_does_not_leave_while_a_batch_is_prepared_for_it(operated: Operated) -> None:
    operated.put(*messages(3))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    fewer = replace(operated.cell, mode=SinkMode.POSTGRES_FOLD)
    only = Operated(fewer, operated.capture)
    for sink in (SinkMode.DELTA_APPEND, SinkMode.DELTA_FOLD, SinkMode.POSTGRES_APPEND):
        with pytest.raises(PositionMismatch, match=rf"txid 1 is prepared for it.*ledger skip {NAME} 1 \S+"):
            only.run()
        operated.command("ledger", "skip", NAME, "1", sink, "--why", "the sink is given up")
    only.run()
    assert content(SinkMode.POSTGRES_FOLD, NAME, fewer.folder, fewer.database) == expected(messages(3))
    operated.verify()


def test_a_sink_with_other_columns_needs_a_persons_word(operated: Operated) -> None:
    operated.put(*LINES)
    operated.run(words(operated, PostgresSink("counts", name="pg")))
    operated.sql("alter table counts add column m bigint")
    changed = [words(operated, PostgresSink("counts", name="pg"), counted="m") for _ in range(3)]
    operated.put(b"c")
    with pytest.raises(
        PositionMismatch,
        match=r"column m bigint \(folded by sum\) was added; column n .* was removed.*accept-change histories (\w{12})$",
    ) as refused:
        operated.run(changed.pop())
    assert operated.command("status")["topologies"][0]["epoch"] == 1  # a refused start fences nobody
    fingerprint = str(refused.value).rpartition(" ")[2]
    for wrong in ("nonsense", "0" * 12):  # no start was refused with it
        operated.command("ledger", "accept-change", NAME, wrong, status=2)
    with pytest.raises(PositionMismatch, match="accept-change"):
        operated.run(changed.pop())
    operated.command("ledger", "accept-change", NAME, fingerprint, "--by", "Ada", "--why", "m takes over from n")
    operated.run(changed.pop())
    operated.verify()
    assert operated.sql("select m from counts where word = 'c'") == [(1,)]
    operated.put(b"c")
    with pytest.raises(PositionMismatch, match="accept-change"):
        operated.run(words(operated, PostgresSink("counts", name="pg")))  # nor does it go back without a word


def test_a_replaced_source_is_refused(operated: Operated) -> None:
    operated.put(*LINES)
    operated.run(words(operated, PostgresSink("counts", name="pg")))
    with pytest.raises(PositionMismatch, match=rf"reads source '{NAME}' by the ledger, and 'others' by its code"):
        operated.run(words(operated, PostgresSink("counts", name="pg"), source="others"))
