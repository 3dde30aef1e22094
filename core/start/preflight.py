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
from stormproof.core.heartbeat.task import NO_REPORT, DriverConnection, ReportAddress
from stormproof.core.postgres.database import Database, connect
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import StorageOptions, is_url, options_to_send, use_storage

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
    """A folder that tasks write to, and that they share with the driver, which put the file `marker` there. One in an object
    store is reached with `options`.
    """

    what: str
    folder: str
    marker: str
    options: StorageOptions | None = None

    def probe(self) -> None:
        """Find the driver's file; then write a file, sync it and remove it."""
        if self.options is not None:
            use_storage(self.folder, self.options)
        files, path = files_at(self.folder), os.path.join(self.folder, _probe_name(self.folder))
        try:
            if files.stat(os.path.join(self.folder, self.marker)) is None:
                host = socket.gethostname()
                advice = "Have both reach the same store: see storage_options"
                if self.options is None:
                    advice = (
                        "Name a folder that the driver and every executor share (STORMPROOF_STAGING_DIR; for a Delta table, "
                        "its own folder)"
                    )
                raise MachineUnfit(
                    f"{self.what} ({self.folder}) on {host} is not the driver's folder: a file that the driver has just "
                    f"written there is not seen. No message was opened. {advice}",
                    host=host,
                    file=self.folder,
                )
            try:
                _write_and_sync(path)
            finally:
                with suppress(OSError):
                    files.remove(path)
        except OSError as error:
            raise faulty_place(error, f"{self.what} ({self.folder})") from error


@dataclass(frozen=True, slots=True)
class HeartbeatProbe:
    """The driver's port for the progress of tasks."""

    place: ReportAddress

    def probe(self) -> None:
        """Connect, show the token, and report an end."""
        DriverConnection(self.place, 0, 0, wait_s=HEARTBEAT_PROBE_S).close(NO_REPORT, failed=False)


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


def _probe_name(folder: str) -> str:
    return f"{'_' if is_url(folder) else ''}{PREFIX}{uuid.uuid4().hex}"


def _write_and_sync(path: str) -> None:
    """Write a small file as tasks write theirs.

    Raises:
        OSError: it cannot.
    """
    file = files_at(path).write_new(path, private=True)
    try:
        file.write(bytes(PROBE_BYTES))
        file.sync()
    finally:
        file.close()


@contextmanager
def marked_places(folders: Iterable[tuple[str, str | Path]]) -> Generator[tuple[FolderProbe, ...]]:
    """Probes of these folders (what each is, and its path or URL), with a marker file of the driver in each meanwhile.

    Where a folder does not exist yet (its first writer makes it), the nearest one above it that does is tried.

    Raises:
        StormproofError: the driver itself cannot write there; names the folder.
    """
    probes: dict[str, FolderProbe] = {}
    try:
        for what, wanted in folders:
            folder = str(wanted) if is_url(str(wanted)) else str(_existing(Path(wanted)))
            if folder in probes:
                continue
            probes[folder] = probe = FolderProbe(what, folder, _probe_name(folder), options_to_send(folder))
            try:
                _write_and_sync(os.path.join(folder, probe.marker))
            except OSError as error:
                raise faulty_place(error, f"{what} ({folder})") from error
        yield tuple(probes.values())
    finally:
        for folder, probe in probes.items():
            with suppress(OSError):
                files_at(folder).remove(os.path.join(folder, probe.marker))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next((p for p in (folder, *folder.parents) if p.is_dir()), folder)
