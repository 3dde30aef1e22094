"""`FileSource`: the rows of files as messages, confirmed by position."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self, Unpack

import pyarrow as pa

from stormproof.core.base.arguments import error_prefix, require_path, require_seconds, require_text_if_given
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.dataset import DatasetName, at_path
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.contract.payload import JsonDecoder, decoder_for
from stormproof.core.contract.schema import SchemaLike, parse_schema
from stormproof.core.contract.source import Decoder, Limit, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages
from stormproof.core.pending.numbered import NumberedSource, lowest_unresolved, next_of
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.pending.source import PendingArguments
from stormproof.core.postgres.database import Database
from stormproof.core.source.files import entries
from stormproof.core.source.files.entries import FilesAudit, as_registered, renamed_from
from stormproof.core.source.files.formats import FORMATS, File, Format, scan
from stormproof.core.source.files.reader import FileSliceReader, RegisteredFiles
from stormproof.core.source.files.rows import RowDecoder, edited, unpack
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import (
    FileState,
    absolute,
    checked_options,
    is_url,
    refusal_of_url,
    shown_url,
    use_storage,
)

log = logging.getLogger("stormproof.source")

LOOK_INTERVAL_S: Final = 5.0
"""Seconds between two searches for new files, while there are messages to open."""


class FileSource(NumberedSource):
    """The rows of files, one message each: Parquet rows, or lines (text, JSON lines).

    `path` is a file, a folder or a pattern (``**`` for folders within); names that begin with ``.`` or ``_`` are left
    out. It may be the URL of an object store, as ``s3://bucket/orders/*.parquet``, where ``*`` and ``**`` alone are
    patterns; `storage_options` are as those of `DeltaSink`. Files are registered when they are found, in the order of
    their names, with their rows; files that are found later come after them. Pending messages, retries and dead letters
    are in the run's Postgres. `PendingArguments` has the arguments of every pending source.

    Guarantee:
        Every row of every registered file is opened once by each subscription, and again only when it was returned,
        failed, or its lease ran out. A file that was changed after its registration, or is gone before all of its
        messages were resolved, is refused by name: its rows would be other messages, or lost. Each read compares the
        content with digests that were taken at registration, whatever size and time say; a file that was merely touched is
        still the same, and so is one on a disk that was renamed before all of its messages were resolved. Failed messages
        are stored with their payload, for a retry or as dead letters.

    Not guaranteed:
        An order between slices; within one, messages come in the files' order. A file that is still being written when it
        is found is registered as it is then: so write a file elsewhere, and move it here when it is whole.

        That a file which was read may be renamed within the pattern: under another name it is a new file, as it is in an
        object store at any time.

    The executors must reach the files under the same path or URL. A line ends with a newline or with the file; an empty line
    is a message. The bytes of a Parquet row are estimated from its row group. The object connects at its first use, and
    pickles without its connection.

    Threads: topologies on several threads may share one object; each run has a subscription of its own.
    Forks: a fork makes connections of its own, and never touches its parent's.
    """

    KEEPS_MESSAGES: ClassVar[bool] = True
    KIND: ClassVar[str] = "files"
    AUDIT = FilesAudit

    def datasets(self) -> tuple[DatasetName, ...]:
        """The path, or the pattern."""
        return (at_path(self._pattern),)

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: Format = "parquet",
        *,
        schema: SchemaLike = "line string",
        name: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        database: Database | str | None = None,
        look_interval_s: float = LOOK_INTERVAL_S,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        require_path("source" if name is None else f"source {name}", "path", path)
        self._pattern = absolute(path)
        require_text_if_given("source", "name", name, "lines")
        name = name or Path(self._pattern).name
        where = f"source {name}"
        given = Database.given(where, database)
        if is_url(self._pattern) and (refusal := refusal_of_url(self._pattern)) is not None:
            raise UsageError(f"{where}: {shown_url(self._pattern)}: {refusal}")
        if storage_options is not None:
            fixed, star, _ = self._pattern.partition("*")
            use_storage(fixed.rpartition("/")[0] if star else fixed, checked_options(where, storage_options))
        if format not in FORMATS:
            raise UsageError(f"source {name}: no format {format!r}; known: {', '.join(FORMATS)}")
        require_seconds(where, "look_interval_s", look_interval_s)
        self._format: Format = format
        with error_prefix(where):
            self._schema = parse_schema(schema)
            decoder = _decoder(self._schema, format)
        super().__init__(name, decoder=decoder, store=PostgresPendingStore("source", name, database=given), **pending)
        self._columns = tuple(self._schema.names) if format == "parquet" else None
        self._clock: Clock | None = clock
        self._look_interval_s = look_interval_s
        self._looked_s = -math.inf
        self._files = RegisteredFiles()

    def for_run(self, database: Database) -> Self:
        """The same files for one run: with a subscription and connections of its own, in `database` if none is named."""
        view = super().for_run(database)
        view._files = RegisteredFiles()
        return view

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None, "_looked_s": -math.inf}

    def place_of(self, message: int) -> tuple[str, int]:
        """The path of a message's file, and its row there, counted from 0.

        Raises:
            UsageError: no registered file has the message.
        """
        for file, row, _ in self._files.overlapping(message, message + 1):
            return file.path, row
        raise UsageError(f"source {self.name}: no registered file has message {message}", message=message)

    # ---- the files

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; created if it is missing.

        Raises:
            Fenced: a newer epoch has the subscription.
            UsageError: it was created for files of another format.
        """
        super().subscribe(subscription, epoch)
        self._files = self._registered()
        self._looked_s = -math.inf

    def _registered(self) -> RegisteredFiles:
        """The files of this subscription."""
        who = self.subscriber
        with self.rows() as rows:
            return RegisteredFiles(entries.registered(rows.cursor, who, self._format))

    def _found(self) -> dict[str, FileState]:
        """What the pattern matches now, in the order of the paths.

        Raises:
            UsageError: a name is not UTF-8, so that no record can hold it.
        """
        found = files_at(self._pattern).find(self._pattern)
        for path in found:
            try:
                path.encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"the name of file {path!a} is not UTF-8: rename it", file=ascii(path)) from error
        return {path: found[path] for path in sorted(found) if not os.path.basename(path).startswith((".", "_"))}

    def look(self, epoch: int) -> None:
        """Check that registered files have not changed, and register new ones.

        Raises:
            Fenced: a newer epoch has the subscription.
            PositionMismatch: a registered file has changed, or is gone while it is needed.
            UsageError: a new file does not fit the source's format or schema.
        """
        who, clock = self.subscriber, self._clock or SystemClock()
        self._clock = clock
        with self.rows() as rows:
            all_opened = next_of(self._locked(rows, who, epoch)) >= self._files.stop
        if not all_opened and clock.monotonic_s() - self._looked_s < self._look_interval_s:
            return
        with self.rows() as rows:
            lowest = lowest_unresolved(rows)
        known, found = {file.path for file in self._files}, self._found()
        new = [path for path, now in found.items() if path not in known and self._is_new(path, now, lowest)]
        for place, file in enumerate(self._files):
            needed = file.stop_id > lowest
            self._keep(place, as_registered(file, self._schema, found.get(file.path), needed=needed))
        for path in new:
            with _moved_away(path):
                self._register(who, epoch, scan(path, self._format, self._schema))
        self._looked_s = clock.monotonic_s()

    def _is_new(self, path: str, now: FileState, lowest: int) -> bool:
        """Whether an unregistered path is a new file. A registered file that was renamed gets its new name here."""
        place: int | None = None
        with _moved_away(path):
            place = renamed_from(self._files, path, now, self._schema, lowest)
        if place is None:
            return True
        file = self._files[place]
        self._keep(place, replace(file, path=path))
        log.info("source %s: file %s was renamed to %s; its messages stay the same", self.name, file.path, path)
        return False

    def _keep(self, place: int, file: File) -> None:
        """Store what has changed of a registered file, if anything has."""
        if file is not self._files[place]:
            who = self.subscriber
            with self.rows() as rows:
                entries.update(rows.cursor, who, file)
            self._files[place] = file

    def _register(self, who: Subscriber, epoch: int, file: File) -> None:
        with self.rows() as rows:
            self._locked(rows, who, epoch)
            # The holder of the lock knows all files: any other driver of this subscription is fenced.
            placed = replace(file, number=self._files.newest + 1, first_id=self._files.stop)
            entries.insert(rows.cursor, who, placed)
        self._files.append(placed)

    def _unopened(self, who: Subscriber, limit: Limit) -> SourcePreview:
        """With the files that are there and not registered yet, as far as they are needed: these are read, and stay so."""
        with self._store.rows(who) as rows:
            known = RegisteredFiles(entries.registered(rows.cursor, who, self._format))
            first = next_of(rows.position() or self.start(rows.cursor))
            lowest = lowest_unresolved(rows)
        there = {file.path for file in known}
        for path, now in self._found().items():
            if known.stop >= first + max(1, limit.messages):
                break
            with _moved_away(path):
                if path not in there and renamed_from(known, path, now, self._schema, lowest) is None:
                    file = scan(path, self._format, self._schema)
                    known.append(replace(file, number=known.newest + 1, first_id=known.stop))
        self._files = known
        return super()._unopened(who, limit)

    # ---- the connector

    def start(self, cursor: Any) -> At:
        """In front of the first message, with the format, which must never change."""
        return {**super().start(cursor), "format": self._format}

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Refuse a subscription that was created for another format: the same numbers would be other messages.

        Raises:
            UsageError: it was created for another format.
        """
        if position.get("format") != self._format:
            raise UsageError(
                f"source {self.name}: subscription {who.subscription} was made for {position.get('format')} files, "
                f"not {self._format}; give the topology another name",
                source=self.name,
            )
        return position

    def stop(self, cursor: Any) -> int:
        """The number behind the last message of the files that this run has registered or loaded."""
        return self._files.stop

    def unopened(self, position: At, cursor: Any) -> tuple[int, float | None]:
        """How many messages of all registered files lie behind the position; for how long is not known."""
        return max(0, entries.last(cursor, self.subscriber)[1] - next_of(position)), None

    def cut(self, first: int, stop: int, limit: Limit, cursor: Any) -> tuple[int, int]:
        """Where the limit cuts a range, after at least one message, and the bytes up to there."""
        return self._files.cut(first, stop, limit)

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """The messages from the position on; of Parquet up to the end of a row group, so that no group is read twice."""
        first, stop = next_of(position), self._files.stop
        if self._columns is not None and first < stop:
            end, _ = self.cut(first, stop, limit, cursor)
            limit = replace(limit, messages=self._files.whole_groups(first, end) - first)
        return super().next(position, limit, seed, cursor)

    def bounds(self, first: int, stop: int, parts: int) -> Sequence[int]:
        """Parts of about equal length; of Parquet they end where row groups end, if that changes their length little."""
        return self._files.bounds(first, stop, parts)

    def reader(self, first: int, stop: int) -> SliceReader:
        """Reads the rows of files that these messages are."""
        return FileSliceReader.of(self._files.segments(first, stop), self._columns)

    def range_payloads(self, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """Lines as bytes, or Parquet rows as Arrow streams.

        Raises:
            PositionMismatch: the file of a message has changed or is gone.
        """
        return self._files.payloads(ids, self._columns)

    def unpack(self) -> Callable[[Sequence[bytes]], list[pa.Array]] | None:
        """What makes columns of stored Parquet rows; None for lines, which are bytes."""
        return None if self._columns is None else unpack

    @classmethod
    def edited(cls, old: bytes, payload: bytes) -> bytes:
        """A line's payload is given as bytes, a Parquet row's in the form of `editable`.

        Raises:
            UsageError: the payload does not fit the row.
        """
        return edited(old, payload)


@contextmanager
def _moved_away(path: str) -> Generator[None]:
    """Around the work on a new file: one that is gone before it is registered was never the source's."""
    try:
        yield
    except FileNotFoundError:
        log.info("file %s is gone before it was registered; it is left out", path)


def _decoder(schema: pa.Schema, format_: Format) -> Decoder:
    if format_ == "parquet":
        return RowDecoder(schema)
    if format_ == "jsonl":
        return JsonDecoder(schema)
    if len(schema) != 1 or not (pa.types.is_string(schema.field(0).type) or pa.types.is_binary(schema.field(0).type)):
        raise TopologyError(
            f"a line of text is one string or binary column, not {', '.join(f'{f.name} {f.type}' for f in schema)}; "
            "take format='jsonl' for several columns"
        )
    return decoder_for(schema)
