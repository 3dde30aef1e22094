"""Which folder a path stands for on this machine: two Delta sinks of one topology must not share a folder."""

from __future__ import annotations

import os

from stormproof.core.errors import StoreUnavailable
from stormproof.core.sink import TableKey
from stormproof.core.storage.address import is_url


def key_of_path(path: str) -> TableKey:
    """Equal for paths that are spelled alike."""
    return "delta by path", path


def locate(path: str, where: str) -> TableKey:
    """The folder's device and inode, by whatever path it is reached; where it is not made yet, those of the nearest folder
    above it, and the names from there. In an object store, the URL.

    Raises:
        StoreUnavailable: the file system does not answer.
    """
    if is_url(path):
        return "delta", path.replace("s3a://", "s3://", 1).rstrip("/")
    there, down = os.path.realpath(path), list[str]()
    while True:
        try:
            found = os.stat(there)
            return "delta", found.st_dev, found.st_ino, *reversed(down)
        except FileNotFoundError:
            there, name = os.path.split(there)
            down.append(name)
        except OSError as error:
            raise StoreUnavailable(f"{where}: {error}; nothing was written") from error
