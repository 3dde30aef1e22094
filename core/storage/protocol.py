"""What sinks, staging, states and sources ask of the place that has files, whatever it is; and how it is addressed.

Addresses of object stores are `s3://bucket/key` and their like, with the options with which this process reaches them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import UsageError

SCHEMES: Final = ("s3", "s3a", "abfs", "abfss", "az", "gs")
"""Schemes of the object stores that are served."""

_KEY: Final = re.compile(r"[A-Za-z0-9!_.*'()=+,@ -]+(/[A-Za-z0-9!_.*'()=+,@ -]+)*")
"""Characters that every store and every reader spells alike; others are encoded by some of them."""

_REFUSED: Final = {
    r"endpoint(?:_url)?(?:_s3|_dynamodb)?=.*@": (
        "holds a user or a password; give these by storage_options or variables of their own"
    ),
    r"(?:(?:secret_)?access_key(?:_id)?|(?:account|master|sas)_key|client_secret|(?:(?:fabric_)?session_|bearer_|sas_)?token)"
    r"=.*[\r\n]": "has a line break, which no key or token has; take it out of the value",
}
"""Options and variables by which clients of stores are told an endpoint, a key or a token, with a value that is refused, and
why. A service account's key is JSON, and may have lines.
"""
_UNFIT: Final = {
    re.compile(rf"(?is)(?:(?:aws|azure|azure_storage|google)_)?{option}"): why for option, why in _REFUSED.items()
}


def is_url(address: str) -> bool:
    """Whether an address is a URL, and not a path on this machine."""
    return "://" in address


def absolute(address: str | os.PathLike[str]) -> str:
    """A path as seen from any folder; a URL, of a folder without the slash at its end."""
    text = os.fspath(address)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)


class StorageOptions(Mapping[str, str]):
    """Options of an object store, as delta-rs and obstore name them ("aws_region", "AWS_ENDPOINT_URL").

    Their values may be secrets: they are in no text of this object, and so in no log and no error.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def __getitem__(self, name: str) -> str:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(sorted(self._options))})"

    def get_option(self, *names: str) -> str | None:
        """The value under one of these names, in any case; then that of the environment's variable of such a name."""
        found = {name.lower(): value for name, value in self._options.items()}
        for name in names:
            if name in found:
                return found[name]
        return next((os.environ[name.upper()] for name in names if name.upper() in os.environ), None)


_given: dict[str, StorageOptions] = {}
_lock = threading.Lock()


def use_storage(address: str, options: Mapping[str, str]) -> None:
    """Reach everything at and below a URL with these options, in this process, from now on.

    A process has one set of options for an address: a later call replaces those of an earlier one, as new credentials do.
    """
    with _lock:
        _given[address.rstrip("/")] = StorageOptions(options)


def storage_options(address: str) -> StorageOptions:
    """The options for an address: those given for it or for the nearest address above it; else the setting's.

    Where neither has any, they are empty: the store's client takes what the environment has (variables, a profile, the
    machine's role).

    Raises:
        UsageError: an endpoint holds a user or a password, which no store takes there and every error would show; or a key
            or token has a line break, which ends the store's client in a panic. No value is shown.
    """
    options = _options_for(address)
    if is_url(address):
        for name, value in {**os.environ, **options}.items():
            for unfit, why in _UNFIT.items():
                if unfit.match(f"{name}={value}"):
                    raise UsageError(f"{name} {why}")
    return options


def _options_for(address: str) -> StorageOptions:
    place = address.rstrip("/")
    with _lock:
        while is_url(place) and place.rpartition("/")[2]:
            if place in _given:
                return _given[place]
            place = place.rpartition("/")[0]
    if _default.options is None:
        _default.options = StorageOptions(_default.read())
    return _default.options


def options_to_send(address: str) -> StorageOptions | None:
    """The options that another process needs for an address; None for a path."""
    return storage_options(address) if is_url(address) else None


def checked_options(where: str, options: object) -> dict[str, str]:
    """Options as a caller gives them.

    Raises:
        UsageError: not a mapping of texts to texts. No value is shown.
    """
    if not isinstance(options, Mapping):
        raise UsageError(f"{where}: storage_options is {type(options).__name__}; it must be a dict of texts")
    for name, value in options.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise UsageError(f"{where}: storage_options: {shown(name)} must be a text, and its value, too")
    return dict(options)  # pyright: ignore[reportUnknownArgumentType]


def shown_url(address: str) -> str:
    """A URL without what may be a secret: a password, a query."""
    parts = urlsplit(address)
    host = parts.netloc if parts.password is None else f"...@{parts.netloc.rpartition('@')[2]}"
    return f"{parts.scheme}://{host}{parts.path}"


def refusal_of_url(address: str) -> str | None:
    """Why no table can be at this URL; None where one can."""
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES:
        return f"{parts.scheme}:// is not served; known: a local path, {', '.join(f'{s}://' for s in SCHEMES)}"
    if parts.password or (parts.username and parts.scheme not in ("abfs", "abfss")):
        return "it holds a user or a password; give these by storage_options, or by the environment"
    if parts.query or parts.fragment or "?" in address or "#" in address:
        return "it has a query or a fragment"
    key = parts.path.removeprefix("/")
    if not parts.netloc or not key:
        return "it names no folder in the store; put the table below the bucket or container"
    if _KEY.fullmatch(key) is None:
        return "its path has characters that stores spell in different ways, or an empty name; use letters, digits and _-.="
    return None


def default_storage(read: Callable[[], Mapping[str, str]]) -> None:
    """Have the options of addresses that are given none read by this function, once, when they are first needed."""
    _default.read, _default.options = read, None


@dataclass(slots=True)
class _Default:
    """The settings' options; `core.start.settings`, which knows of them, is above this module."""

    read: Callable[[], Mapping[str, str]] = dict
    options: StorageOptions | None = None


_default: Final = _Default()


# ---- what is asked of a place

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
