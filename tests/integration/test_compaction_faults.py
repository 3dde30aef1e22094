"""A compaction that is interrupted, or meets an error, at any step: the table is whole, and no file of it is removed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from support.at_steps import at_line, failing, interrupt, interrupted_at, steps
from support.brokers.object_store import ObjectStore
from support.lossy_store import Loss, LossyStore
from support.sink_harness import SCHEMA, ObjectStoreHarness, SinkHarness

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.sinks.contract.protocol import Compaction
from stormproof.sinks.delta import rewrite
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.rewrite import COMPACTED
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink

MODULES: Final = ("rewrite.py", "upkeep.py", "power_loss.py", "storage/files.py", "delta/versions.py")


@dataclass(slots=True)
class Table:
    """An append table that a driver commits to, and what it is to hold."""

    harness: SinkHarness
    session: DeltaSession
    wanted: Counter[tuple[str, int]]
    txid: int = 0

    @staticmethod
    def made(folder: Path) -> Table:
        harness = SinkHarness("delta-append", folder, None)
        session = harness.open(1)
        assert isinstance(session, DeltaSession)
        return Table(harness, session, Counter())

    def commit(self, times: int = 2) -> None:
        """Small files, by the driver that has the table open."""
        for _ in range(times):
            self.txid += 1
            prepared = self.harness.prepare(self.session, self.txid, self.txid - 1 or None, {"w": self.txid})
            self.session.commit(prepared, checked=True)
            self.session.finished(prepared)
            self.wanted[("w", self.txid)] += 1

    def compact(self) -> Compaction:
        """As `stormproof compact` does beside the driver."""
        session = self.harness.sink.inspect(self.harness.identity, self.harness.input)
        assert isinstance(session, DeltaSession)
        return session.compact()

    def require_whole(self) -> None:
        """For a reader, for the driver's next commit, for a start."""
        assert self.harness.rows() == self.wanted
        self.commit()
        started = self.harness.open(1)
        assert started.evidence(1, None).problems == ()
        started.close()

    def left_over(self) -> set[str]:
        """Files of compactions that no version names."""
        log = DeltaLog(str(self.harness.delta_path))
        entries = [entry for version in log.versions() if (entry := log.entry(version)) is not None]
        there = {path.name for path in self.harness.delta_path.glob(f"{COMPACTED}*")}
        return there - {file.path for entry in entries for file in entry.added}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    found = Table.made(tmp_path)
    found.commit(3)
    return found


def lines_of(table: Table) -> int:
    with at_line(0, interrupt, MODULES) as seen:
        table.compact()
    table.commit()
    return seen[0]


def interrupted(table: Table, step: int) -> None:
    with suppress(KeyboardInterrupt):
        interrupted_at(table.compact, step, MODULES)
    table.require_whole()


@pytest.mark.timeout(300)
def test_an_interrupt_at_any_line_leaves_the_table_whole(table: Table, seed: int, pytestconfig: pytest.Config) -> None:
    for step in steps(lines_of(table), seed, pytestconfig):
        interrupted(table, step)
    assert table.compact().version is not None
    table.require_whole()


def test_control_files_that_go_whatever_the_log_says_break_the_table(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "_is_never_put", lambda *_: True)
    number = lines_of(table)
    with pytest.raises((OSError, SinkRefused, StoreUnavailable), match=r"(?i)not found|missing|no such file"):
        interrupted_at_each(table, number)


def interrupted_at_each(table: Table, number: int) -> None:
    for step in range(number, 0, -1):
        interrupted(table, step)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_of_any_call_to_the_system_leaves_the_table_whole(
    table: Table, seed: int, code: int, pytestconfig: pytest.Config, *, after: bool
) -> None:
    """An error after an fsync or a link was carried out, too; on a full disk nothing is left over."""
    with failing(0, code, after=after) as calls:
        table.compact()
    assert {"fsync", "link", "rename", "write"} <= {*calls}
    table.commit()
    for step in steps(len(calls), seed, pytestconfig):
        with suppress(OSError, StoreUnavailable), failing(step, code, after=after):
            table.compact()
        assert table.left_over() == set()
        table.require_whole()


def test_an_error_behind_the_log_entry_under_compact_every_leaves_the_driver_going(tmp_path: Path) -> None:
    table = Table.made(tmp_path)
    sink = DeltaSink(table.harness.delta_path, name="counts", compact_every=2)
    table.session = sink.open(table.harness.identity, table.harness.input, 1)
    table.commit(1)
    real, struck = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("_delta_log") and not struck and [*table.harness.delta_path.glob(f"{COMPACTED}*")]:
            struck.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        table.commit(4)
    assert struck
    table.require_whole()


KILLED: Final = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {examples!r}]
from pathlib import Path
from integration.test_compaction_faults import MODULES, Table
from support.at_steps import at_line
table = Table.made(Path({folder!r}))
with at_line({step}, lambda: os.kill(os.getpid(), signal.SIGKILL), MODULES):
    table.compact()
"""


def test_a_kill_at_any_line_leaves_the_table_whole(table: Table, seed: int, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    told = {"tests": str(tests), "examples": str(tests.parent / "examples"), "folder": str(tmp_path)}
    number = lines_of(table)
    for step in random.Random(seed).sample(range(number // 2, number), 3):
        subprocess.run([sys.executable, "-c", KILLED.format(**told, step=step)], check=False, cwd=tests)
        table.require_whole()
    assert table.compact().version is not None
    table.require_whole()


def test_a_vacuum_removes_what_failed_compactions_left_a_day_ago(table: Table) -> None:
    kept = table.compact()
    young, old = (table.harness.delta_path / f"{COMPACTED}{uuid.uuid4().hex}.parquet" for _ in range(2))
    for path in (young, old):
        path.write_bytes(b"left over")
    yesterday = time.time() - 86_500
    os.utime(old, (yesterday, yesterday))
    (named,) = {*table.harness.delta_path.glob(f"{COMPACTED}*")} - {young, old}
    os.utime(named, (yesterday, yesterday))
    session = table.harness.sink.inspect(table.harness.identity, table.harness.input)
    assert isinstance(session, DeltaSession)
    assert session.vacuum(dry_run=True) == [old.name]
    assert session.vacuum() == [old.name]
    assert (young.exists(), old.exists(), named.exists(), kept.version is None) == (True, False, True, False)
    table.require_whole()


def test_lost_files_behind_commits_of_ours_are_named_by_starts_compact_and_vacuum(table: Table) -> None:
    version = table.compact().version
    (lost,) = table.harness.delta_path.glob(f"{COMPACTED}*")
    table.commit(3)
    away = lost.rename(lost.with_name("away"))
    session = table.harness.sink.inspect(table.harness.identity, table.harness.input)
    assert isinstance(session, DeltaSession)
    for ask in (lambda: table.harness.open(2), table.compact, lambda: session.vacuum(0)):
        with pytest.raises(SinkRefused, match=rf"version {version}, a compaction, lost .*{lost.name}"):
            ask()
    away.rename(lost)
    table.require_whole()


# In an object store


COMPACTING: Final = """
import sys
sys.path[:0] = [{tests!r}, {examples!r}]
from support.sink_harness import ObjectStoreHarness
from stormproof.core.base.errors import StoreUnavailable
from stormproof.sinks.delta import rewrite
if {removes!r}:
    rewrite._is_never_put = lambda *_: True
session = ObjectStoreHarness("append", {url!r}, {options!r}).open(1)
try:
    print(session.compact().version is not None)
except StoreUnavailable:
    print("unavailable")
"""


@dataclass(slots=True)
class Stored:
    """A table in a store, with a driver's commits in it."""

    server: ObjectStore
    proxy: LossyStore
    harness: ObjectStoreHarness
    txid: int = 0

    def commit(self, times: int) -> None:
        session = self.harness.open(1)
        for _ in range(times):
            self.txid += 1
            prepared = self.harness.prepare(session, self.txid, self.txid - 1 or None, {"w": self.txid})
            session.commit(prepared, checked=True)

    def compact(self, *, removes: bool = False) -> str:
        """Through the proxy, in a process of its own: delta-rs waits for some answers without letting other threads run."""
        tests = Path(__file__).parents[1]
        code = COMPACTING.format(
            tests=str(tests),
            examples=str(tests.parent / "examples"),
            removes=removes,
            url=self.harness.url,
            options=self.server.options(self.proxy.port),
        )
        run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
        self.proxy.lose(Loss.ANSWER, 0, "PUT", "nothing")
        return run.stdout.strip()

    def require_whole(self) -> None:
        """For a reader, the next commit, a start, a compaction and a VACUUM."""
        wanted = Counter({("w", txid): 1 for txid in range(1, self.txid + 1)})
        assert self.harness.rows() == wanted
        self.commit(1)
        session = self.harness.open(2)
        assert isinstance(session, DeltaSession)
        assert session.evidence(1, None).problems == ()
        session.compact()
        session.vacuum(0)
        assert self.harness.rows() == wanted | Counter({("w", self.txid): 1})


@pytest.fixture
def stored(object_store: ObjectStore) -> Generator[Stored]:
    with LossyStore(object_store.port) as proxy:
        url = f"{object_store.url}/{uuid.uuid4().hex}"
        found = Stored(object_store, proxy, ObjectStoreHarness("append", url, object_store.options()))
        found.commit(3)
        yield found


@pytest.mark.parametrize("how", ["append", "upsert", "fold"])
def test_a_table_in_an_object_store_is_compacted_and_vacuumed(object_store: ObjectStore, how: str) -> None:
    harness = ObjectStoreHarness(how, f"{object_store.url}/{uuid.uuid4().hex}", object_store.options())
    session = harness.open(1)
    assert isinstance(session, DeltaSession)
    for txid in (1, 2, 3):
        session.commit(harness.prepare(session, txid, txid - 1 or None, {f"w{txid}": txid}), checked=True)
        table = harness.table()
        write_deltalake(table, pa.table({"word": ["x"], "n": [txid]}, schema=SCHEMA), mode="append")
    rows = harness.rows()
    done = session.compact()
    assert (done.removed > 1, done.added, len(harness.table().file_uris())) == (True, 1, 1)
    assert harness.rows() == rows
    assert session.vacuum(0)
    assert harness.rows() == rows
    assert session.evidence(1, None).problems == ()
    session.commit(harness.prepare(session, 4, 3, {"w4": 4}), checked=True)
    assert sum(harness.rows().values()) == sum(rows.values()) + 1


@pytest.mark.parametrize("path", [r"_delta_log/0{10}", COMPACTED], ids=["entry", "file"])
@pytest.mark.parametrize("loss", [Loss.ANSWER, Loss.REQUEST])
@pytest.mark.parametrize("times", [1, 1_000])
def test_a_compaction_whose_requests_or_answers_are_lost_leaves_the_table_whole(
    stored: Stored, path: str, loss: Loss, times: int
) -> None:
    stored.proxy.lose(loss, times, "PUT", path)
    stands = times == 1 or (loss is Loss.ANSWER and path is not COMPACTED)  # which the log says, whatever the answers
    assert stored.compact() == ("True" if stands else "unavailable")
    assert stored.proxy.lost > 0
    stored.require_whole()


def arrives_late(stored: Stored, *, removes: bool) -> None:
    stored.proxy.lose(Loss.LATE, 1_000, "PUT", r"_delta_log/0{10}")
    assert stored.compact(removes=removes) == "unavailable"
    stored.proxy.send_late()
    assert int(stored.proxy.late_answers[0].split()[1]) == stored.server.STORED


def test_a_compactions_entry_that_arrives_late_finds_its_files(stored: Stored) -> None:
    arrives_late(stored, removes=False)
    stored.require_whole()


def test_control_files_that_go_before_their_entry_arrives_are_missed(stored: Stored) -> None:
    arrives_late(stored, removes=True)
    with pytest.raises((OSError, SinkRefused, FileNotFoundError), match=r"(?i)not found|missing"):
        stored.require_whole()
