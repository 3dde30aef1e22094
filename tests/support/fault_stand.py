"""Faults of the environment: what befalls a run that no message is to blame for, and a stand that tries each on the real
command line, in a child process, on real disks and a real Postgres.

A fault is one row: how it is brought about, what the run must say, with which exit status. The stand checks what holds for
every row: no message is blamed, and once the cause is gone the tables are exact and the audit agrees.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.contents import counted, in_delta, in_postgres
from support.crashes import Driver, ended, resume, wait_paused
from support.databases import fresh_database
from support.queues import prepared_database, put
from support.verdicts import is_known, verified

NAME = "orders"
QUEUE = "lines"
BATCH_MESSAGES = 5
TIMEOUT_S = 180

TOPOLOGY = """
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count


def split(line: str) -> list[str]:
    return line.split()


def topology() -> Topology:
    t = Topology("orders")
    words = t.stream("lines", PostgresQueue("lines", schema="line string")).flat_map(split, "line", schema="word string")
    words.into(DeltaSink("lake/words", name="appended"))
    counts = words.group_by("word").persistent_aggregate(n=count())
    counts.into(DeltaSink("lake/counts", name="merged"), PostgresSink("counts", name="folded"))
    return t
"""

RUN = ("run", "orders.py:topology", "--until-idle", "--engine", "inline")

Inside = Callable[[], None]
"""Done in the child, before the command begins; a function of a module, or a `partial` of one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one fault is tried: a folder with a topology, a database of its own, and the server that it is in."""

    folder: Path
    database: Database
    server: EmbeddedPostgres

    @property
    def staging(self) -> Path:
        return self.folder / "home" / "staging"

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    @property
    def file(self) -> Path:
        return self.folder / "orders.py"

    def sql(self, statement: str, database: Database | None = None) -> list[tuple[object, ...]]:
        """As the owner of the database, behind everybody's back."""
        with connect(database or self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def variables(self) -> dict[str, str]:
        return {
            "STORMPROOF_DATABASE_URL": self.database.adbc_uri,
            "STORMPROOF_HOME": str(self.folder / "home"),
            "STORMPROOF_OUTAGE_S": "1",
            "STORMPROOF_BATCH_MESSAGES": str(BATCH_MESSAGES),
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the environment.

    `says` is what standard error must hold, with `...` for whatever differs from run to run; empty where the run
    has nothing to say. `status` is the run's exit status, below 0 the signal that killed it. `before` lasts for as
    long as the fault does: what it undoes at its end is the repair. `inside` is done in the child alone. `at` is a
    failpoint at which the run stands still, the second time that it comes by, while `then` is done. `goes_on` says
    for the reader what has to be done once the cause is gone.
    """

    name: str
    says: str
    status: int = 1
    before: Callable[[Place], AbstractContextManager[object]] = lambda _: nullcontext()
    inside: Sequence[Inside] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    variables: Callable[[Place], Mapping[str, str | None]] = lambda _: {}
    at: str | None = None
    then: Callable[[Place], object] | None = None
    arguments: tuple[str, ...] = RUN
    goes_on: str = "start again"
    repaired_by: Callable[[Place], object] | None = None
    """A command of the operator's between the cause's end and the next start."""
    slow: bool = False
    """It waits for long, or starts a JVM."""

    @property
    def pattern(self) -> str:
        """`says` as a regular expression."""
        return ".*".join(re.escape(part) for part in self.says.split("..."))


class NotHere(Exception):
    """A fault that cannot be brought about on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


@contextmanager
def place_in(folder: Path, server: EmbeddedPostgres, name: str, topology: str = TOPOLOGY) -> Generator[Place]:
    """A folder with a topology, and a database with its messages."""
    with fresh_database(server.database, name) as database:
        place = Place(folder, database, server)
        place.file.write_text(topology)
        (folder / "tmp").mkdir()
        put(prepared_database(database), QUEUE, messages("m"))
        yield place


def messages(prefix: str) -> list[bytes]:
    """Three batches."""
    return [f"{prefix}{number} common {prefix}{number}".encode() for number in range(3 * BATCH_MESSAGES)]


def try_fault(place: Place, fault: Fault) -> Ended:
    """Have it happen, repair it, and go on; what the run said while it lasted.

    Raises:
        AssertionError: it said something else, a message was blamed, or what stands in the tables is not exact.
    """
    with fault.before(place):
        seen = _run(place, fault)
        shown = f"{fault.name}: status {seen.status}, said:\n{seen.err}"
        assert seen.status == fault.status, shown
        assert re.search(fault.pattern, " ".join(seen.err.split())), f"{shown}\nexpected: {fault.says}"
        assert "Traceback" not in seen.err, shown
        assert "unexpected error" not in seen.err, shown
    assert blamed(place) == 0, f"{shown}\nmessages were blamed"
    if fault.repaired_by is not None:
        fault.repaired_by(place)
    put(place.database, QUEUE, messages("n"))
    after = command(place, RUN)
    assert after.status == 0, f"{fault.name}, after the repair: status {after.status}\n{after.err}"
    assert blamed(place) == 0, f"{fault.name}: {after.err}"
    require_exact(place, [*messages("m"), *messages("n")], fault.name)
    return seen


def blamed(place: Place) -> int:
    """How many messages count a failure, or are dead letters."""
    ((found,),) = place.sql(
        "select (select count(*) from stormproof.pending_retry where times_failed > 0)"
        " + (select count(*) from stormproof.dead_letter)"
    )
    assert isinstance(found, int)
    return found


def require_exact(place: Place, payloads: Sequence[bytes], what: str) -> None:
    """Every table holds what follows from the input alone, and the audit agrees."""
    should = Counter(word for payload in payloads for word in payload.decode().split())
    assert counted(in_delta(place.lake / "words", None)) == should, what
    assert counted(in_delta(place.lake / "counts", "n"), once="merged") == should, what
    assert counted(in_postgres(place.database, "counts", "n"), once="folded") == should, what
    assert is_known(NAME, place.database), what
    report = verified(NAME, place.database)
    assert not report.violations, (what, report.violations)
    assert not report.unknowns, (what, report.unknowns)


def _run(place: Place, fault: Fault) -> Ended:
    armed = {} if fault.at is None else armed_pauses([fault.at], [2])
    environment = {**fault.environment, **fault.variables(place), **armed}

    def meanwhile(child: Driver) -> None:
        if fault.at is not None and fault.then is not None:
            wait_paused(child, fault.at)
            fault.then(place)
            resume(child)

    return command(place, fault.arguments, environment, fault.inside, meanwhile)


def armed_pauses(points: Sequence[str], at: Sequence[int]) -> dict[str, str]:
    """The variable that has a run stand still at these failpoints, each the `at`-th time that it comes by."""
    return {ENV: ";".join(f"{point}=pause@{time}" for point, time in zip(points, at, strict=True))}


def command(
    place: Place,
    arguments: Sequence[str],
    environment: Mapping[str, str | None] | None = None,
    inside: Sequence[Inside] = (),
    meanwhile: Callable[[Driver], None] = lambda _: None,
    files: str = "run",
) -> Ended:
    """Run one command in a child, forked from a process that has everything loaded."""
    out, err = place.folder / f"{files}-out.txt", place.folder / f"{files}-err.txt"
    variables: dict[str, str | None] = {**place.variables(), **(environment or {})}
    child = multiprocessing.get_context("forkserver").Process(
        target=run_command, args=(place.folder, tuple(arguments), variables, tuple(inside), out, err), daemon=True
    )
    child.start()
    try:
        meanwhile(child)
        status = ended(child, " ".join(arguments), TIMEOUT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{err.read_text(errors='replace')}") from error
    finally:
        child.kill()
        child.join()
    return Ended(status, out.read_text(errors="replace"), err.read_text(errors="replace"))


def run_command(
    folder: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str | None],
    inside: Sequence[Inside],
    out: Path,
    err: Path,
) -> None:
    """In the child: the command line, with its outputs in files."""
    os.chdir(folder)
    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    for key, value in variables.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from stormproof.trident.cli import main

    for step in inside:
        step()
    try:
        main(list(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


# ---- disks


@contextmanager
def tmpfs(folder: Path, options: str) -> Generator[None]:
    """A file system of its own at a folder; what is in it goes with it.

    Raises:
        NotHere: this user may not mount one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        raise NotHere(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def remount(folder: Path, options: str) -> None:
    """Change a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, timeout=30)


def fill(folder: Path) -> None:
    """Leave no byte on the file system of a folder."""
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        block = 4096
        while block:
            try:
                ballast.write(b"x" * block)
            except OSError:
                block //= 2


# ---- rights: root obeys the modes of files once it has given up the capability not to

_CAPABILITY_VERSION_3 = 0x20080522
_OVERRIDES = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


def obey_modes() -> None:
    """Have this process refused what a file's mode refuses, root or not."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    data[0] &= ~_OVERRIDES
    data[1] &= ~_OVERRIDES
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def mode(folder: Path, bits: int) -> Generator[None]:
    """A folder with these rights."""
    folder.mkdir(parents=True, exist_ok=True)
    before = folder.stat().st_mode
    folder.chmod(bits)
    try:
        yield
    finally:
        folder.chmod(before)


# ---- databases


@contextmanager
def undone(place: Place, do: str, undo: str) -> Generator[None]:
    """A statement, and at the end the one that takes it back; as the server's owner, from another database."""
    place.sql(do, place.server.database)
    try:
        yield
    finally:
        place.sql(undo, place.server.database)


def end_backends(place: Place) -> None:
    """End every other connection to the database."""
    with psycopg.connect(place.server.database.conninfo, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()",
            (dict(place.database.parameters)["dbname"],),
        )
