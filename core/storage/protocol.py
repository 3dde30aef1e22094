"""What sinks, staging, states and sources ask of the place that has files, whatever it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from typing import Protocol, Self, TypeAlias

import pyarrow as pa

Names: TypeAlias = list[str]


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file is now. Two states are equal where the file is the same one, unchanged."""

    size: int
    modified_ns: int
    identity: tuple[int | str, ...]


class NewFile(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of it."""
        ...

    def sync(self) -> None:
        """Make what was written outlive a power loss; the file's name needs `sync_folder`."""
        ...

    def close(self) -> None:
        """End writing."""
        ...


class OpenFile(Protocol):
    """A file that is read at any place. To be closed, as a context manager does."""

    @property
    def state(self) -> FileState:
        """What the file was when it was opened."""
        ...

    def read_at(self, begin: int, size: int) -> bytes:
        """`size` bytes from `begin` on, or fewer where the file ends."""
        ...

    def close(self) -> None:
        """End reading."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Files(Protocol):
    """Files by their paths, and their durability.

    Every method raises `OSError` where the place refuses or does not answer. `FileNotFoundError` comes only from the methods
    that name it.
    """

    @property
    def is_local(self) -> bool:
        """Whether a disk of this machine's kind has them: a file may have two names, and may be torn by a power loss."""
        return True

    def write_new(self, path: str, *, private: bool) -> NewFile:
        """Begin a file that must not exist yet; a `private` one is for this user alone.

        Raises:
            FileExistsError: it is there.
        """
        ...

    def put_new(self, path: str, data: bytes) -> None:
        """Put a whole file at once, synced, under a name that is free: no reader sees a part of it.

        Raises:
            FileExistsError: the name is taken; nothing was changed.
        """
        ...

    def open(self, path: str) -> BufferedReader:
        """Open for reading, from its beginning.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def open_native(self, path: str) -> pa.NativeFile:
        """Open for Arrow's readers, from its beginning.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def open_at(self, path: str) -> OpenFile:
        """Open for reading at any place.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def bring(self, path: str, to: str) -> None:
        """Have the file under a local path that is free: by a link, or a copy.

        Raises:
            FileNotFoundError: it is not there, where it is copied.
        """
        ...

    def stat(self, path: str) -> FileState | None:
        """What the file is now; None where it is not there."""
        ...

    def list(self, folder: str, prefix: str = "") -> list[str]:
        """The names in a folder that begin with `prefix`, in no particular order; none where there is no such folder."""
        ...

    def find(self, pattern: str) -> dict[str, FileState]:
        """The files that a pattern matches, by their paths, as they are now; in no particular order.

        A folder stands for all that lies directly in it. `*` matches within a name, `**` any folders; on a disk `?` and
        `[...]` match, too.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file; one that is gone is fine."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Give a file another name in its folder."""
        ...

    def link(self, path: str, to: str) -> None:
        """Give a file a second name in its folder: it is gone once both are removed.

        Raises:
            FileExistsError: the name is taken.
        """
        ...

    def sync(self, path: str) -> None:
        """Make a file's content outlive a power loss, whoever wrote it.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder outlive a power loss."""
        ...

    def make_folder(self, folder: str, *, private: bool = False) -> None:
        """Make a folder and its missing parents, and sync each into its own parent. A `private` folder that is made here is
        for this user alone, whatever the umask.
        """
        ...

    def settle_folder(self, folder: str, *, private: bool = False) -> None:
        """Make a folder as `make_folder` does, and sync every folder on the way to it, as far as they may be opened.

        Who made a folder that is there may have been killed before syncing it: everything below would be lost with its name.
        """
        ...

    def locked(self, folder: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock on the folder until the context ends; others who ask for it wait."""
        ...
