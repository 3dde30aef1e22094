"""A repair that is killed, or meets an error, at any step: the table is as it was or repaired, and a second one ends it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from support.at_steps import at_line, failing, interrupt, interrupted_at, steps
from support.brokers.object_store import ObjectStore
from support.doubled_keys import LARGE, compared, opened, repaired, written_before

from stormproof.core.base import failpoint
from stormproof.core.base.errors import StoreUnavailable
from stormproof.sinks.delta import repair
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.rewrite import COMPACTED, put_entry

POINTS: Final = ("repair.before", "repair.after_files", "repair.after_log_entry", "repair.after_sync")
MODULES: Final = ("delta/repair.py", "delta/rewrite.py", "delta/power_loss.py", "storage/files.py", "delta/versions.py")
MENDED: Final = {"upsert": 3, "fold": 6}
"""The number that each key's row has then."""
HOWS: Final = ("upsert", "fold")

KILLED: Final = """
import json, os, signal, sys
where, how, options, step, modules = json.loads(sys.argv[1])
from support.at_steps import at_line
from support.doubled_keys import opened
session = opened(where, how, options)
with at_line(step, lambda: os.kill(os.getpid(), signal.SIGKILL), tuple(modules)):
    session.repair()
"""


def killed(where: str, how: str, options: Mapping[str, str] | None = None, *, point: str = "", step: int = 0) -> bool:
    """Repair it in a process of its own; whether that was killed."""
    tests = Path(__file__).parents[1]
    told = json.dumps([where, how, options, step, MODULES])
    path = os.pathsep.join([str(tests), str(tests.parent / "examples")])
    more = {failpoint.ENV: f"{point}=kill"} if point else {}
    run = subprocess.run(
        [sys.executable, "-c", KILLED, told], check=False, env={**os.environ, "PYTHONPATH": path, **more}
    )
    assert run.returncode in (0, -9)
    return run.returncode == -9


def held(where: str, options: Mapping[str, str] | None = None) -> Counter[tuple[Any, int]]:
    rows = DeltaTable(where, storage_options=None if options is None else dict(options)).to_pyarrow_table()
    return Counter((row["k"], row["n"]) for row in rows.to_pylist())


def mended(how: str) -> Counter[tuple[Any, int]]:
    return Counter({(key, MENDED[how]): 1 for key in LARGE})


def require_old_or_mended(
    where: str, how: str, before: Counter[tuple[Any, int]], options: Mapping[str, str] | None = None
) -> bool:
    """Whether it is mended; a start finds its record right, and a second repair ends it."""
    there = held(where, options)
    assert there in (before, mended(how))
    done = repaired(where, how)
    assert (done.rows_removed, done.left) == (0 if there == mended(how) else 4, [])
    assert held(where, options) == mended(how)
    assert [*compared(where, how).wrong] == []
    with closing(opened(where, how)) as session:
        assert session.evidence(1, None).problems == ()
    return there != before


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("point", POINTS)
def test_a_repair_that_is_killed_at_a_failpoint_is_ended_by_the_next_one(tmp_path: Path, point: str, how: str) -> None:
    where = str(tmp_path / "t")
    written_before(where, how)
    before = held(where)
    assert killed(where, how, point=point)
    assert require_old_or_mended(where, how, before) is (point in POINTS[2:])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("point", [None, *POINTS])
def test_a_table_in_an_object_store_is_mended_also_where_the_repair_is_killed(
    object_store: ObjectStore, point: str | None, how: str
) -> None:
    where, options = f"{object_store.url}/{uuid.uuid4().hex}", object_store.options()
    written_before(where, how, options=options)
    opened(where, how, options).close()
    before = held(where, options)
    assert killed(where, how, options, point=point or "") is (point is not None)
    assert require_old_or_mended(where, how, before, options) is (point not in POINTS[:2])


def lines_of(folder: Path, how: str) -> int:
    """Of a repair, of a copy of the table `made`."""
    written_before(folder / "made", how)
    with at_line(0, interrupt, MODULES) as seen:
        repaired(another(folder), how)
    return seen[0]


def another(folder: Path) -> str:
    """A copy of the table `made`."""
    return str(shutil.copytree(folder / "made", folder / uuid.uuid4().hex))


@pytest.mark.parametrize("how", HOWS)
def test_a_kill_at_any_line_leaves_the_table_old_or_mended(tmp_path: Path, how: str, seed: int) -> None:
    number = lines_of(tmp_path, how)
    for step in random.Random(seed).sample(range(number // 4, number), 3):
        where = another(tmp_path)
        before = held(where)
        killed(where, how, step=step)
        require_old_or_mended(where, how, before)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of a file between its open and its close
@pytest.mark.parametrize("how", HOWS)
def test_an_interrupt_at_any_line_leaves_the_table_old_or_mended(
    tmp_path: Path, how: str, seed: int, pytestconfig: pytest.Config
) -> None:
    number, found = lines_of(tmp_path, how), Counter[bool]()
    for step in steps(number, seed, pytestconfig):
        where = another(tmp_path)
        before = held(where)
        with suppress(KeyboardInterrupt):
            interrupted_at(partial(repaired, where, how), step, MODULES)
        assert left_over(where) == set()
        found[require_old_or_mended(where, how, before)] += 1
    assert found[False] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_of_any_call_to_the_system_leaves_the_table_old_or_mended(
    tmp_path: Path, seed: int, code: int, pytestconfig: pytest.Config, *, after: bool
) -> None:
    written_before(tmp_path / "made", "fold")
    with failing(0, code, after=after) as calls:
        repaired(another(tmp_path), "fold")
    assert {"fsync", "link", "write"} <= {*calls}
    for step in steps(len(calls), seed, pytestconfig):
        where = another(tmp_path)
        before = held(where)
        with suppress(OSError, StoreUnavailable), failing(step, code, after=after):
            repaired(where, "fold")
        assert left_over(where) == set()
        require_old_or_mended(where, "fold", before)


def left_over(where: str) -> set[str]:
    """Files of repairs that no version names."""
    log = DeltaLog(where)
    entries = [entry for version in log.versions() if (entry := log.entry(version)) is not None]
    return {path.name for path in Path(where).glob(f"{COMPACTED}*")} - {
        f.path for entry in entries for f in entry.added
    }


def test_control_a_repair_in_two_versions_leaves_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that stay are put first, the others go in a second entry."""
    where, put = str(tmp_path / "t"), put_entry

    def in_two(log: DeltaLog, version: int, entry: bytes, *more: Any) -> int:
        first = b"\n".join(line for line in entry.splitlines() if b'{"remove"' not in line)
        version = put(log, version, first, *more)
        failpoint.failpoint("repair.after_log_entry")
        return put(log, version, entry, *more)

    monkeypatch.setattr(repair, "put_entry", in_two)
    written_before(where, "upsert")
    before = held(where)
    with failpoint.armed("repair.after_log_entry=raise"), pytest.raises(failpoint.FailpointReached):
        repaired(where, "upsert")
    with pytest.raises(AssertionError):
        require_old_or_mended(where, "upsert", before)
