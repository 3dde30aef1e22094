"""A pending source over Parquet files, for measurements: each slice is the whole text once more.

A message's number is its place in an endless repetition of the text, so a slice is one number: the round. Confirming
moves the round on. It lives in one process and forgets everything with it; a file source for users is another matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpus import Corpus
from stormproof.core.base.errors import Fenced, Json, UsageError
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.contract.payload import decoder_for
from stormproof.core.contract.source import (
    READER_SCHEMA,
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    Source,
)
from stormproof.core.tracking.share import as_signed, tokens, xor_reduce


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """One file of a slice; its first message has the number `first_id`."""

    path: str
    first_id: int

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the file's messages, in id order."""
        if excluded:
            raise UsageError("a measurement excludes no messages")
        first = self.first_id
        with pq.ParquetFile(self.path) as file:
            for lines in file.iter_batches(batch_size=batch_rows, columns=["line"]):
                ids = np.arange(first, first + lines.num_rows, dtype=np.int64)
                first += lines.num_rows
                columns = [
                    pa.array(ids),
                    pa.array(np.zeros(lines.num_rows, np.int64)),
                    pa.array(as_signed(tokens(ids, seed))),
                    lines.column(0).cast(pa.binary()),
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=READER_SCHEMA)


class RepeatedParquet(Source):
    """The text of a corpus, again and again."""

    def __init__(self, name: str, corpus: Corpus) -> None:
        self.name = name
        self._corpus = corpus
        self._decoder = decoder_for("line string")
        self._next = 0
        self._lease: Lease | None = None

    @property
    def decoder(self) -> Decoder:
        """Text."""
        return self._decoder

    def serves(self, guarantee: Guarantee) -> str | None:
        """All of them, in one process."""
        return None

    def shown_id(self, message: int, origin: int) -> str:
        """The message's number."""
        return str(message)

    def subscribe(self, subscription: str, epoch: int) -> None:
        """There is nothing to make ready."""

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out the next round, or the one that was returned."""
        if limit.messages < self._corpus.messages:
            raise UsageError(f"source {self.name} hands out {self._corpus.messages} messages at once")
        self._lease = lease
        return self.attach({"round": self._next}, self._expected(self._next, seed))

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice of a round."""
        return Slice(position, expected, bytes=sum(path.stat().st_size for path in self._corpus.files))

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed."""
        if excluded:
            raise UsageError("a measurement excludes no messages")
        return self._expected(_round_of(slice_), seed)

    def _expected(self, number: int, seed: int) -> Expectation:
        """From the numbers alone, apart from the read."""
        count = self._corpus.messages
        return Expectation(
            count, xor_reduce(tokens(np.arange(number * count, (number + 1) * count, dtype=np.int64), seed))
        )

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """One a file."""
        first = _round_of(slice_) * self._corpus.messages
        starts = [first + sum(self._corpus.rows[:i]) for i in range(len(self._corpus.files))]
        return tuple(_reader(path, start) for path, start in zip(self._corpus.files, starts, strict=True))

    def pin(self, lease: Lease, tx: object | None = None) -> None:
        """Fenced where the lease was resolved."""
        if self._lease != lease:
            raise Fenced(f"source {self.name}: the lease of {lease.owner} was returned")

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """The next round is next."""
        if failed:
            raise UsageError(f"a measurement has no failures, but {failed[0]}")
        if self._lease == lease:
            self._lease = None
            self._next += 1
        return Resolution()

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """The same round is next."""
        self._lease = None

    def extend(self, lease: Lease) -> None:
        """A lease never runs out here."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Nobody else can have held anything."""
        return ()

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Not in a measurement."""
        raise UsageError("a measurement's batch failed twice")

    def backlog(self) -> Backlog:
        """There is always more."""
        return Backlog(self._corpus.messages, 0, 0, 0)


def _reader(path: Path, first_id: int) -> SliceReader:
    return ParquetReader(str(path), first_id)


def _round_of(slice_: Slice) -> int:
    number = slice_.position["round"]
    if not isinstance(number, int):
        raise UsageError(f"not a position of repeated Parquet files: {slice_.position}")
    return number
