"""What the suite for sinks needs of a store, and the steps that its cases share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pytest

from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import (
    MESSAGE_COLUMNS,
    PreparedFile,
    SinkInput,
    SinkMode,
    TaskContext,
    transaction_digest,
)
from stormproof.core.storage.files import files_at
from stormproof.sinks.contract.protocol import PreparedTransaction, Sink, SinkIdentity, SinkSession
from stormproof.sinks.prepare.staging import guard_of

SCHEMA: Final = pa.schema([pa.field("word", pa.string()), pa.field("n", pa.int64())])
"""The suite's rows."""
APPEND: Final = SinkInput(SCHEMA)
UPSERT: Final = SinkInput.for_upsert(SCHEMA, ("word",), ("n",))
FOLD: Final = SinkInput.for_fold(SCHEMA, ("word",), {"n": Fold.SUM})

Pairs: TypeAlias = Mapping[str, int] | Sequence[tuple[str | None, int | None]]
"""Rows: a word and a number each."""
A: Final[Mapping[str, int]] = {"a": 1, "b": 2}
B: Final[Mapping[str, int]] = {"b": 5, "c": 7}


class SinkHarness(ABC):
    """One sink over a fresh store, as the suite sees it: a sink of rows with a `word` (text) and an `n` (64-bit integer).

    `input` says what the sink is given: `APPEND`, or `UPSERT` or `FOLD` for the cases of these. `private` is off for a sink
    whose prepared files lie in the table's own folder, and become part of it by the commit.
    """

    sink: Sink
    input: SinkInput = APPEND
    private: bool = True
    identity: SinkIdentity = SinkIdentity("topology", "inc-1", "counts")

    @abstractmethod
    def rows(self) -> Counter[tuple[str, int]]:
        """What the table holds now, read by the store's own means; empty where there is no table."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the table behind the sink's back."""

    def values(self) -> list[dict[str, Any]]:
        """What the table holds now, each row by its columns' names. For `FoldCases`, where the sink declares kinds of folds
        beyond sums, minima and maxima.
        """
        raise NotImplementedError(f"{type(self).__name__} says what its table holds, column by column: values()")

    def refuse(self, word: str | None) -> None:
        """Have the table refuse every row whose word begins with this, by its own rule; None: no more. For `RefuseCases`."""
        raise NotImplementedError(f"{type(self).__name__} says how its table refuses rows: refuse(word)")

    def discard_row(self) -> tuple[str | None, int | None]:
        """Have the sink reject the messages of rows that do not fit (``schema_contract="discard_row"``), from when it is
        next opened; gives such a row. For `MisfitCases`.
        """
        raise NotImplementedError(f"{type(self).__name__} says which row does not fit its table: discard_row()")

    def open(self, epoch: int = 1, *, create: bool = True) -> SinkSession:
        """The sink, opened as a driver of this epoch does."""
        return self.sink.open(self.identity, self.input, epoch, create=create)

    def prepare(
        self,
        session: SinkSession,
        txid: int,
        previous: int | None,
        rows: Pairs,
        *,
        attempt: int = 1,
        tasks: int = 1,
        messages: Sequence[int | None] = (),
        rejects_max: int | None = None,
        of_groups: bool = False,
    ) -> PreparedTransaction:
        """Write rows as `tasks` tasks would, and put them together as prepare does. `messages` has the message of each row,
        where the rows are to name them; None: the row stands for messages that are not known one by one. `of_groups` as in
        `PreparedTransaction`.
        """
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        files = [
            file
            for task in range(tasks)
            for file in self._task(
                session,
                TaskContext(self.identity.incarnation, txid, attempt, task),
                pairs[task::tasks],
                messages[task::tasks],
            )
        ]
        rows_of_all = sum(f.rows for f in files)
        return PreparedTransaction(
            txid, previous, transaction_digest(files), rows_of_all, tuple(files), rejects_max, of_groups
        )

    def prepare_rows(
        self, session: SinkSession, txid: int, previous: int | None, rows: Sequence[pa.RecordBatch]
    ) -> PreparedTransaction:
        """The same of any rows: each batch as a task would write it."""
        files: list[PreparedFile] = []
        for task, batch in enumerate(rows):
            context = TaskContext(self.identity.incarnation, txid, 1, task)
            writer = session.writer().open_task(context, batch.schema)
            writer.write(batch)
            files += writer.close()
        number = sum(file.rows for file in files)
        return PreparedTransaction(txid, previous, transaction_digest(files), number, tuple(files))

    def _task(
        self,
        session: SinkSession,
        context: TaskContext,
        pairs: Sequence[tuple[str | None, int | None]],
        messages: Sequence[int | None],
    ) -> Sequence[PreparedFile]:
        columns = [pa.array([w for w, _ in pairs], pa.string()), pa.array([n for _, n in pairs], pa.int64())]
        rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        if messages:
            assert session.writer().names_messages, "the sink's writer names no messages, so it cannot reject any"
            named = [pa.array(messages, pa.int64()), pa.array([0] * len(messages), pa.int64())]
            named.append(pa.nulls(len(messages), MESSAGE_COLUMNS.field(2).type))
            rows = pa.RecordBatch.from_arrays([*columns, *named], schema=pa.schema([*SCHEMA, *MESSAGE_COLUMNS]))
        writer = session.writer().open_task(context, rows.schema)
        writer.write(rows)
        return writer.close()

    def after(self, *batches: Mapping[str, int]) -> Counter[tuple[str, int]]:
        """What the table must hold after these batches, by the definition of the mode, computed row by row."""
        pairs = [pair for batch in batches for pair in batch.items()]
        match self.input.mode:
            case SinkMode.APPEND:
                return Counter(pairs)
            case SinkMode.UPSERT:
                return Counter(dict(sorted(pairs, key=lambda pair: pair[1])).items())
            case SinkMode.FOLD:
                total: Counter[str] = Counter()
                for word, n in pairs:
                    total[word] += n
                return Counter(total.items())

    def prepared_in(self, session: SinkSession) -> PreparedFolder:
        """Where the sink's prepared files lie; a sink that writes none to a folder skips the case."""
        found = session.writer().files_in()
        if found is None:
            pytest.skip("this sink has no folder of prepared files")
        return PreparedFolder(found)


@dataclass(frozen=True, slots=True)
class PreparedFolder:
    """The place of prepared files, as somebody reaches it who is not the sink: a local folder, or one in an object store."""

    address: str

    def names(self) -> set[str]:
        """The prepared files that are there."""
        return set(files_at(self.address).list(self.address, "stormproof-"))

    def exists(self, name: str) -> bool:
        """Whether it is there."""
        return files_at(self.address).stat(self._path(name)) is not None

    def read(self, name: str) -> bytes:
        """All of a file."""
        with files_at(self.address).open(self._path(name)) as file:
            return file.read()

    def put(self, name: str, content: bytes) -> None:
        """Put a file there, in the place of one that has its name."""
        files = files_at(self.address)
        files.remove(self._path(name))
        new = files.write_new(self._path(name), private=False)
        try:
            new.write(content)
            new.sync()
        finally:
            new.close()

    def remove(self, name: str) -> None:
        """Remove it, and its second name in a table's own folder."""
        files_at(self.address).remove(self._path(name))
        files_at(self.address).remove(guard_of(self._path(name)))

    def mode(self, name: str) -> int | None:
        """The rights of a local file; None in an object store."""
        return Path(self._path(name)).stat().st_mode if files_at(self.address).is_local else None

    def _path(self, name: str) -> str:
        return os.path.join(self.address, name)
