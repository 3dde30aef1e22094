"""Prepared files: their names, the check that they are as they were prepared, their rows, their statistics, their removal.

Delta's statistics of a file are gathered while it is written: with them a reader skips the files that hold nothing it looks
for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, TaskContext
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState
from stormproof.sinks.contract.protocol import PreparedTransaction, RefusedRow, SinkProblem, SinkSession
from stormproof.sinks.rows.limits import is_string, plain

COLUMNS_MAX: Final = 32
"""Delta's own default for the number of leading columns with statistics; a field of a struct counts as a column."""

TEXT_MAX: Final = 32
"""Longer strings are cut in statistics, as Delta does."""

_HIGHEST_CHARACTER: Final = "\U0010ffff"
_MILLISECOND: Final = timedelta(milliseconds=1)
_CUT: Final = _MILLISECOND - timedelta.resolution
_LAST: Final = datetime.max - _CUT  # noqa: DTZ901 - it is compared with timestamps without a zone

Edge: TypeAlias = str | int | float | Decimal | date | datetime


class FileStatistics:
    """Delta's statistics of one file, gathered batch by batch.

    Minimum and maximum are kept for columns of integers, decimals, floats, strings, dates, timestamps and booleans, and for
    such fields of structs; null counts for these and for bytes.

    Guarantee:
        No value of the file is below its minimum or above its maximum. Strings are cut to 32 characters and timestamps to
        milliseconds, downwards for the minimum and upwards for the maximum.

    A file with a NaN has null counts alone: NaN is above every number to Spark, and no number to Arrow. So has one with a
    value that Python cannot represent. One missing bound beside others would not do: a dataset of delta-rs (`to_pandas` with
    filters) takes it for "no value matches", and would lose rows.
    """

    def __init__(self, schema: pa.Schema, columns_max: int | None = COLUMNS_MAX) -> None:
        self.rows = 0
        leaves = (leaf for i, f in enumerate(schema) for leaf in _leaves(f, i))
        self._leaves = [*islice(leaves, columns_max)]

    def add(self, rows: pa.RecordBatch) -> None:
        """Take one batch into account."""
        self.rows += rows.num_rows
        for leaf in self._leaves:
            leaf.add(rows)

    def to_json(self) -> str:
        """The `stats` of an add action."""
        nulls = _tree((leaf.names, str(leaf.nulls)) for leaf in self._leaves)
        if any(leaf.boundless for leaf in self._leaves):
            return f'{{"numRecords":{self.rows},"nullCount":{nulls}}}'
        found = [leaf for leaf in self._leaves if leaf.low is not None]
        low = _tree((leaf.names, _shown(_lower(leaf.low))) for leaf in found)
        high = _tree((leaf.names, _shown(_upper(leaf.high))) for leaf in found)
        return f'{{"numRecords":{self.rows},"minValues":{low},"maxValues":{high},"nullCount":{nulls}}}'

    def excluded_by(self, statistics: str) -> list[str]:
        """The columns, and fields of structs, of which a file's statistics exclude a value or a NULL that was found.

        A timestamp's bounds are of the millisecond, as Delta has it: its greatest value is less than one above.
        """
        told: dict[str, Any] = json.loads(statistics or "{}", parse_float=Decimal)
        low, high, nulls = (told.get(name) or {} for name in ("minValues", "maxValues", "nullCount"))
        return [
            leaf.shown for leaf in self._leaves if leaf.is_outside(low, high) or leaf.counts_wrong(nulls, self.rows)
        ]


@dataclass(slots=True)
class _Leaf:
    """A column, or a field of a struct at any depth: where it is, and what was found of it."""

    names: tuple[str, ...]
    indices: tuple[int, ...]
    ranged: bool
    kind: pa.DataType
    nulls: int = 0
    low: Any = None
    high: Any = None
    boundless: bool = False
    has_nan: bool = False

    @property
    def shown(self) -> str:
        """Its name, for people."""
        return ".".join(self.names)

    def is_outside(self, lows: Any, highs: Any) -> bool:
        """Whether a value that was found is outside of these bounds, or they are none of its type."""
        low, high = self._told(lows), self._told(highs)
        try:
            bottom, top = (None if bound is None else _value(bound, self.kind) for bound in (low, high))
            if isinstance(top, float) and math.isnan(top):
                top = None  # NaN is above every number
            if isinstance(top, datetime):
                top = min(top, _LAST) + _CUT
        except (ValueError, TypeError, ArithmeticError):
            return not self.boundless
        if self.has_nan and top is not None:
            return True
        if self.low is None:
            return False
        least, most = _value(self.low, self.kind), _value(self.high, self.kind)
        return (bottom is not None and not bottom <= least) or (top is not None and not most <= top)

    def counts_wrong(self, counts: Any, rows: int) -> bool:
        """Whether such a number of NULLs says that there is none where there is one, or no value where there is one."""
        told = self._told(counts)
        return told is not None and ((told == 0 and self.nulls > 0) or (told >= rows > self.nulls))

    def _told(self, of: Any) -> Any:
        for name in self.names:
            of = None if of is None else of.get(name)
        return of

    def add(self, rows: pa.RecordBatch) -> None:
        column = rows.column(self.indices[0])
        if len(self.indices) > 1:
            column = pc.struct_field(column, self.indices[1:])
        nulls = column.null_count
        self.nulls += nulls
        if not self.ranged or nulls == len(column):
            return
        column = plain(column)
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            self.boundless = self.has_nan = True
            column = column.filter(pc.invert(pc.is_nan(column)))
            if column.null_count == len(column):
                return
        try:
            found: dict[str, Any] = pc.min_max(column).as_py()
        except (ValueError, OverflowError):  # such as a date that Python cannot represent
            self.boundless = True
            return
        self.low = found["min"] if self.low is None else min(self.low, found["min"])
        self.high = found["max"] if self.high is None else max(self.high, found["max"])


def _leaves(of: pa.Field, index: int) -> Iterator[_Leaf]:
    """The columns of a field that have statistics: itself, or those inside of it where it is a struct."""
    if pa.types.is_struct(of.type):
        for i in range(of.type.num_fields):
            for leaf in _leaves(of.type.field(i), i):
                yield _Leaf((of.name, *leaf.names), (index, *leaf.indices), leaf.ranged, leaf.kind)
    elif not pa.types.is_nested(of.type):
        yield _Leaf((of.name,), (index,), _ranged(of.type), of.type)


def _ranged(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_boolean(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz in (None, "UTC"))
        or is_string(kind)
    )


def _value(bound: Any, kind: pa.DataType) -> Any:
    """A bound or a value of a column, as what compares with others of its type."""
    if pa.types.is_floating(kind):
        return float(np.float32(bound) if pa.types.is_float32(kind) else bound)
    if pa.types.is_timestamp(kind):
        at = datetime.fromisoformat(bound) if isinstance(bound, str) else bound
        return at if at.tzinfo is None else at.astimezone(UTC).replace(tzinfo=None)
    if pa.types.is_date(kind):
        return date.fromisoformat(bound) if isinstance(bound, str) else bound
    if pa.types.is_decimal(kind) or pa.types.is_integer(kind):
        return Decimal(bound)
    return bound


def _tree(values: Iterable[tuple[tuple[str, ...], str]]) -> str:
    """Values, which are JSON already, as nested objects by their names."""
    tree: dict[str, Any] = {}
    for names, value in values:
        at = tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    return _object(tree)


def _object(tree: dict[str, Any]) -> str:
    parts = (f"{_quoted(k)}:{_object(v) if isinstance(v, dict) else v}" for k, v in tree.items())
    return f"{{{','.join(parts)}}}"


def _shown(bound: Edge) -> str:
    """A bound as JSON, as Spark writes it. Decimals have all of their digits, and no exponent."""
    match bound:
        case str():
            return _quoted(bound)
        case Decimal():
            return f"{bound:f}"
        case datetime():
            timespec = "microseconds" if bound.microsecond % 1_000 else "milliseconds"
            zone = "" if bound.tzinfo is None else "Z"
            return f'"{bound.replace(tzinfo=None).isoformat(timespec=timespec)}{zone}"'
        case date():
            return f'"{bound.isoformat()}"'
        case float() if not math.isfinite(bound):
            return '"Infinity"' if bound > 0 else '"-Infinity"'
        case _:
            return json.dumps(bound)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lower(value: Edge) -> Edge:
    match value:
        case str():
            return value[:TEXT_MAX]  # a prefix is never above the whole
        case datetime():
            return _milliseconds(value)
        case float():
            return value or -0.0  # -0.0 and 0.0 are one value here and two elsewhere
        case _:
            return value


def _upper(value: Edge) -> Edge:
    match value:
        case str():
            return _upper_text(value)
        case datetime():
            try:
                return value if value.microsecond % 1_000 == 0 else _milliseconds(value) + _MILLISECOND
            except OverflowError:  # the last millisecond of the year 9999
                return value
        case float():
            return value or 0.0
        case _:
            return value


def _upper_text(value: str) -> str:
    """The shortest prefix of at least 32 characters behind which the highest character is above what follows."""
    end = TEXT_MAX
    while end < len(value) and value[end] == _HIGHEST_CHARACTER:
        end += 1
    return value if len(value) <= end else value[:end] + _HIGHEST_CHARACTER


def _milliseconds(value: datetime) -> datetime:
    return value.replace(microsecond=value.microsecond // 1_000 * 1_000)


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


# ---- names and checks


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


class StagedSession(SinkSession):
    """A session whose prepared files lie in a staging folder until the store has their rows."""

    staging: str

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files of dead attempts."""
        return sweep_folder(self.staging, self.identity.incarnation, is_dead)

    def unreached(self, files: Sequence[PreparedFile]) -> Sequence[str]:
        """Of the prepared files in the staging folder."""
        return unreached(self.staging, files)

    def finished(self, transaction: PreparedTransaction) -> None:
        """The store has the rows: the files may go."""
        remove_staged(self.staging, self.identity.incarnation, transaction.txid)
