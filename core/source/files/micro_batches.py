"""`MicroBatches`: the rows of a streaming query's micro-batches as messages, confirmed by position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, Unpack

import pyarrow as pa

from stormproof.core.base.arguments import error_prefix, require_text, require_text_if_given
from stormproof.core.base.arrow import pc
from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.schema import SchemaLike, parse_schema
from stormproof.core.contract.source import Backlog, Decoded, Decoder, Limit, SourcePreview
from stormproof.core.pending.numbered import lowest_unresolved
from stormproof.core.pending.source import PendingArguments
from stormproof.core.postgres.database import Database
from stormproof.core.source.files import entries
from stormproof.core.source.files.formats import scan
from stormproof.core.source.files.reader import RegisteredFiles
from stormproof.core.source.files.rows import RowDecoder
from stormproof.core.source.files.source import FileSource
from stormproof.core.storage.files import files_at


@dataclass(frozen=True, slots=True)
class ColumnDecoder:
    """The payload is one column of a row, text or bytes, which another decoder reads. NULL fails its message."""

    inner: Decoder
    column: str

    @property
    def schema(self) -> pa.Schema:
        """The other decoder's schema."""
        return self.inner.schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Take the column, and have the other decoder read it."""
        values = payload.field(self.column)
        nulls = [row for row, missing in enumerate(pc.is_null(values).to_pylist()) if missing]
        decoded = self.inner.decode(pc.cast(pc.fill_null(pc.cast(values, pa.binary()), b""), pa.binary()))
        if not nulls:
            return decoded
        errors = dict(decoded.failed)
        errors.update(dict.fromkeys(nulls, f"column {self.column!r} is NULL"))
        return replace(decoded, failed=sorted(errors.items()))


class MicroBatches(FileSource):
    """The rows of the micro-batches that a Structured Streaming query hands to `foreach_batch`, one message each.

    Without `column` a row's columns are the tuple: `schema` names those that are wanted. With `column` that column (text
    or bytes, such as a Kafka topic's `value`) is the payload, which is decoded as a `PostgresQueue`'s is.

    Guarantee:
        Rows are written and synced to files first. They become messages in one transaction with the number of the
        micro-batch in its query: so a micro-batch is taken once, with one content. A message that failed has its row stored
        in Postgres, for its retry or as a dead letter. A file is removed once every message of it is resolved or stored.

    Not guaranteed:
        An order between micro-batches where messages are retried. A query does not take rows back: retries run with a
        later micro-batch, or when the topology is run by itself after the query has stopped.

    Threads: one feed at a time writes to it. Forks: a fork makes connections of its own.
    """

    def __init__(
        self,
        name: str,
        schema: SchemaLike,
        *,
        column: str | None = None,
        unit: Unit | None = None,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        require_text("source", "name", name, "orders")
        require_text_if_given(f"source {name}", "column", column, "value")
        with error_prefix(f"source {name}"):
            parsed = parse_schema(schema)
            payload = RowDecoder(parsed) if column is None else ColumnDecoder(decoder_for(parsed, unit), column)
        if unit is not None and column is None:
            raise TopologyError(f"source {name}: unit={unit!r} says how a payload is read: name its column=...")
        super().__init__(
            os.sep,
            "parquet",
            schema=parsed if column is None else pa.schema([(column, pa.binary())]),
            name=name,
            clock=clock,
            **pending,
        )
        self._decoder = payload
        self.feeding = False
        """Whether a micro-batch is being fed: then retries that are not due yet do not count as work that is left."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a micro-batch that are kept."""
        assert self._columns is not None
        return self._columns

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """None: a streaming query brings the messages."""
        return SourcePreview(why=f"{self.where}: its messages come with a streaming query")

    def look(self, epoch: int) -> None:
        """Do nothing: files come through `register`, and each is checked when it is read."""

    def _registered(self) -> RegisteredFiles:
        """Only the files that may still be read: their number does not grow with all that was ever fed."""
        who = self.subscriber
        with self.rows() as rows:
            behind = lowest_unresolved(rows)
            return RegisteredFiles(entries.registered(rows.cursor, who, self._format, behind))

    def register(self, folder: str, names: Sequence[str], epoch: int, tx: object) -> tuple[int, int]:
        """Make messages of the rows of these files, in `tx`; returns the first number, and the one behind the last.

        Raises:
            Fenced: a newer epoch has the subscription.
        """
        who = self.subscriber
        files = [scan(os.path.join(folder, name), "parquet", self._schema) for name in names]
        with self.rows(tx) as rows:
            self._locked(rows, who, epoch)
            newest, first = entries.last(rows.cursor, who)
            stop = first
            for number, file in enumerate(files, newest + 1):
                placed = replace(file, number=number, first_id=stop)
                entries.insert(rows.cursor, who, placed)
                stop = placed.stop_id
        return first, stop

    def reload(self) -> None:
        """Load the files that may still be read; to be called after the transaction of `register` is committed."""
        self._files = self._registered()

    def for_run(self, database: Database) -> Self:
        """The object itself: it serves one query, which feeds it during the run."""
        self.bind(database)
        return self

    def sweep(self, folder: str) -> int:
        """Remove the folder's files that no message needs, or that were never registered; returns how many."""
        self.reload()
        needed = {file.path for file in self._files}
        files = files_at(folder)
        unneeded = {os.path.join(folder, name) for name in files.list(folder)} - needed
        for path in sorted(unneeded):
            files.remove(path)
        return len(unneeded)

    def backlog(self) -> Backlog:
        """What is left for this subscription."""
        found = super().backlog()
        is_due = found.next_retry_in_s is not None and found.next_retry_in_s <= 0
        return replace(found, waiting=0, next_retry_in_s=None) if self.feeding and not is_due else found

    def place_of(self, message: int) -> tuple[str, int]:
        """Refused: a micro-batch's files are not kept.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"source {self.name}: message {message} came from a micro-batch, whose files are not kept")
