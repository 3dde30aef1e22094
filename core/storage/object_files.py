"""Files in an object store: each appears whole under its name or not at all, and outlives the machine that wrote it.

By obstore, which has the same store clients as delta-rs. An object has no folder, no second name and no lock; what a local
disk needs syncing for, the store's answer to a PUT promises.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Self
from urllib.parse import urlsplit

import pyarrow as pa

from stormproof.core.base.errors import UsageError
from stormproof.core.base.extras import required
from stormproof.core.storage.protocol import Files, FileState, Names, StorageOptions, storage_options

EXTRA: Final = "object-store"
PART_BYTES: Final = 8 * 1024 * 1024
"""An object up to this size is one PUT; a larger one is an upload in parts of it, and a task holds a few of them."""

RETRIES: Final = {"max_retries": 5}
"""Of one request: the driver's own waiting for a store that is away begins after them."""

_CLIENT: Final = frozenset(
    {
        *(
            "allow_http",
            "allow_invalid_certificates",
            "connect_timeout",
            "http1_only",
            "http2_only",
            "pool_idle_timeout",
        ),
        *("pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "timeout", "user_agent"),
    }
)
_FLAGS: Final = frozenset({"allow_http", "allow_invalid_certificates", "http1_only", "http2_only"})
_CLOUDS: Final = ("aws_", "azure_", "google_")
_DELTA_RS_ALONE: Final = frozenset({"max_retries", "retry_timeout"})

_stores: dict[tuple[int, str, tuple[tuple[str, str], ...]], Any] = {}
"""By process, since a client's threads are not in a fork; by bucket and options."""


class ObjectFiles(Files):
    """Files in one bucket or container, by their URLs."""

    def __init__(self, root: str) -> None:
        self._root = root

    @property
    def is_local(self) -> bool:
        """No."""
        return False

    def write_new(self, path: str, *, private: bool) -> NewObject:
        """An upload. The name must be one that nobody else can choose: whoever ends an upload last has the name.

        The store's own rules say who may read it.
        """
        return NewObject(self, path)

    def put_new(self, path: str, data: bytes) -> None:
        """A PUT on the condition that the name is free."""
        obstore = _obstore()
        with _errors(path):
            try:
                obstore.put(self.store(path), key_of(path), data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                # The client repeats a PUT whose answer was lost, and the store refuses the repetition.
                if bytes(obstore.get(self.store(path), key_of(path)).bytes()) != data:
                    raise

    def open(self, path: str) -> io.BufferedReader:
        """Open for reading by ranges."""
        return io.BufferedReader(_Ranges(self._reader(path), path), PART_BYTES)

    def open_native(self, path: str) -> pa.NativeFile:
        """Open for Arrow's readers."""
        return pa.PythonFile(_Ranges(self._reader(path), path), mode="r")

    def open_at(self, path: str) -> OpenObject:
        """Open for reading by ranges, a GET each."""
        return OpenObject(self, path)

    def bring(self, path: str, to: str) -> None:
        """Copy it."""
        with self.open(path) as source, open(to, "xb") as copy:
            shutil.copyfileobj(source, copy, PART_BYTES)

    def stat(self, path: str) -> FileState | None:
        """By size, the store's tag and its time of the last PUT."""
        try:
            return self.state_of(path)
        except FileNotFoundError:
            return None

    def state_of(self, path: str) -> FileState:
        """The same of an object that must be there.

        Raises:
            FileNotFoundError: it is not there.
        """
        with _errors(path):
            found = _obstore().head(self.store(path), key_of(path))
        return _state(found)

    def list(self, folder: str, prefix: str = "") -> list[str]:
        """The names of the objects directly below, and of the folders there."""
        key = key_of(folder).rstrip("/")
        with _errors(folder):
            if prefix:
                return self._named(folder, key, prefix)
            found = _obstore().list_with_delimiter(self.store(folder), prefix=key)
        names = [meta["path"] for meta in found["objects"]] + list(found["common_prefixes"])
        return [name.rpartition("/")[2] for name in names]

    def _named(self, folder: str, key: str, prefix: str) -> Names:
        """Names that begin so: the store lists in the order of names, so what comes before is never read."""
        begin = f"{key}/{prefix}"
        names: Names = []
        for chunk in _obstore().list(self.store(folder), prefix=key, offset=begin):
            for meta in chunk:
                if not meta["path"].startswith(begin):
                    if meta["path"] > begin:
                        return names
                    continue
                name = meta["path"][len(key) + 1 :]
                if "/" not in name:
                    names.append(name)
        return names

    def find(self, pattern: str) -> dict[str, FileState]:
        """By a list of all objects below the pattern's first `*`. What a star stands for begins with no dot."""
        if "*" not in pattern:
            if (state := self.stat(pattern)) is not None:
                return {pattern: state}
            pattern = f"{pattern.rstrip('/')}/*"
        folder = pattern.partition("*")[0].rpartition("/")[0]
        matches = re.compile(_expression(key_of(pattern))).fullmatch
        found: dict[str, FileState] = {}
        with _errors(folder):
            for chunk in _obstore().list(self.store(folder), prefix=key_of(folder)):
                found |= {f"{self._root}/{meta['path']}": _state(meta) for meta in chunk if matches(meta["path"])}
        return found

    def remove(self, path: str) -> None:
        """Delete it."""
        try:
            with _errors(path):
                _obstore().delete(self.store(path), key_of(path))
        except FileNotFoundError:
            return

    def rename(self, path: str, to: str) -> None:
        """Not to be had."""
        raise OSError(errno.ENOTSUP, f"an object store cannot rename; wanted {to}", path)

    def link(self, path: str, to: str) -> None:
        """Not to be had."""
        raise OSError(errno.ENOTSUP, f"an object store has one name for an object; wanted {to}", path)

    def sync(self, path: str) -> None:
        """Nothing to do: who wrote it had the store's answer."""

    def sync_folder(self, folder: str) -> None:
        """Nothing to do."""

    def make_folder(self, folder: str, *, private: bool = False) -> None:
        """There are no folders."""

    def settle_folder(self, folder: str, *, private: bool = False) -> None:
        """There are no folders."""

    def locked(self, folder: str) -> AbstractContextManager[None]:
        """There is no lock, and nothing here that needs one: no file is ever there in part."""
        return nullcontext()

    def store(self, path: str) -> Any:
        """Obstore's client for the path's bucket, made once a process and set of options.

        Raises:
            UsageError: an option that the store's client does not know; none of their values is shown.
        """
        options = storage_options(path)
        chosen = os.getpid(), self._root, tuple(sorted(options.items()))
        if chosen not in _stores:
            _stores[chosen] = _client(self._root, options)
        return _stores[chosen]

    def _reader(self, path: str) -> Any:
        with _errors(path):
            return _obstore().open_reader(self.store(path), key_of(path), buffer_size=PART_BYTES)


def _state(meta: Mapping[str, Any]) -> FileState:
    """In whole seconds: some stores tell more of them in a list than of one object."""
    modified_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
    return FileState(meta["size"], modified_ns, (str(meta.get("e_tag")), str(meta.get("version"))))


class NewObject:
    """An object that is being uploaded: `sync` gives it its name, and `close` without it drops what was sent."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self.path = path
        with _errors(path):
            self._writer: Any = _obstore().open_writer(files.store(path), key_of(path), buffer_size=PART_BYTES)
        self._ended = False

    def write(self, data: bytes | memoryview) -> None:
        """Append all of it."""
        with _errors(self.path):
            self._writer.write(bytes(data))

    def sync(self) -> None:
        """End the upload: from here on the object is there, whole."""
        if not self._ended:
            with _errors(self.path):
                self._writer.close()
            self._ended = True

    def close(self) -> None:
        """Let go. An upload that was not ended leaves no object; parts that were sent are the store's to expire."""
        self._writer = None


class OpenObject:
    """An object that is read at any place. Whether it was replaced meanwhile is for its reader to find by the content."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self._files = files
        self._path = path
        self.state = files.state_of(path)

    def read_at(self, begin: int, size: int) -> bytes:
        """By one GET."""
        end = min(begin + size, self.state.size)
        if begin >= end:
            return b""
        with _errors(self._path):
            store = self._files.store(self._path)
            return bytes(_obstore().get_range(store, key_of(self._path), start=begin, end=end))

    def close(self) -> None:
        """Nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Ranges(io.RawIOBase):
    """An object as a file that is read by ranges."""

    def __init__(self, reader: Any, path: str) -> None:
        self._reader = reader
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        with _errors(self._path):
            data = self._reader.read(len(view))
        view[: len(data)] = memoryview(data)
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        with _errors(self._path):
            return bytes(self._reader.readall() if size is None or size < 0 else self._reader.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with _errors(self._path):
            return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    @property
    def size(self) -> int:
        """Its bytes."""
        return int(self._reader.size)


def root_of(url: str) -> str:
    """Scheme and bucket of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def key_of(url: str) -> str:
    """An object's key in its bucket."""
    return urlsplit(url).path.lstrip("/")


def _expression(pattern: str) -> str:
    """A pattern as a regular expression."""
    names = ["(?:[^/.][^/]*/)*" if name == "**" else _name(name) + "/" for name in pattern.split("/")]
    return "".join(names).removesuffix("/") if not pattern.endswith("**") else "".join(names) + "[^/.][^/]*"


def _name(pattern: str) -> str:
    text = "[^/]*".join(map(re.escape, pattern.split("*")))
    return f"(?![.]){text}" if pattern.startswith("*") else text


def _obstore() -> Any:
    obstore = required("obstore", EXTRA, "an address in an object store")
    required("obstore.store", EXTRA, "an address in an object store")
    return obstore


def _client(root: str, options: StorageOptions) -> Any:
    obstore = _obstore()
    config, client = dict[str, str](), dict[str, Any]()
    for name, value in options.items():
        lower = name.lower()
        bare = next((lower.removeprefix(cloud) for cloud in _CLOUDS if lower.startswith(cloud)), lower)
        if bare in _CLIENT:
            client[bare] = value.lower() in ("true", "1", "yes", "on") if bare in _FLAGS else value
        elif bare not in _DELTA_RS_ALONE:
            config[lower] = value
    if root.startswith("s3") and options.get_option("aws_checksum_algorithm") is None:
        config["aws_checksum_algorithm"] = "sha256"  # the store compares each part with what was sent
    try:
        return obstore.store.from_url(root, config=config, client_options=client, retry_config=RETRIES)
    except (obstore.exceptions.BaseError, TypeError, ValueError) as error:
        kind = type(error).__name__
        names = ", ".join(sorted(options)) or "none"
        raise UsageError(
            f"{root}: the store's client does not take these storage options: {names} ({kind})"
        ) from None  # its text may quote a value


@contextmanager
def _errors(path: str) -> Generator[None]:
    """Around a call of obstore: its errors as the operating system's, which name the path."""
    exceptions = _obstore().exceptions
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except exceptions.AlreadyExistsError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(
            errno.EACCES, f"the store refuses these credentials: {_first_line(error)}", path
        ) from error
    except exceptions.BaseError as error:
        raise OSError(errno.EIO, f"the store does not answer: {_first_line(error)}", path) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]
