"""The one way to files: which implementation has the files at an address. Those in folders of this machine, each synced
when it is asked for; files that are kept nowhere, or in memory.
"""

from __future__ import annotations

import fcntl
import glob
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Final, Self

import pyarrow as pa

from stormproof.core.storage.protocol import Files, FileState, is_url

PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700


class LocalFiles(Files):
    """Files in folders of this machine."""

    def write_new(self, path: str, *, private: bool) -> NewLocalFile:
        """Open with O_EXCL, in a folder that is there."""
        return NewLocalFile(path, private=private)

    def put_new(self, path: str, data: bytes) -> None:
        """Write it beside, and link(2) it, which cannot overwrite."""
        aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{uuid.uuid4().hex}")
        file = self.write_new(aside, private=False)
        try:
            file.write(data)
            file.sync()
            os.link(aside, path)
        finally:
            file.close()
            self.remove(aside)

    def open(self, path: str) -> BufferedReader:
        """Open for reading."""
        return open(path, "rb")

    def open_native(self, path: str) -> pa.NativeFile:
        """Open for Arrow's readers."""
        return pa.OSFile(path, "rb")

    def open_at(self, path: str) -> OpenLocalFile:
        """Open for reading by pread(2)."""
        return OpenLocalFile(path)

    def bring(self, path: str, to: str) -> None:
        """Link it."""
        os.symlink(os.path.abspath(path), to)

    def stat(self, path: str) -> FileState | None:
        """By device, inode, size and time of the last write."""
        try:
            return _state(os.stat(path))
        except FileNotFoundError:
            return None

    def list(self, folder: str, prefix: str = "") -> list[str]:
        """The names in the folder."""
        return [name for name in os.listdir(folder) if name.startswith(prefix)] if os.path.isdir(folder) else []

    def find(self, pattern: str) -> dict[str, FileState]:
        """By `glob`. A file that symbolic links lead to is found once, by the path with the fewest of them."""
        wanted = os.path.join(pattern, "*") if os.path.isdir(pattern) else pattern
        states = ((path, self.stat(path)) for path in glob.iglob(wanted, recursive=True) if os.path.isfile(path))
        found = {path: state for path, state in states if state is not None}
        paths: dict[FileState, list[str]] = {}
        for path, state in found.items():
            paths.setdefault(state, []).append(path)
        for same in paths.values():
            kept = dict[str, str]()
            for path in sorted(same, key=lambda path: (_links_in(path), path)) if len(same) > 1 else ():
                if kept.setdefault(os.path.realpath(path), path) != path:
                    del found[path]
        return found

    def remove(self, path: str) -> None:
        """Unlink; the folder is not synced."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def rename(self, path: str, to: str) -> None:
        """Rename; the folder is not synced."""
        os.rename(path, to)

    def link(self, path: str, to: str) -> None:
        """Link it; the folder is not synced."""
        os.link(path, to)

    def sync(self, path: str) -> None:
        """Fsync the file."""
        self._sync(path, os.O_RDONLY)

    def sync_folder(self, folder: str) -> None:
        """Fsync the folder."""
        self._sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: str, flags: int) -> None:
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_folder(self, folder: str, *, private: bool = False) -> None:
        """Make it, and sync what was made into its parents."""
        path = Path(folder)
        missing = [p for p in (path, *path.parents) if not p.exists()]
        if private and missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another task was faster, and made it so
                path.mkdir(mode=PRIVATE_FOLDER)
                path.chmod(PRIVATE_FOLDER)
        else:
            path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            self.sync_folder(str(made.parent))

    def settle_folder(self, folder: str, *, private: bool = False) -> None:
        """Make it, and sync every folder above it."""
        self.make_folder(folder, private=private)
        for parent in Path(folder).absolute().parents:
            try:
                self.sync_folder(str(parent))
            except PermissionError:
                return  # another user's, so it was there before

    @contextmanager
    def locked(self, folder: str) -> Generator[None]:
        """Hold an flock on the folder."""
        with OpenLocalFile(folder) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield


def _links_in(path: str) -> int:
    return sum(one.is_symlink() for one in (Path(path), *Path(path).parents))


def _state(found: os.stat_result) -> FileState:
    return FileState(found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))


class OpenLocalFile:
    """An open file or folder on a local disk. It is closed once nobody has it any more, also where an interrupt cut that."""

    _open: list[int] | tuple[()] = ()

    def __init__(self, path: str) -> None:
        self._open = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        self.state = _state(os.fstat(self.fileno()))

    def fileno(self) -> int:
        """Its descriptor; -1 once it is closed."""
        return self._open[0] if self._open else -1

    def read_at(self, begin: int, size: int) -> bytes:
        """By as many reads as it takes."""
        parts: list[bytes] = []
        while size > 0 and (part := os.pread(self.fileno(), size, begin)):
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close it, once."""
        if self._open:
            os.close(self._open.pop())

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class NewLocalFile:
    """A new file on a local disk."""

    def __init__(self, path: str, *, private: bool) -> None:
        # The umask decides who may read a table's own file, as with the files that Spark and delta-rs write there.
        mode = PRIVATE_FILE if private else 0o666
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        if private:
            os.fchmod(self._fd, mode)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of it."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])

    def sync(self) -> None:
        """Fsync it."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


NOWHERE: Final = "nowhere:"
"""The address of a folder that keeps nothing: what is written there is counted by its writer, and is gone."""


class NoFiles(LocalFiles):
    """Files that are written, and kept nowhere: for a dry run. There is never one to read."""

    def write_new(self, path: str, *, private: bool) -> NewLocalFile:
        """A file of the null device."""
        return NewFileNowhere()

    def put_new(self, path: str, data: bytes) -> None:
        """Drop it."""

    def remove(self, path: str) -> None:
        """There is none."""

    def sync_folder(self, folder: str) -> None:
        """There is no folder."""

    def make_folder(self, folder: str, *, private: bool = False) -> None:
        """Make none."""

    def settle_folder(self, folder: str, *, private: bool = False) -> None:
        """Make none."""


class NewFileNowhere(NewLocalFile):
    """A new file whose content is dropped."""

    def __init__(self) -> None:
        self._fd = -1

    def write(self, data: bytes | memoryview) -> None:
        """Drop it."""

    def sync(self) -> None:
        """Nothing to sync."""

    def close(self) -> None:
        """Nothing to close."""


# ---- files that are kept in this process's memory, until who asked for them has read them: for dry runs, and simulations


KEPT: Final = "kept:"
"""The address of a folder in this process's memory. Another process has no such folder."""


class KeptFiles(NoFiles):
    """Files in memory, by their paths. They are written once, and read from their beginning."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def write_new(self, path: str, *, private: bool) -> NewLocalFile:
        """A file that can be read once it is closed."""
        return _NewKeptFile(self._files, path)

    def open(self, path: str) -> BufferedReader:
        """Open for reading."""
        if path not in self._files:
            raise FileNotFoundError(path)
        return BufferedReader(BytesIO(self._files[path]))

    def open_native(self, path: str) -> pa.NativeFile:
        """Open for Arrow's readers."""
        if path not in self._files:
            raise FileNotFoundError(path)
        return pa.BufferReader(self._files[path])

    def remove(self, path: str) -> None:
        """Forget it."""
        self._files.pop(path, None)

    def stat(self, path: str) -> FileState | None:
        """By its content."""
        data = self._files.get(path)
        return None if data is None else FileState(len(data), 0, (id(data),))

    def list(self, folder: str, prefix: str = "") -> list[str]:
        """The names in the folder."""
        paths = (os.path.split(path) for path in self._files)
        return [name for where, name in paths if where == folder and name.startswith(prefix)]

    def forget(self, folder: str) -> None:
        """Forget every file of a folder."""
        for path in [path for path in self._files if path.startswith(f"{folder}/")]:
            self.remove(path)


class _NewKeptFile(NewFileNowhere):
    """A new file in memory."""

    def __init__(self, files: dict[str, bytes], path: str) -> None:
        super().__init__()
        self._files, self._path = files, path
        self._content = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of it."""
        self._content += data

    def close(self) -> None:
        """Have it under its name."""
        self._files[self._path] = bytes(self._content)


IN_MEMORY: Final = KeptFiles()


@contextmanager
def kept_folder() -> Generator[str]:
    """The address of a new folder in memory, whose files are forgotten when the context ends."""
    folder = f"{KEPT}{uuid.uuid4().hex}"
    try:
        yield folder
    finally:
        IN_MEMORY.forget(folder)


# ---- the files at an address


_LOCAL: Final = LocalFiles()
_NONE: Final = NoFiles()


def files_at(address: str) -> Files:
    """What reads and writes files at an address of a file or folder: a local path, a URL, or below `NOWHERE` or `KEPT`."""
    if is_url(address):
        from stormproof.core.storage.object_files import ObjectFiles, root_of  # an extra: only who has a URL needs it

        return ObjectFiles(root_of(address))
    if address.startswith(KEPT):
        return IN_MEMORY
    return _NONE if address.startswith(NOWHERE) else _LOCAL
