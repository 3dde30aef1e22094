"""Files that are kept in this process's memory, until who asked for them has read them: for dry runs, and simulations."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from typing import Final

import pyarrow as pa

from stormproof.core.storage.local_files import NewFileNowhere, NewLocalFile, NoFiles
from stormproof.core.storage.protocol import FileState

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
