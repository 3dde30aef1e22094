"""The preflight's question about a folder in an object store: can each machine read what the driver put there, and write?"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stormproof.core.base.errors import MachineUnfit
from stormproof.core.start.preflight import PREFIX, Probe, faulty_place, marked
from stormproof.core.storage.address import StorageOptions, is_url, storage_options, use_storage
from stormproof.core.storage.files import files_at


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
