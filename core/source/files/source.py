"""`FileSource`: the rows of files as messages, confirmed by position."""

from __future__ import annotations

import copy
import glob
import logging
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, Self

import numpy as np
import psycopg
import pyarrow as pa

from stormproof.core.arguments import require_path, require_seconds, require_text, require_whole, said_of
from stormproof.core.arrays import Rows
from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import Json, TopologyError, UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.store import StoreConnection, query
from stormproof.core.schema import SchemaLike, parse_schema
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.dead_letter import DeadLetter, Disposal
from stormproof.core.source.decode import JsonDecoder, decoder_for
from stormproof.core.source.files import pending
from stormproof.core.source.files.formats import (
    FORMATS,
    File,
    Format,
    changed,
    check_unchanged,
    digests_now,
    fingerprint_without_digests,
    gone,
    scan,
)
from stormproof.core.source.files.pending import RetryPolicy, SliceRow, Subscriber
from stormproof.core.source.files.reader import FileSliceReader, RetryReader, Segment, rows_of
from stormproof.core.source.files.rows import RowDecoder, edited, pack
from stormproof.core.source.files.tables import SCHEMA
from stormproof.core.source.kind import SourceKind
from stormproof.core.source.protocol import Backlog, Decoder, Expectation, Lease, Limit, Resolution, Slice, SliceReader
from stormproof.core.tracking.share import tokens, xor_reduce

log = logging.getLogger("stormproof.source")

LAPSE_KEPT_DAYS: Final = 7
LOOK_INTERVAL_S: Final = 5.0
"""So long after a look at the folder the next open takes its word that nothing changed, while it has messages to open."""


class FileStore:
    """The file sources' tables of one source, seen by one subscription: dead letters, and what they share.

    Works without the files themselves. Threads: any number may use one object. Forks: one makes connections of its own.
    """

    def __init__(self, name: str, *, database: Database | None = None) -> None:
        self.name = name
        self._database = database
        self._subscription: str | None = None
        self._own = StoreConnection("source", name, application="files", missing="`stormproof ledger migrate` makes it")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": self._own.apart()}

    def shown_id(self, message: int, origin: int) -> str:
        """``FILE-N``: the number of the message's file, and its own."""
        return pending.shown_id(message, origin)

    def bind(self, database: Database) -> None:
        """Use this database, where none was named."""
        if self._database is None:
            self._database = database

    def look_at(self, subscription: str) -> None:
        """Act for a subscription that is there already, without its files and its epoch: for its dead letters."""
        self._subscription = subscription

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, those that were disposed of included, oldest first."""
        who = self._who()
        with self._transaction(None) as cursor:
            return pending.dead_letters(cursor, who)

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with their failures counted from 0; returns those that were dead."""
        who = self._who()
        with self._transaction(None) as cursor:
            return pending.dispose(cursor, who, ids, Disposal.REQUEUE, by=by, why=why)

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that were dead."""
        who = self._who()
        with self._transaction(None) as cursor:
            return pending.dispose(cursor, who, ids, Disposal.DROP, by=by, why=why)

    def drop_connections(self) -> None:
        """Let the connection go; the next call makes another."""
        self._own.close()

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Hand a dead letter out again with another payload; the old one stays on record. False where it is none.

        A line's payload is its bytes. A row's of a Parquet file is as `editable` shows it.

        Raises:
            UsageError: the payload is no such row.
        """
        who = self._who()
        with self._transaction(None) as cursor:
            old = pending.undecided_payload(cursor, who, message)
            if old is None:
                return False
            stored = edited(old, payload)
            pending.dispose(cursor, who, [message], Disposal.EDIT, by=by, why=why, payload=stored)
        failpoint("dead_letter.after")
        return True

    def close(self) -> None:
        """Let the connection go."""
        self._own.close()

    def _who(self) -> Subscriber:
        if self._subscription is None:
            raise UsageError(f"source {self.name}: subscribe() comes before any other call")
        return Subscriber(self.name, self._subscription)

    @property
    def _bound(self) -> Database:
        if self._database is None:
            raise UsageError(
                f"source {self.name} keeps its position in Postgres and has none yet: a topology's run binds its own; "
                "elsewhere call bind(database)"
            )
        return self._database

    def _transaction(self, tx: object | None) -> AbstractContextManager[psycopg.Cursor[Any]]:
        """A cursor in `tx`, or in a transaction of its own that is committed at the end."""
        database = self._bound
        return self._own.transaction(lambda: database, tx)


class FileSource(FileStore):
    """The rows of files, one message each: Parquet rows, or lines (text, JSON lines).

    `path` is a file, a folder or a pattern (``**`` for folders within); names that begin with ``.`` or ``_`` are left
    out. Files are registered when they are found, in the order of their names, with their rows; files that are found
    later come after them. What is pending, waiting and dead stands in the run's Postgres, as a `PostgresQueue`'s does.

    Guarantee:
        Every row of every registered file is opened once by each subscription, and again only when it was returned,
        failed, or its lease ran out. A file that is changed after it was registered, or is gone before all of its
        messages were resolved, is refused by name: its rows would be other messages, or lost. Each read compares the
        content of what it reads with digests that were taken then, whatever size and time say; a file that was merely
        touched or renamed goes on. Failed messages wait for a retry or are dead letters, and carry their payload
        themselves.

    Not guaranteed:
        An order between slices; within one, messages come in the files' order. A file that is still being written when it
        is found is registered as it is then: so write a file elsewhere, and move it here when it is whole.

    The executors must reach the files under the same path. A line is what ends with a newline, or with the file; an empty
    line is a message. How many bytes a Parquet row has is estimated, from its row group. A description: it connects at
    its first use, and pickles without its connection.

    Threads: topologies on several threads may share one object; each run has a subscription of its own.
    Forks: a fork makes connections of its own, and never touches its parent's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: Format = "parquet",
        *,
        schema: SchemaLike = "line string",
        name: str | None = None,
        database: Database | str | None = None,
        max_attempts: int = 5,
        backoff_base_s: float = 1.0,
        backoff_max_s: float = 300.0,
        look_interval_s: float = LOOK_INTERVAL_S,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        require_path("source" if name is None else f"source {name}", "path", path)
        self._pattern = os.path.abspath(os.fspath(path))
        if name is not None:
            require_text("source", "name", name, "lines")
        name = name or Path(self._pattern).name
        where = f"source {name}"
        super().__init__(name, database=Database.given(where, database))
        if format not in FORMATS:
            raise UsageError(f"source {name}: no format {format!r}; known: {', '.join(FORMATS)}")
        require_whole(where, "max_attempts", max_attempts, 1)
        require_seconds(where, "backoff_base_s", backoff_base_s)
        require_seconds(where, "backoff_max_s", backoff_max_s)
        require_seconds(where, "look_interval_s", look_interval_s)
        self._format: Format = format
        with said_of(where):
            self._schema = parse_schema(schema)
            self._decoder = _decoder(self._schema, format)
        self._columns = tuple(self._schema.names) if format == "parquet" else None
        self._policy = RetryPolicy(max_attempts, Backoff(backoff_base_s, backoff_max_s))
        self._rng = rng or Random()  # noqa: S311 - jitter, not a secret
        self._clock: Clock | None = clock
        self._look_interval_s = look_interval_s
        self._looked_s = -math.inf
        self._files: list[File] = []

    def for_run(self, database: Database) -> Self:
        """The same files for one run: with a subscription and connections of its own, in `database` if none is named."""
        view = copy.copy(self)
        view._subscription, view._files, view._clock = None, [], self._clock
        view.bind(database)
        return view

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clock": None, "_looked_s": -math.inf}

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """A slice of files can be read again."""
        return SourceKind.TRANSACTIONAL

    def serves(self, guarantee: Guarantee) -> str | None:
        """All of them."""
        del guarantee
        return None

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in the database that this source's position stands in."""
        return self._own.joins(lambda: self._bound, tx)

    # ---- the files

    @property
    def _total(self) -> int:
        return self._files[-1].stop_id if self._files else 0

    def place_of(self, message: int) -> tuple[str, int]:
        """A message's file, and its row there, counted from 0.

        Raises:
            UsageError: no registered file has it.
        """
        for file, row, _ in self._overlapping(message, message + 1):
            return file.path, row
        raise UsageError(f"source {self.name}: no registered file has message {message}", message=message)

    def _found(self) -> list[str]:
        """The paths that the pattern matches now, in the order of their names."""
        pattern = os.path.join(self._pattern, "*") if os.path.isdir(self._pattern) else self._pattern
        return sorted(
            path
            for path in glob.iglob(pattern, recursive=True)
            if not os.path.basename(path).startswith((".", "_")) and os.path.isfile(path)
        )

    def _look(self, epoch: int) -> None:
        """See that registered files are as they were, and register those that are new."""
        who = self._who()
        paths = self._found()
        known = {file.path for file in self._files}
        new = [path for path in paths if path not in known]
        new = [path for path in new if not self._is_moved(who, path)]
        with self._transaction(None) as cursor:
            lowest = pending.lowest_unresolved(cursor, who)
        for place, file in enumerate(self._files):
            self._files[place] = self._checked(who, file, needed=file.stop_id > lowest)
        for path in new:
            self._register(who, epoch, scan(path, self._format, self._schema))
        clock = self._clock = self._clock or SystemClock()
        self._looked_s = clock.monotonic_s()

    def _is_moved(self, who: Subscriber, path: str) -> bool:
        """Whether a path that is new is a registered file under another name: then it has the same messages as before.

        It has the time, the size and the content of a file that is gone. One that was written anew has another time.
        """
        now = os.stat(path)
        for place, file in enumerate(self._files):
            if (file.size_bytes, file.modified_ns) != (now.st_size, now.st_mtime_ns) or os.path.exists(file.path):
                continue
            if _same_content(file, scan(path, self._format, self._schema)):
                self._files[place] = self._update(who, replace(file, path=path))
                log.info("source %s: file %s was renamed to %s; its messages stay the same", self.name, file.path, path)
                return True
        return False

    def _checked(self, who: Subscriber, file: File, *, needed: bool) -> File:
        """A registered file, if it is as it was: one whose time is another is read again to tell."""
        try:
            now = os.stat(file.path)
        except FileNotFoundError as error:
            if needed:
                raise gone(file.path) from error
            return file
        is_same = (now.st_size, now.st_mtime_ns) == (file.size_bytes, file.modified_ns)
        if is_same and (not needed or self._is_digested(file)):
            return file
        check_unchanged(file.path, now, file.size_bytes, None)
        found = scan(file.path, self._format, self._schema)
        if not file.digests:  # registered by a version that kept none
            was = fingerprint_without_digests(file.path, file.format)
            same = was == file.fingerprint and np.array_equal(found.marks, file.marks)
        elif file.digested != found.digested:  # other columns are read now
            same = file.fingerprint == found.fingerprint and digests_now(file) == file.digests
        else:
            same = _same_content(file, found)
        if not same:
            then = f"{file.size_bytes} bytes, modified at {file.modified_ns} ns, hash {file.fingerprint[:16]}"
            told = f"other content in as many bytes, modified at {now.st_mtime_ns} ns, hash {found.fingerprint[:16]}"
            raise changed(file.path, then, told)
        taken = replace(
            file,
            modified_ns=now.st_mtime_ns,
            fingerprint=found.fingerprint,
            digests=found.digests,
            digested=found.digested,
        )
        return self._update(who, taken)

    def _is_digested(self, file: File) -> bool:
        """Whether its digests are of all that is read of it."""
        return bool(file.digests or not file.rows) and file.digested == (self._columns or ())

    def _update(self, who: Subscriber, file: File) -> File:
        """Keep what is known now of a file whose messages stay the same."""
        with self._transaction(None) as cursor:
            query(
                cursor,
                f"update {SCHEMA}.file_entry set path = %s, modified_ns = %s, fingerprint = %s, digests = %s,"
                " digested = %s where source = %s and subscription = %s and number = %s",
                file.path,
                file.modified_ns,
                file.fingerprint,
                file.digests,
                list(file.digested),
                *who.key,
                file.number,
            )
        return file

    def _register(self, who: Subscriber, epoch: int, file: File) -> None:
        with self._transaction(None) as cursor:
            pending.lock(cursor, who, epoch)
            # Whoever holds the lock knows all files: another driver of this subscription is fenced.
            file = replace(file, number=len(self._files) + 1, first_id=self._total)
            self._insert(cursor, who, file)
        self._files.append(file)

    def _insert(self, cursor: psycopg.Cursor[Any], who: Subscriber, file: File) -> None:
        query(
            cursor,
            f"insert into {SCHEMA}.file_entry (source, subscription, number, path, first_id, rows, size_bytes,"
            " modified_ns, fingerprint, marks, digests, digested)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            *who.key,
            file.number,
            file.path,
            file.first_id,
            file.rows,
            file.size_bytes,
            file.modified_ns,
            file.fingerprint,
            file.marks.astype("<i8").tobytes(),
            file.digests,
            list(file.digested),
        )

    def _overlapping(self, first: int, stop: int) -> list[tuple[File, int, int]]:
        """The files that hold these messages, each with its rows of them."""
        low = bisect_right(self._files, first, key=lambda file: file.stop_id)
        high = bisect_left(self._files, stop, key=lambda file: file.first_id)
        return [
            (file, max(first, file.first_id) - file.first_id, min(stop, file.stop_id) - file.first_id)
            for file in self._files[low:high]
        ]

    def _bytes_of(self, first: int, stop: int) -> int:
        return sum(file.bytes_of(low, high) for file, low, high in self._overlapping(first, stop))

    def _cut(self, first: int, stop: int, limit: Limit) -> tuple[int, int]:
        """Where the limit ends a range of messages, at least one message on, and its bytes up to there."""
        stop = min(stop, first + max(1, limit.messages))
        left, at = limit.bytes, first
        for file, low, high in self._overlapping(first, stop):
            size = file.bytes_of(low, high)
            if size > left:
                at = file.first_id + file.cut(low, high, left)
                break
            left, at = left - size, file.first_id + high
        at = max(at, first + 1)
        return at, self._bytes_of(first, at)

    def _whole_groups(self, first: int, stop: int) -> int:
        """Where a new slice had better end: at the last row group that it holds whole, that none is read twice."""
        if self._format != "parquet":
            return stop
        ((file, low, high),) = self._overlapping(stop - 1, stop)
        del low
        starts = file.group_rows
        whole = int(starts[np.searchsorted(starts, high, side="right") - 1]) + file.first_id
        return whole if whole > first else stop

    # ---- the pending source

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; makes it where it is missing.

        Raises:
            Fenced: a newer epoch has the subscription.
            UsageError: it was made for files of another format.
        """
        who = Subscriber(self.name, subscription)
        with self._transaction(None) as cursor:
            format_ = pending.subscribe(cursor, who, epoch, self._format)
            if format_ != self._format:
                raise UsageError(
                    f"source {self.name}: subscription {subscription} was made for {format_} files, not {self._format}; "
                    "give the source another name",
                    source=self.name,
                )
            self._files = self._registered(cursor, who)
        self._subscription = subscription
        self._looked_s = -math.inf

    def _registered(self, cursor: psycopg.Cursor[Any], who: Subscriber, behind: int = -1) -> list[File]:
        """The registered files, in their order; those alone that end behind message `behind`."""
        rows = query(
            cursor,
            "select number, path, first_id, rows, size_bytes, modified_ns, fingerprint, marks, digests, digested"
            f" from {SCHEMA}.file_entry where source = %s and subscription = %s and first_id + rows > %s order by number",
            *who.key,
            behind,
        ).fetchall()
        return [
            File(
                *(number, path, self._format, first_id, count, size, modified, fingerprint),
                np.frombuffer(marks, "<i8"),
                bytes(digests or b""),
                tuple(digested or ()),
            )
            for number, path, first_id, count, size, modified, fingerprint, marks, digests, digested in rows
        ]

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones.

        Raises:
            PositionMismatch: a registered file has changed, or is gone while it is needed.
            UsageError: a new file cannot be read as what the source was told.
        """
        who = self._who()
        with self._transaction(None) as cursor:
            next_id = pending.lock(cursor, who, lease.epoch)
        clock = self._clock = self._clock or SystemClock()
        if next_id >= self._total or clock.monotonic_s() - self._looked_s >= self._look_interval_s:
            self._look(lease.epoch)
        try:
            with self._transaction(tx) as cursor:
                next_id = pending.lock(cursor, who, lease.epoch)
                row = pending.reopen(cursor, who, lease, limit, self._cut)
                if row is None and limit.retries:
                    row = pending.open_due(cursor, who, lease, limit, self._cut)
                if row is None and next_id < self._total:
                    stop, _ = self._cut(next_id, self._total, limit)
                    stop = self._whole_groups(next_id, stop)
                    row = pending.open_new(cursor, who, lease, next_id, stop, self._bytes_of(next_id, stop))
                if row is None:
                    return None
                replayed = pending.retries_of(cursor, row.id) if row.is_retry else []
        except psycopg.errors.UniqueViolation as error:
            raise UsageError(
                f"source {self.name}: {lease.owner} holds a slice already; each lease needs a key of its own"
            ) from error
        position = _position(row, replayed)
        return self.attach(position, _expected(_ids(position), seed))

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        _ids(position)
        size, deaths = position.get("bytes"), position.get("deaths")
        replayed = position.get("replayed")
        pairs = replayed if isinstance(replayed, list) else []
        return Slice(
            position,
            expected,
            size if isinstance(size, int) else 0,
            retry=position.get("range") is None,
            deaths=deaths if isinstance(deaths, int) else 0,
            replayed=tuple(_pair(pair) for pair in pairs),
        )

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages left out, from the messages' numbers alone."""
        del tx
        ids = _ids(slice_.position)
        return _expected(ids[~np.isin(ids, np.fromiter(excluded, np.int64))], seed)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as contiguous parts; of Parquet, parts end where row groups end if they are about as long then."""
        ids = _ids(slice_.position)
        if slice_.retry:
            number = slice_.position.get("slice")
            assert isinstance(number, int)
            bounds = [len(ids) * part // parallelism for part in range(parallelism + 1)]
            packed = self._columns is not None
            return tuple(
                RetryReader(self._bound, number, tuple(ids[low:high].tolist()), packed)
                for low, high in pairwise(bounds)
            )
        if not len(ids):
            return tuple(FileSliceReader((), self._columns) for _ in range(parallelism))
        return tuple(
            FileSliceReader(
                tuple(
                    Segment.of(file, start, stop) for file, start, stop in self._overlapping(low, high) if start < stop
                ),
                self._columns,
            )
            for low, high in pairwise(self._bounds(int(ids[0]), int(ids[-1]) + 1, parallelism))
        )

    def _bounds(self, first: int, stop: int, parallelism: int) -> list[int]:
        """The messages at which a slice is cut in parts."""
        ideal = [first + (stop - first) * part // parallelism for part in range(parallelism + 1)]
        if self._format != "parquet":
            return ideal
        starts = np.concatenate([file.group_rows + file.first_id for file, _, _ in self._overlapping(first, stop)])
        starts = starts[(starts > first) & (starts < stop)]
        if not len(starts):
            return ideal
        near = [int(starts[np.abs(starts - cut).argmin()]) for cut in ideal[1:-1]]
        half = (stop - first) / parallelism / 2
        inner = [snap if abs(snap - cut) <= half else cut for snap, cut in zip(near, ideal[1:-1], strict=True)]
        return [first, *sorted(inner), stop]

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """Open to held; Fenced where the lease lapsed, was returned, or belongs to another epoch."""
        who = self._who()
        with self._transaction(tx) as cursor:
            pending.touch(cursor, who, lease, hold=True)

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry; Fenced where it is not ours any more."""
        who = self._who()
        with self._transaction(None) as cursor:
            pending.touch(cursor, who, lease, hold=False)

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named, whose payloads are read once more to be kept.

        Raises:
            Fenced: the lease lapsed and its messages were handed to another, or it belongs to another epoch.
            PositionMismatch: the file of a failed message has changed or is gone.
        """
        who = self._who()
        with self._transaction(tx) as cursor:
            row = pending.take(cursor, who, lease, delete=True)
            if row is None:
                pending.explain(cursor, who, lease)
                return Resolution()
            resolution = Resolution()
            if failed:
                resolution = pending.resolve_failed(
                    cursor, who, row, failed, policy=self._policy, rng=self._rng, payloads=self._payloads
                )
            if row.is_retry:
                query(cursor, f"delete from {SCHEMA}.file_retry where slice = %s", row.id)
            return resolution

    def _payloads(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The payloads of these messages, as they are stored; ascending."""
        found: dict[int, bytes] = {}
        wanted = np.array(ids, np.int64)
        for file, low, high in self._overlapping(ids[0], ids[-1] + 1):
            mine = wanted[(wanted >= file.first_id + low) & (wanted < file.first_id + high)] - file.first_id
            if not len(mine):
                continue
            segment = Segment.of(file, int(mine[0]), int(mine[-1]) + 1)
            for rows, payload in rows_of(segment, self._columns, _PAYLOAD_ROWS):
                here = mine[(mine >= rows[0]) & (mine <= rows[-1])] if len(rows) else mine[:0]
                if len(here):
                    picked = payload.take(pa.array(here - rows[0]))
                    stored = picked.to_pylist() if self._columns is None else pack(picked)
                    found.update(zip((here + file.first_id).tolist(), stored, strict=True))
        return found

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages; no failure is counted."""
        who = self._who()
        with self._transaction(tx) as cursor:
            pending.give_back(cursor, who, lease)

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Return the lease's messages in parts: suspects alone, else two halves; a single message is returned whole."""
        del slice_
        who = self._who()
        with self._transaction(tx) as cursor:
            row = pending.take(cursor, who, lease, delete=False)
            if row is None:
                pending.explain(cursor, who, lease, lapsed=False)
            elif row.messages > 1:
                pending.part(cursor, who, row, alone, self._bytes_of)
            else:
                pending.give_back(cursor, who, lease)

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease, mine from here on; an open one of an older epoch counts a death."""
        who = self._who()
        with self._transaction(tx) as cursor:
            return pending.recover(cursor, who, epoch)

    def backlog(self) -> Backlog:
        """What is left for this subscription, of the files that are registered."""
        who = self._who()
        with self._transaction(None) as cursor:
            row = query(
                cursor,
                f"select first_id + rows from {SCHEMA}.file_entry where source = %s and subscription = %s"
                " order by number desc limit 1",
                *who.key,
            ).fetchone()
            return pending.backlog(cursor, who, row[0] if row else 0)

    def maintain(self) -> None:
        """Forget leases that ran out long ago."""
        who = self._who()
        with self._transaction(None) as cursor:
            query(
                cursor,
                f"delete from {SCHEMA}.file_lapse where source = %s and subscription = %s"
                f" and lapsed_at < clock_timestamp() - make_interval(days => {LAPSE_KEPT_DAYS})",
                *who.key,
            )


_PAYLOAD_ROWS: Final = 10_000


def _same_content(registered: File, found: File) -> bool:
    return (registered.fingerprint, registered.digests, registered.digested) == (
        found.fingerprint,
        found.digests,
        found.digested,
    )


def _decoder(schema: pa.Schema, format_: Format) -> Decoder:
    if format_ == "parquet":
        return RowDecoder(schema)
    if format_ == "jsonl":
        decoder_for(schema, "json")  # refuses types that JSON cannot hold
        return JsonDecoder(schema)
    if len(schema) != 1 or not (pa.types.is_string(schema.field(0).type) or pa.types.is_binary(schema.field(0).type)):
        raise TopologyError(
            f"a line of text is one string or binary column, not {', '.join(f'{f.name} {f.type}' for f in schema)}; "
            "take format='jsonl' for several columns"
        )
    return decoder_for(schema)


def _position(row: SliceRow, replayed: Sequence[tuple[int, int]]) -> dict[str, Json]:
    return {
        "slice": row.id,
        "range": None if row.first is None else [row.first, row.stop],
        "bytes": row.bytes,
        "opened": row.opened,
        "deaths": row.deaths,
        "replayed": [[id_, file] for id_, file in replayed],
    }


def _ids(position: dict[str, Json]) -> Rows:
    """The numbers of a slice's messages, ascending."""
    match position:
        case {"range": [int(first), int(stop)], "slice": int()}:
            return np.arange(first, stop, dtype=np.int64)
        case {"range": None, "slice": int(), "replayed": list(replayed)}:
            return np.array([_pair(pair)[0] for pair in replayed], np.int64)
        case _:
            raise UsageError(f"not a position of a file source: {sorted(position)}")


def _pair(value: Json) -> tuple[int, int]:
    match value:
        case [int(id_), int(file)]:
            return id_, file
        case _:
            raise UsageError(f"not a message of a file source's position: {value!r}")


def _expected(ids: Rows, seed: int) -> Expectation:
    return Expectation(len(ids), xor_reduce(tokens(ids, seed)))
