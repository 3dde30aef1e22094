"""What the machine refuses the driver while it commits: a full disk, a missing right, a disk that fails.

Nothing is blocked and nothing is lost: the driver goes on by itself once the cause is gone, and so does the next start.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake.exceptions import DeltaError
from support.kept import LINES, Kept, should
from support.operated import Operated

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.base.failpoint import watched
from stormproof.sinks.delta import versions
from stormproof.sinks.delta.versions import may_pass, os_error, shown
from stormproof.sinks.postgres import session as postgres_session
from stormproof.sinks.prepare import staging
from stormproof.trident.state import sink as state_sink

pytestmark = pytest.mark.sampled(0.25)

NAME: Final = "identity"

REFUSALS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class Full:
    """A disk that is full while Delta commits, `times` times: each write of this process is answered with EFBIG.

    It has space again from the next failpoint on, which is one of the next try's where the commit failed.
    """

    def __init__(self, times: int) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._times = times
        self.met = 0

    def __call__(self, place: str) -> None:
        if place == "delta.after_check" and self.met < self._times:
            self.met += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@contextmanager
def full_disk(times: int) -> Generator[Full]:
    """Delta's writes fail so often, then succeed."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    full = Full(times)
    try:
        with watched(full):
            yield full
    finally:
        full("delta.after_log_entry")
        signal.signal(signal.SIGXFSZ, handler)


def leftovers(folder: Path) -> list[str]:
    """Files that an unfinished write has left."""
    return [str(path) for path in folder.rglob("*#*")]


@pytest.fixture(params=["delta-append", "delta-fold", "delta-map"])
def kept(request: pytest.FixtureRequest, operated: Operated) -> Kept:
    made = Kept(request.param, operated)
    made.run(put=LINES)
    return made


@pytest.mark.postgres
def test_a_commit_on_a_full_disk_goes_on_by_itself(kept: Kept) -> None:
    with full_disk(2) as full:
        kept.run(put=[b"c d"])
    assert full.met == 2
    assert kept.counts() == should(*LINES, b"c d")
    assert leftovers(kept.folder("counts")) == []
    assert kept.operated.verify()["violations"] == []
    assert kept.operated.sql("select count(*) from stormproof.event where kind = 'blocked'") == [(0,)]


@pytest.mark.postgres
def test_a_disk_that_stays_full_ends_the_run_and_blocks_nothing(kept: Kept) -> None:
    kept.operated.put(b"c d")
    with full_disk(1000) as full, pytest.raises(StoreUnavailable, match="File too large"):
        kept.operated.run(kept.built(), outage_s=0.3)
    assert full.met > 1
    assert kept.operated.sql("select state from stormproof.txn order by txid desc limit 1") == [("prepared",)]
    kept.run()
    assert kept.counts() == should(*LINES, b"c d")
    assert kept.operated.verify()["violations"] == []


@pytest.mark.postgres
@pytest.mark.parametrize("kept", ["delta-fold"], indirect=True)
def test_control_a_refusal_by_the_table_blocks(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every error of a MERGE did: then the test above finds it. To ask which row it is about needs the disk, too."""
    monkeypatch.setattr(versions, "may_pass", lambda error: False)
    monkeypatch.setattr("stormproof.sinks.delta.judge.Judge.refused_since", lambda *asked: None)
    with full_disk(2), pytest.raises(SinkRefused, match="is blocked"):
        kept.run(put=[b"c d"])


@pytest.mark.postgres
@pytest.mark.parametrize("kept", ["delta-fold"], indirect=True)
def test_a_commit_that_cannot_be_synced_is_synced_later(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, owed = os.fsync, list(REFUSALS)

    def refusing(fd: int) -> None:
        if owed and os.readlink(f"/proc/self/fd/{fd}").endswith("4.json"):
            number = owed.pop()
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refusing)
    kept.run(put=[b"c d"])
    assert owed == []
    assert kept.counts() == should(*LINES, b"c d")
    assert kept.operated.verify()["violations"] == []


@pytest.mark.postgres
@pytest.mark.parametrize("store", ["postgres-fold", "postgres-map"])
def test_staged_files_that_cannot_be_read_or_removed_block_nothing(
    operated: Operated, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where the table is in Postgres: its own full disk is class 53, which is transient, too."""
    kept = Kept(store, operated)
    kept.run(put=LINES)
    failed: list[str] = []

    def once(name: str) -> None:
        inner = getattr(staging, name)

        def refusing(*arguments: Any, **named: Any) -> Any:
            if name not in failed:
                failed.append(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return inner(*arguments, **named)

        for module in (staging, postgres_session, state_sink):
            monkeypatch.setattr(module, name, refusing, raising=False)

    once("require_files")
    once("remove_staged")
    kept.run(put=[b"c d"])
    assert sorted(failed) == ["remove_staged", "require_files"]
    assert kept.counts() == should(*LINES, b"c d")
    assert kept.operated.verify()["violations"] == []


# What delta-rs 1.6 says, as it was seen on a full tmpfs, behind RLIMIT_FSIZE, on a read-only mount and without a right.
MERGE: Final = "Failed to parse parquet: External: Generic LocalFileSystem error: Unable to copy data to file: {}"
APPEND: Final = (
    "Generic LocalFileSystem error\n          \x1b[31m\u21b3\x1b[0m Unable to open file /t/_delta_log/1.json#1\n"
    "           \x1b[31m\u21b3\x1b[0m {}\n"
)


@pytest.mark.parametrize("text", [MERGE, APPEND])
@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_what_the_machine_refuses_may_pass(number: int, text: str) -> None:
    error = DeltaError(text.format(f"{os.strerror(number)} (os error {number})"))
    assert os_error(error) == os_error(OSError(number, "as it is")) == number
    assert may_pass(error)
    assert may_pass(OSError(number, "as it is"))
    assert "\n" not in shown(error)
    assert "\x1b" not in shown(error)


@pytest.mark.parametrize(
    "text",
    [
        MERGE.format("No such file or directory (os error 2)"),
        "Cannot cast value 1e39 to Decimal128(38, 2)",
        "Generic DeltaTable error: Invariant violations",
    ],
)
def test_what_the_table_refuses_stays(text: str) -> None:
    assert not may_pass(DeltaError(text))


ON_TMPFS: Final = """
import sys
from pathlib import Path
from support.sink_harness import SinkHarness
from stormproof.core.base.errors import StoreUnavailable
kind, folder = sys.argv[1], Path(sys.argv[2])
harness = SinkHarness(kind, folder, None)
session = harness.open()
session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)
second = harness.prepare(session, 2, 1, {"a": 10, "b": 2})
fill = folder / "fill"
with fill.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print(error.errno)
try:
    session.commit(second, checked=True)
except StoreUnavailable as error:
    print(error.details["errno"])
fill.unlink()
print(session.held().txid, harness.open(2).commit(second, checked=True).outcome, sorted(harness.rows()))
print(list(folder.rglob("*#*")))
"""


def test_a_full_file_system(tmp_path: Path) -> None:
    """The real thing, where the machine lets a test mount one."""
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    script = 'mount -t tmpfs -o size=2m tmpfs "$1" && shift && exec "$@"'
    if subprocess.run([*mounted, 'mount -t tmpfs none "$0"', tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a test mount a file system")
    driver = [sys.executable, "-c", ON_TMPFS, "delta-fold", str(tmp_path)]
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [*mounted, script, "sh", str(tmp_path), *driver],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.stdout.splitlines() == ["28", "28", "1 applied [('a', 11), ('b', 2)]", "[]"]
