"""Which folder a path means on this machine: what two Delta tables of one topology must not share."""

from __future__ import annotations

import os

from stormproof.core.errors import StoreUnavailable
from stormproof.core.sink import TableKey


def key_of_path(path: str) -> TableKey:
    """Equal for paths that are spelled alike."""
    return "delta by path", path


def locate(path: str, where: str) -> TableKey:
    """The folder itself, however it is reached; where it is not made yet, the one above it and the way down from there.

    Raises:
        StoreUnavailable: the file system does not say.
    """
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
