"""The preflight: what every task needs is tried on each machine before the first batch, and what is missing is named.

A run asks its engine once (`Engine.ask`), before its epoch is raised: a run that no machine can serve fences nobody. The
questions are `Probe`s: picklable, cheap, and without lasting effect.
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, Protocol

from stormproof.core.base.errors import MachineUnavailable, MachineUnfit, StoreUnavailable, StormproofError
from stormproof.core.base.machine_faults import classified, unpickled
from stormproof.core.heartbeat.task import Connection
from stormproof.core.heartbeat.wire import NO_REPORT, Place
from stormproof.core.postgres.database import Database, connect
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import StorageOptions, is_url, storage_options, use_storage

PROBE_BYTES: Final = 64 * 1024
"""Size of the file that is written as a test: larger than one block of a file system."""

HEARTBEAT_PROBE_S: Final = 5.0

PREFIX: Final = "stormproof-probe-"

_RUN_BY_TASKS: Final = ("core", "sinks")


class Probe(Protocol):
    """Something that every task needs. Picklable."""

    def probe(self) -> None:
        """Try it, on this machine.

        Raises:
            StormproofError: it is missing; names the machine, and what to do.
            Exception: any other error, which `stormproof.core.base.machine_faults` classifies.
        """
        ...


def first_fault(probes: Iterable[Probe]) -> StormproofError | None:
    """The fault of this machine to mend first; None where it has everything.

    A fault that somebody must mend is named before one that may pass by itself.
    """
    found: StormproofError | None = None
    for probe in probes:
        try:
            probe.probe()
        except Exception as error:  # noqa: BLE001 - sorted by class: see `classified`
            fault = classified(error, f"the preflight on {socket.gethostname()}")
            if not isinstance(fault, MachineUnavailable | StoreUnavailable):
                return fault
            found = found or fault
    return found


@dataclass(frozen=True, slots=True)
class PackageProbe:
    """The worker runs the driver's code: the same files of this package."""

    fingerprint: str

    def probe(self) -> None:
        """Compare the fingerprints."""
        here = package_fingerprint()
        if here != self.fingerprint:
            host = socket.gethostname()
            raise MachineUnfit(
                f"{host} has another version of the package stormproof than the driver: {Path(__file__).parents[2]} there "
                f"({here[:8]}, not {self.fingerprint[:8]}). No message was opened. Install the driver's version in the "
                "Python of every executor, or send it along: stormproof pack",
                host=host,
                error="version",
            )


@cache
def package_fingerprint() -> str:
    """A digest of the code of this package that tasks run; the same whether it lies in a folder or in an archive.

    Some 15 ms, once a process.
    """
    hasher = hashlib.sha256()
    package = files("stormproof")
    for folder in _RUN_BY_TASKS:
        for name, text in sorted(_modules(package / folder, folder)):
            hasher.update(f"{name}\n".encode() + text)
    return hasher.hexdigest()


def _modules(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        inner = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _modules(entry, inner)
        elif entry.name.endswith(".py"):
            yield inner, entry.read_bytes()


@dataclass(frozen=True, slots=True)
class UnpickleProbe:
    """A topology's functions, as they are packed for workers."""

    data: bytes

    def probe(self) -> None:
        """Unpickle them."""
        unpickled(self.data)


@dataclass(frozen=True, slots=True)
class FolderProbe:
    """A folder that tasks write to, and that they share with the driver, which put the file `marker` there."""

    what: str
    folder: str
    marker: str

    def probe(self) -> None:
        """Find the driver's file; then write a file, sync it and remove it."""
        host = socket.gethostname()
        try:
            if not os.path.exists(os.path.join(self.folder, self.marker)):
                raise MachineUnfit(
                    f"{self.what} ({self.folder}) on {host} is not the driver's folder: a file that the driver has just "
                    "written there is not seen. No message was opened. Name a folder that the driver and every executor "
                    "share (STORMPROOF_STAGING_DIR; for a Delta table, its own folder)",
                    host=host,
                    file=self.folder,
                )
            write_and_sync(os.path.join(self.folder, f"{PREFIX}{uuid.uuid4().hex}"))
        except OSError as error:
            raise faulty_place(error, f"{self.what} ({self.folder})") from error


@dataclass(frozen=True, slots=True)
class HeartbeatProbe:
    """The driver's port for the progress of tasks."""

    place: Place

    def probe(self) -> None:
        """Connect, show the token, and report an end."""
        Connection(self.place, 0, 0, wait_s=HEARTBEAT_PROBE_S).close(NO_REPORT, failed=False)


@dataclass(frozen=True, slots=True)
class DatabaseProbe:
    """A database that tasks read from."""

    what: str
    database: Database

    def probe(self) -> None:
        """Connect, and ask for one row."""
        host = socket.gethostname()
        try:
            with connect(self.database, application_name="stormproof preflight", autocommit=True) as connection:
                connection.execute("select 1")
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"{self.what} is not reached from {host}: {error.message}", host=host, **dict(error.details)
            ) from error


def faulty_place(error: OSError, what: str) -> StormproofError:
    """The fault that an operating system's error is, with the place where it was met."""
    fault = classified(error, what)
    return type(fault)(f"{what}: {fault.message}", **dict(fault.details))


def write_and_sync(path: str) -> None:
    """Write a small file as tasks write theirs, and remove it.

    Raises:
        OSError: it cannot.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(bytes(PROBE_BYTES))
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def marked(folders: Iterable[tuple[str, str | Path]]) -> Generator[tuple[FolderProbe, ...]]:
    """Probes of these folders (what each is, and its path), with a marker file of the driver in each meanwhile.

    Where a folder does not exist yet (its first writer makes it), the nearest one above it that does is tried.

    Raises:
        MachineUnavailable, MachineUnfit: the driver itself cannot write there.
    """
    probes: dict[str, FolderProbe] = {}
    try:
        for what, wanted in folders:
            folder = str(_existing(Path(wanted)))
            if folder in probes:
                continue
            marker = f"{PREFIX}{uuid.uuid4().hex}"
            try:
                os.close(os.open(os.path.join(folder, marker), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            except OSError as error:
                raise faulty_place(error, f"{what} ({folder})") from error
            probes[folder] = FolderProbe(what, folder, marker)
        yield tuple(probes.values())
    finally:
        for folder, probe in probes.items():
            with suppress(OSError):
                os.unlink(os.path.join(folder, probe.marker))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next((p for p in (folder, *folder.parents) if p.is_dir()), folder)


# ---- the question about a folder in an object store: can each machine read what the driver put there, and write?


@dataclass(frozen=True, slots=True)
class ObjectProbe:
    """A folder in an object store that tasks write to; the driver put the object `marker` there."""

    what: str
    folder: str
    marker: str
    options: StorageOptions

    def probe(self) -> None:
        """Find the driver's object; then put one and remove it."""
        host = socket.gethostname()
        use_storage(self.folder, self.options)
        files = files_at(self.folder)
        try:
            if files.stat(os.path.join(self.folder, self.marker)) is None:
                raise MachineUnfit(
                    f"{self.what} ({self.folder}) on {host} is another one than the driver's: an object that the driver has "
                    "just put there is not seen. No message was opened. Have both reach the same store: see storage_options",
                    host=host,
                    file=self.folder,
                )
            path = os.path.join(self.folder, f"_{PREFIX}{uuid.uuid4().hex}")
            files.put_new(path, b"")
            files.remove(path)
        except OSError as error:
            raise faulty_place(error, f"{self.what} ({self.folder}) on {host}") from error


@contextmanager
def marked_places(folders: Iterable[tuple[str, str]]) -> Generator[tuple[Probe, ...]]:
    """Probes of these folders (what each is, and its path or URL), with a mark of the driver's in each meanwhile.

    Raises:
        StormproofError: the driver itself cannot write there; names the folder.
    """
    wanted = list(folders)
    local = [(what, folder) for what, folder in wanted if not is_url(folder)]
    stored = [(what, folder) for what, folder in wanted if is_url(folder)]
    with marked(local) as paths, marked_objects(stored) as objects:
        yield (*paths, *objects)


@contextmanager
def marked_objects(folders: Iterable[tuple[str, str]]) -> Generator[tuple[ObjectProbe, ...]]:
    """Probes of these folders (what each is, and its URL), with an object of the driver's in each meanwhile.

    Raises:
        StormproofError: the driver itself cannot write there; names the folder.
    """
    probes: list[ObjectProbe] = []
    try:
        for what, folder in folders:
            marker = f"_{PREFIX}{uuid.uuid4().hex}"
            try:
                files_at(folder).put_new(os.path.join(folder, marker), b"")
            except OSError as error:
                raise faulty_place(error, f"{what} ({folder})") from error
            probes.append(ObjectProbe(what, folder, marker, storage_options(folder)))
        yield tuple(probes)
    finally:
        for probe in probes:
            with suppress(OSError):
                files_at(probe.folder).remove(os.path.join(probe.folder, probe.marker))
