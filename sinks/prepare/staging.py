"""Prepared files: their names, the check that they are as they were prepared, their rows, and their removal."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, TaskContext
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState
from stormproof.sinks.contract.protocol import RefusedRow, SinkProblem

log = logging.getLogger("stormproof.sink")

IsDead: TypeAlias = Callable[[int, int, str], bool]
"""Whether nothing can need a prepared file any more, by its txid, attempt and name."""

Answer = TypeVar("Answer")

ASKED_AT_ONCE: Final = 16
"""Files that an object store is asked for at the same time."""
DIGESTED_ALONE_BYTES: Final = 1024 * 1024
"""Up to so many bytes of local files are digested one after the other: two threads take longer to begin than that."""

_PREFIX: Final = "stormproof-"
_NAME: Final = re.compile(
    rf"{_PREFIX}(?P<incarnation>[A-Za-z0-9_.-]+)-(?P<txid>\d+)-(?P<attempt>\d+)-(?P<task>\d+)-[0-9a-f]{{8}}\.parquet"
)


@dataclass(frozen=True, slots=True)
class PreparedName:
    """The task that wrote a prepared file, by the file's name."""

    incarnation: str
    txid: int
    attempt: int
    task: int


def prepared_name(context: TaskContext) -> str:
    """A new name for a file of this task.

    The end of the name is random, since two attempts at one task may run at the same time with the same context. It is
    taken from the operating system: no content and no share depends on it.
    """
    ids = f"{context.incarnation}-{context.txid}-{context.attempt}-{context.task}"
    name = f"{_PREFIX}{ids}-{uuid.uuid4().hex[:8]}.parquet"
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"incarnation {context.incarnation!r} cannot be part of a file's name")
    return name


def parse_prepared_name(name: str) -> PreparedName | None:
    """Read a file's name; None where it is no name of a prepared file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return PreparedName(match["incarnation"], int(match["txid"]), int(match["attempt"]), int(match["task"]))


def require_files(
    directory: str,
    files: Sequence[PreparedFile],
    *,
    where: str,
    digests: bool = False,
    states: Sequence[FileState | None] | None = None,
) -> None:
    """Check that every prepared file is there with its size, and with its digest where `digests` asks for that.

    `states` are what `states_of` has just answered, if it was asked.

    Raises:
        SinkRefused: some files are missing or changed; names them.
    """

    def fault(file: PreparedFile, state: FileState | None) -> str | None:
        path = os.path.join(directory, file.path)
        if state is None:
            return f"{path} is missing"
        if state.size != file.bytes:
            return f"{path} has {state.size} bytes instead of {file.bytes}"
        if not digests:
            return None
        try:
            found = file_digest(path)
        except FileNotFoundError:
            return f"{path} is missing"
        return None if found == file.digest else f"{path} has digest {found} instead of {file.digest}"

    known = states_of(directory, files) if states is None else states
    far = not files_at(directory).is_local
    at_once = _at_once if digests and (far or sum(file.bytes for file in files) > DIGESTED_ALONE_BYTES) else map
    wrong = [text for text in at_once(fault, files, known) if text is not None]
    if wrong:
        raise SinkRefused(
            f"{where}: {len(wrong)} of {len(files)} prepared files are not as prepared: {'; '.join(wrong[:5])}; "
            "nothing was written; put the files back, then retry the txid",
            problem=SinkProblem.FILE_LOST,
            files=list(wrong),
        )


def unreached(directory: str, files: Sequence[PreparedFile]) -> list[str]:
    """The paths of those files that are not there with their size."""
    states = zip(files, states_of(directory, files), strict=True)
    return [os.path.join(directory, file.path) for file, now in states if now is None or now.size != file.bytes]


def states_of(directory: str, files: Sequence[PreparedFile]) -> list[FileState | None]:
    """Each file as it is now; None where it is gone. An object store is asked for several at once."""
    store, paths = files_at(directory), [os.path.join(directory, file.path) for file in files]
    return [store.stat(path) for path in paths] if store.is_local else _at_once(store.stat, paths)


def _at_once(ask: Callable[..., Answer], *given: Sequence[Any]) -> list[Answer]:
    """The answers in order; what each waits for, the others need not."""
    if len(given[0]) < 2:
        return [*map(ask, *given)]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        return list(threads.map(ask, *given))


def file_digest(path: str) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with files_at(path).open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepared_batches(
    directory: str, files: Sequence[PreparedFile], columns: Sequence[str] | None = None, batch_rows: int = 64 * 1024
) -> Iterator[pa.RecordBatch]:
    """The rows of prepared files, file by file in path order, in bounded memory; without `columns`, all of the rows' own.

    Rows that a file holds beside its own, since a later row of their key superseded them, are passed over.

    Raises:
        SinkRefused: a file is gone. Where it was there when the commit began, the usual cause is a driver that took over
            while this one was paused.
    """
    for file in sorted(files, key=lambda f: f.path):
        with open_prepared(directory, file) as prepared:
            yield from prepared.batches(columns, batch_rows)


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """An open prepared file. Its first `superseded` rows are kept in case that its table refuses the others."""

    parquet: pq.ParquetFile
    superseded: int

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = 64 * 1024, *, superseded: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Its own rows, or those `superseded`; without `columns`, all but those of messages."""
        found = [name for name in self.parquet.schema_arrow.names if name not in MESSAGE_COLUMNS.names]
        groups, begin = list[int](), 0
        for number in range(self.parquet.num_row_groups):
            if (begin < self.superseded) is superseded:
                groups.append(number)
            begin += self.parquet.metadata.row_group(number).num_rows
        if groups:
            names = found if columns is None else list(columns)
            yield from self.parquet.iter_batches(batch_size=batch_rows, row_groups=groups, columns=names)


@contextmanager
def open_prepared(directory: str, file: PreparedFile) -> Generator[PreparedRows]:
    """Open a prepared file.

    Raises:
        SinkRefused: it is gone.
    """
    path = os.path.join(directory, file.path)
    try:
        opened = files_at(directory).open_native(path)
    except FileNotFoundError as error:
        raise SinkRefused(
            f"the prepared file {path} is missing; nothing was written; put it back, then retry the txid",
            problem=SinkProblem.FILE_LOST,
            files=[path],
        ) from error
    with opened, pq.ParquetFile(opened) as parquet:
        yield PreparedRows(parquet, max(0, parquet.metadata.num_rows - file.rows))


def remove_staged(directory: str, incarnation: str, txid: int) -> None:
    """Remove all staged files of a txid, also those of attempts that ended and of tasks that ran again."""
    for name, prepared in _of_incarnation(directory, incarnation):
        if prepared.txid == txid:
            files_at(directory).remove(os.path.join(directory, name))


def sweep_folder(
    directory: str,
    incarnation: str,
    is_dead: IsDead,
    keep: Callable[[], frozenset[str]] = frozenset,
) -> int:
    """Remove this incarnation's prepared files that are dead; returns how many.

    `keep` names files that stay whatever `is_dead` says; it is called only where there is something to remove.
    """
    prepared = _of_incarnation(directory, incarnation)
    dead = {name for name, file in prepared if is_dead(file.txid, file.attempt, name)}
    if not dead:
        return 0
    dead -= keep()
    for name in sorted(dead):
        failpoint("sweep.before_unlink")
        files_at(directory).remove(os.path.join(directory, name))
    files_at(directory).sync_folder(directory)
    return len(dead)


def guard_of(path: str) -> str:
    """The second name of a prepared file that lies in a table's folder.

    VACUUM removes what the table does not list, and a prepared file is not listed before its commit. It passes over names
    that begin with an underscore, so the file can be put back from there. Readers of the folder pass over them, too. In an
    object store an object has one name: there a VACUUM must leave young files alone, as it does by default.
    """
    return os.path.join(os.path.dirname(path), f"_{os.path.basename(path)}")


def put_back(directory: str, files: Sequence[PreparedFile]) -> None:
    """Give those of these files that were removed their names back, where their second ones are there."""
    _put_back(directory, [file.path for file in files])


def put_back_all(directory: str, incarnation: str) -> None:
    """The same for every second name of this life."""
    _put_back(directory, _guarded(directory, incarnation))


def remove_guards(directory: str, files: Sequence[PreparedFile]) -> None:
    """Remove the second names of files that are the table's, or that nothing needs any more."""
    for file in files if files_at(directory).is_local else ():
        files_at(directory).remove(guard_of(os.path.join(directory, file.path)))


def sweep_guards(directory: str, incarnation: str, is_dead: IsDead) -> None:
    """Remove the second names of dead files."""
    for name in _guarded(directory, incarnation):
        prepared = parse_prepared_name(name)
        if prepared is not None and is_dead(prepared.txid, prepared.attempt, name):
            files_at(directory).remove(guard_of(os.path.join(directory, name)))


def _guarded(directory: str, incarnation: str) -> list[str]:
    if not files_at(directory).is_local:
        return []
    names = [name[1:] for name in files_at(directory).list(directory, f"_{_PREFIX}")]
    found = ((name, parse_prepared_name(name)) for name in names)
    return [name for name, prepared in found if prepared is not None and prepared.incarnation == incarnation]


def _put_back(directory: str, names: Sequence[str]) -> None:
    store, back = files_at(directory), list[str]()
    if not store.is_local:
        return
    for name in names:
        path = os.path.join(directory, name)
        if store.stat(path) is None and store.stat(guard_of(path)) is not None:
            with suppress(FileExistsError):
                store.link(guard_of(path), path)
            back.append(path)
    if back:
        store.sync_folder(directory)
        log.warning(
            "%d prepared files, such as %s, were removed before their commit, as a VACUUM with a short retention does; they "
            "were put back",
            *(len(back), back[0]),
        )


def _of_incarnation(directory: str, incarnation: str) -> Iterator[tuple[str, PreparedName]]:
    for name in files_at(directory).list(directory, f"{_PREFIX}{incarnation}-"):
        prepared = parse_prepared_name(name)
        if prepared is not None and prepared.incarnation == incarnation:
            yield name, prepared


@dataclass(frozen=True, slots=True)
class Misfits:
    """The misfits of some prepared files. Of those that are `unnamed` the messages are not known one by one."""

    rows: tuple[RefusedRow, ...] = ()
    unnamed: tuple[RefusedRow, ...] = ()
    more: bool = False
    """There are more messages than are named."""

    @staticmethod
    def of(files: Iterable[PreparedFile]) -> Misfits:
        """Those of these files."""
        found: dict[bool, list[RefusedRow]] = {False: [], True: []}
        more = False
        for file in files:
            told: dict[str, Any] = json.loads(file.misfits) if file.misfits else {}
            more |= bool(told.get("more"))
            for text, error, messages, unnamed in told.get("rows", ()):
                pairs = tuple((int(number), int(origin)) for number, origin in messages)
                found[bool(unnamed)].append(RefusedRow(file.path, -1, text, None, error, pairs))
        return Misfits(tuple(found[False]), tuple(found[True]), more)

    @property
    def all(self) -> tuple[RefusedRow, ...]:
        """Both."""
        return self.rows + self.unnamed

    def __bool__(self) -> bool:
        return bool(self.rows or self.unnamed or self.more)
