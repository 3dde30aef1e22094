"""Faults of the environment, and drivers that meet them: what a run says, how it ends, and whom it blames.

A driver is a child process, forked with everything loaded; the fault is arranged inside it, at its start or behind its
first batch, so that the tests' own process and the machine stay whole. The command line's own outermost frame turns what
the run raises into text and exit status, as for a user.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import resource
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from deltalake import DeltaTable

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.output import guarded
from stormproof.trident.driver.run import driver, options_of
from stormproof.trident.ledger import tables as t
from stormproof.trident.terms.observers import BatchResult
from stormproof.trident.terms.transaction_states import EventKind
from support.crashes import Driver, child_of, ended

QUEUE: Final = "lines"
TABLE: Final = "kept"
MESSAGES: Final = 40
BATCH_MESSAGES: Final = 20
MESSAGE_BYTES: Final = 16 * 1024
FILE_BYTES_MAX: Final = 100 * 1024
"""Less than a batch's file, and more than a preflight writes."""

OUTAGE_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Site:
    """Where a topology runs: its folders, its database, and its guarantee."""

    folder: Path
    database: Database
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    outage_s: float = OUTAGE_S

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def staging(self) -> Path:
        return self.home / "staging"

    @property
    def table(self) -> Path:
        return self.folder / "lake" / TABLE

    @property
    def said(self) -> Path:
        """What the driver printed on standard error."""
        return self.folder / "said"


def kept(line: str) -> str:
    """The messages' one function."""
    return line


def payloads() -> list[bytes]:
    """Messages that hardly compress."""
    rng = random.Random(7)
    return [rng.randbytes(MESSAGE_BYTES // 2).hex().encode() for _ in range(MESSAGES)]


def topology(site: Site, function: Callable[[str], str] = kept) -> Topology:
    """Lines into a Delta table's own folder, and through the staging folder into Postgres."""
    made = Topology("kept")
    source = PostgresQueue(
        QUEUE,
        schema="line string",
        database=site.database,
        max_attempts=2,
        backoff_base_s=0.001,
        backoff_max_s=0.001,
    )
    lines = made.stream("lines", source).map(function, "line", schema="line string")
    lines.into(DeltaSink(str(site.table), name="delta"), PostgresSink(TABLE, name="postgres", database=site.database))
    return made


def _plain() -> Callable[[str], str]:
    return kept


def _anybody() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with the machine. Both functions run in the driver's process.

    `always` is arranged before the run, `later` behind its first batch; `function` makes the topology's. `may` says why
    it cannot be arranged here.
    """

    name: str
    always: Callable[[Site], None] | None = None
    later: Callable[[Site], None] | None = None
    function: Callable[[], Callable[[str], str]] = field(default=_plain)
    may: Callable[[], str | None] = field(default=_anybody)


def run_driver(site: Site, fault: Fault | None = None, sabotage: Callable[[], None] | None = None) -> int:
    """Run until idle, with a fault or without: the exit status. `sabotage` breaks the code, for a negative control."""
    site.said.unlink(missing_ok=True)
    child: Driver = child_of(_drive, (site, fault, sabotage))
    return ended(child, "no fault" if fault is None else fault.name)


def _drive(site: Site, fault: Fault | None, sabotage: Callable[[], None] | None) -> None:
    sys.stderr = site.said.open("w", encoding="utf-8")
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    fault = fault or Fault("none")
    settings = Settings(
        database_url=site.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=site.home,
        batch_messages=BATCH_MESSAGES,
    )
    options = replace(options_of(settings, site.guarantee), outage_s=site.outage_s)
    batches = 0

    def on_batch(result: BatchResult) -> None:
        nonlocal batches
        batches += 1
        if batches == 1 and fault.later is not None:
            fault.later(site)

    if sabotage is not None:
        sabotage()
    if fault.always is not None:
        fault.always(site)
    with (
        guarded(as_json=False),
        driver(
            topology(site, fault.function()),
            site.guarantee,
            settings=settings,
            engine="inline",
            options=options,
            until_idle=True,
            rng=random.Random(1),
            on_batch=on_batch,
        ) as coordinator,
    ):
        coordinator.run()


# -- what came of it -----------------------------------------------------------------------------------------------------


def blamed(site: Site) -> Counter[str]:
    """Every trace of blame: failures and dead letters in the ledger, by kind, and what the queue counts."""
    engine = sa.create_engine(site.database.sqlalchemy_url)
    kinds = [EventKind.FAILURE.value, EventKind.DEAD_LETTER.value]
    try:
        with engine.connect() as connection:
            rows = connection.execute(sa.select(t.event.c.kind).where(t.event.c.kind.in_(kinds))).all()
            counted = connection.execute(sa.text("select coalesce(sum(times_failed), 0) from stormproof.pending_retry"))
            return +Counter(row.kind for row in rows) + Counter(retries=int(counted.scalar_one()))
    finally:
        engine.dispose()


def held(site: Site) -> tuple[Counter[str], Counter[str]]:
    """What the two tables hold."""
    delta = Counter[str]()
    if DeltaTable.is_deltatable(str(site.table)):
        delta.update(DeltaTable(str(site.table)).to_pyarrow_table().column("line").to_pylist())
    with connect(site.database, application_name="tests") as connection:
        there = connection.execute("select to_regclass(%s)", (TABLE,)).fetchone()
        if there is None or there[0] is None:
            return delta, Counter()
        rows = connection.execute(f"select line from {TABLE}".encode()).fetchall()
    return delta, Counter(row[0] for row in rows)


# -- faults --------------------------------------------------------------------------------------------------------------

_libc: Final = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_CAPABILITY_VERSION_3: Final = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def _called(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _own_mounts() -> None:
    """A mount namespace of this process's own; nothing that is mounted in it is seen outside."""
    _called(_libc.unshare(_CLONE_NEWNS))
    _called(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))


@cache
def no_mounts() -> str | None:
    """Why a process here may not mount; None where it may."""
    pid = os.fork()
    if pid == 0:
        try:
            _own_mounts()
            _called(_libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, b"size=64k"))
        except OSError:
            os._exit(1)
        os._exit(0)
    return "this user may not mount" if os.waitpid(pid, 0)[1] else None


def small_disk(folder: Path) -> None:
    """A file system of 64 KiB in place of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _own_mounts()
    _called(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64k"))


def full_disk(folder: Path) -> None:
    """The same, with no byte left."""
    small_disk(folder)
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def read_only_disk(folder: Path) -> None:
    """A folder's file system is mounted read-only, as a kernel does after an error of the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    _own_mounts()
    where = os.fsencode(folder)
    _called(_libc.mount(where, where, None, _MS_BIND, None))
    _called(_libc.mount(where, where, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None))


def no_right(folder: Path) -> None:
    """The driver's user may not write to a folder; where that is root, it gives up root's way around rights."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _called(_libc.capget(header, data))
    for word in (0, 1):  # effective and permitted
        data[word] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    _called(_libc.capset(header, data))


def small_files(site: Site) -> None:
    """No file may grow above a bound (ulimit -f); the kernel says so where one is written, as with a quota."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, resource.RLIM_INFINITY))


def few_handles(site: Site) -> None:
    """Not one more file may be opened (ulimit -n)."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def removed(folder: Path) -> None:
    """A folder is removed under the run's feet."""
    shutil.rmtree(folder)


class NotThere:
    """A function whose module the workers do not have: it can be pickled, and not be unpickled."""

    def __call__(self, line: str) -> str:
        return line

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("a_module_that_only_the_driver_has",)


class Unreadable(NotThere):
    """A function whose state another version of its module wrote."""

    def __reduce__(self) -> tuple[object, ...]:
        return _wrong_version, ()


def _wrong_version() -> None:
    raise AttributeError("state of version 2")


def out_of(number: int) -> OSError:
    """The kernel's error with this number."""
    return OSError(number, os.strerror(number))


NO_SPACE: Final = errno.errorcode[errno.ENOSPC]
