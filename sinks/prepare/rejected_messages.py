"""Which messages a commit rejects: those whose rows a table refuses, and those that share a row with one of them.

Guarantee:
    A message is in a sink whole or not at all: where one row of a message is refused, all of its rows are left out. A row
    that has several messages takes all of them with it. Where an upsert leaves out the latest row of a key, the latest one
    that is not left out takes its place.

Under ``schema_contract="discard_row"`` a task leaves out and names the rows that their columns cannot hold. It cannot know
which other rows a message has. So such a row is kept apart, in the description of the file, and the commit leaves out what
else the message has there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, TaskWriter
from stormproof.core.storage.files import files_at
from stormproof.core.task.account import shown_row
from stormproof.core.tracking.share import MANY_ORIGIN
from stormproof.sinks.contract.protocol import PreparedTransaction, RefusedRow, SinkProblem
from stormproof.sinks.prepare.staging import Misfits, open_prepared
from stormproof.sinks.rows.by_key import compared_columns, queues_of
from stormproof.sinks.rows.limits import Limits


def pairs_of(batch: pa.RecordBatch) -> tuple[Rows, Rows, Rows, npt.NDArray[np.bool_]]:
    """Row, number and origin of each pair, in order of the rows; and which rows have messages that are not known."""
    nothing, rows = np.empty(0, np.int64), np.arange(batch.num_rows, dtype=np.int64)
    if batch.num_columns == 1:
        return nothing, nothing, nothing, np.ones(batch.num_rows, np.bool_)
    number, origin, others = batch.columns
    has_number = np.asarray(number.is_valid())
    has_origin = np.asarray(origin.is_valid())
    named = has_number & has_origin
    unnamed = has_origin & ~has_number
    row = rows[named]
    numbers, origins = np.asarray(number.fill_null(0))[named], np.asarray(origin.fill_null(0))[named]
    if others.null_count == len(others):
        return row, numbers, origins, unnamed
    lengths = np.asarray(pc.list_value_length(others).fill_null(0)) // 2
    more = np.asarray(others.flatten()).reshape(-1, 2)
    more_row = np.repeat(rows, lengths)
    unnamed[more_row[more[:, 1] == MANY_ORIGIN]] = True
    known = more[:, 1] != MANY_ORIGIN
    row = np.concatenate([row, more_row[known]])
    order = np.argsort(row, kind="stable")
    numbers = np.concatenate([numbers, more[known, 0]])[order]
    origins = np.concatenate([origins, more[known, 1]])[order]
    return row[order], numbers, origins, unnamed


MESSAGES_MAX: Final = 1_001
"""Messages of misfits that a task names: one more than a commit may reject. Of each message the first row is named."""
TEXT_MAX: Final = 1_000
"""Characters of a row, and of the reason, that are recorded."""


class LeavingOutWriter:
    """A task's writer that leaves out rows which the limits do not allow; the first file says which.

    `empty` makes a writer whose file has no rows, for a task that has nothing else to write.
    """

    def __init__(self, inner: TaskWriter, limits: Limits, empty: Callable[[], TaskWriter]) -> None:
        self._inner = inner
        self._limits = limits
        self._empty = empty
        self._rows: list[tuple[str, str, list[tuple[int, int]], bool]] = []
        self._named = set[int]()
        self._more = False

    def write(self, rows: pa.RecordBatch) -> None:
        """Write the rows that fit; `rows` have the message columns."""
        own = rows.select([name for name in rows.schema.names if name not in MESSAGE_COLUMNS.names])
        messages = rows.select(MESSAGE_COLUMNS.names)
        bad = self.misfits(own, messages)
        if bad:
            self._leave_out(own, messages, bad)
            fit = np.ones(rows.num_rows, np.bool_)
            fit[[row for row, _ in bad]] = False
            rows = rows.filter(pa.array(fit))
        self._inner.write(rows)

    def misfits(self, rows: pa.RecordBatch, messages: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that their columns cannot hold, each with the reason: by the limits, whatever their messages are."""
        return self._limits.check(rows)

    def _leave_out(self, own: pa.RecordBatch, messages: pa.RecordBatch, bad: Sequence[tuple[int, str]]) -> None:
        places = [row for row, _ in bad]
        row, number, origin, unnamed = pairs_of(messages.take(pa.array(places, pa.int64())))
        starts = np.searchsorted(row, np.arange(len(bad) + 1))
        for at, (place, why) in enumerate(bad):
            start, stop = int(starts[at]), int(starts[at + 1])
            named = list(zip(number[start:stop].tolist(), origin[start:stop].tolist(), strict=True))
            if named and self._named.issuperset(one for one, _ in named):
                continue
            if len(self._rows) >= MESSAGES_MAX:
                self._more = True
                return
            self._named.update(one for one, _ in named)
            text, error = shown_row(own, place)[:TEXT_MAX], storable_text(why)[:TEXT_MAX]
            self._rows.append((text, error, named, bool(unnamed[at])))

    def close(self) -> Sequence[PreparedFile]:
        """Finish the files."""
        files = list(self._inner.close())
        if not self._rows:
            return files
        if not files:
            files = list(self._empty().close())
        files[0] = replace(files[0], misfits=json.dumps({"rows": self._rows, "more": self._more}))
        return files

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._inner.discard()


# ---- what a commit leaves out

REFUSED_MAX: Final = 1_000
"""Messages that one commit may reject. More than that is no exception any more, and each one costs some 40 statements."""

LEFT_OUT_MAX: Final = 100_000
"""Rows that one commit may leave out with rejected messages; each of them is recorded."""

NO_PARENT: Final = "23503"
_LATER_PARENTS: Final = (
    ". Where the parents are of another sink of the topology, name it before this one. Where they come in later messages, "
    "let more be rejected, and call `stormproof dead-letters requeue` once the parents are there"
)

ROW_TEXT_MAX: Final = 10_000
"""Characters of a refused row, as JSON, that are recorded."""


@dataclass(frozen=True, slots=True)
class FileRows:
    """Some rows of one prepared file, with their numbers in it."""

    file: str
    numbers: Rows
    rows: pa.RecordBatch

    @staticmethod
    def at(file: str, first: int, rows: pa.RecordBatch) -> FileRows:
        """Rows that follow each other, from row `first` of the file on."""
        return FileRows(file, np.arange(first, first + rows.num_rows, dtype=np.int64), rows)

    def halves(self) -> tuple[FileRows, FileRows]:
        """The first and the second half."""
        half = self.rows.num_rows // 2
        return (
            FileRows(self.file, self.numbers[:half], self.rows.slice(0, half)),
            FileRows(self.file, self.numbers[half:], self.rows.slice(half)),
        )

    def only(self, mask: npt.NDArray[np.bool_]) -> FileRows:
        """The rows where `mask` is set."""
        return FileRows(self.file, self.numbers[mask], self.rows.filter(pa.array(mask)))

    def row(self, place: int) -> FileRows:
        """One of its rows."""
        return FileRows(self.file, self.numbers[place : place + 1], self.rows.slice(place, 1))

    def refused(self, sqlstate: str | None, error: str) -> RefusedRow:
        """Its one row, as a refused one."""
        text = json.dumps(self.rows.to_pylist()[0], default=str, ensure_ascii=True)[:ROW_TEXT_MAX]
        return RefusedRow(self.file, int(self.numbers[0]), text, sqlstate, storable_text(error))


def prepared_parts(
    directory: str, files: Sequence[PreparedFile], columns: Sequence[str] | None = None, *, superseded: bool = False
) -> Iterator[FileRows]:
    """The rows of prepared files, file by file in path order, or those that are `superseded` by a later one of their key."""
    for file in sorted(files, key=lambda f: f.path):
        with open_prepared(directory, file) as prepared:
            at = 0 if superseded else prepared.superseded
            for batch in prepared.batches(columns, superseded=superseded):
                yield FileRows.at(file.path, at, batch)
                at += batch.num_rows


class GroupsRefused(SinkRefused):
    """The table refuses `rows` of a transaction `of_groups`, each of which names its messages. Nothing was written."""

    rows: tuple[RefusedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """All rows of a transaction in an order: `row` has the place of each, and `begins` where in it each unit of rows begins
    that are taken or refused together, and where the last one ends.
    """

    row: Rows
    begins: Rows


class RowMessages:
    """The messages of each row of a transaction's prepared files, as pairs of a row and a message.

    Rows are counted through the files in path order, `superseded` ones among them. A row that stands for messages which are
    not known one by one is `unnamed`; so is every row where a file is without `MESSAGE_COLUMNS`.
    """

    def __init__(self, directory: str, files: Sequence[PreparedFile]) -> None:
        self.starts: dict[str, int] = {}
        superseded = list[npt.NDArray[np.bool_]]()
        rows, numbers, origins, unnamed = list[Rows](), list[Rows](), list[Rows](), list[npt.NDArray[np.bool_]]()
        self.rows, names_all = 0, True
        for file in sorted(files, key=lambda f: f.path):
            self.starts[file.path] = first = self.rows
            for batch in _message_columns(os.path.join(directory, file.path)):
                found = pairs_of(batch)
                names_all &= batch.num_columns > 1 or not batch.num_rows
                rows.append(found[0] + self.rows)
                numbers.append(found[1])
                origins.append(found[2])
                unnamed.append(found[3])
                self.rows += batch.num_rows
            superseded.append(np.arange(self.rows - first) < self.rows - first - file.rows)
        self.superseded: npt.NDArray[np.bool_] = np.concatenate(superseded) if superseded else np.empty(0, np.bool_)
        self.row = _joined(rows)
        self.number = _joined(numbers)
        self.origin = _joined(origins)
        self.unnamed: npt.NDArray[np.bool_] = np.concatenate(unnamed) if unnamed else np.empty(0, np.bool_)
        self.unnamed |= not names_all  # the messages of the others may have rows in such a file

    def place(self, file: str, row: int) -> int:
        """The place of a file's row among all rows."""
        return self.starts[file] + row

    def of_row(self, place: int) -> tuple[tuple[int, int], ...]:
        """Number and origin of each message of a row."""
        start, stop = np.searchsorted(self.row, [place, place + 1])
        return tuple(zip(self.number[start:stop].tolist(), self.origin[start:stop].tolist(), strict=True))

    def order(self, *, apart: bool) -> Order:
        """The rows message by message. Messages that share a row are put together, where the last of them is; so are rows
        that stand for several messages, unless each is `apart`. Rows without a message are apart, and first.
        """
        _, number = np.unique(self.number, return_inverse=True)
        last = np.full(self.rows, -1, np.int64)  # of each row, and then of all that must go with it
        of_number = np.arange(len(number))
        while True:
            np.maximum.at(last, self.row, of_number[number])
            before = of_number.copy()
            np.maximum.at(of_number, number, last[self.row])
            if np.array_equal(before, of_number):
                break
        alone = np.ones(self.rows, np.bool_) if apart else ~self.unnamed
        alone[self.row] = False
        last[alone] = np.arange(-1 - np.count_nonzero(alone), -1)
        row = np.argsort(last, kind="stable")
        begins = np.flatnonzero(np.diff(last[row], prepend=np.iinfo(np.int64).min))
        return Order(row, np.append(begins, self.rows))

    def rows_of(self, messages: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Which rows have one of these messages."""
        found = np.zeros(self.rows, np.bool_)
        found[self.row[np.isin(self.number, np.fromiter(messages, np.int64))]] = True
        return found

    def messages_of(self, rows: npt.NDArray[np.bool_]) -> set[int]:
        """The messages of these rows."""
        return set(self.number[rows[self.row]].tolist())


class Rejects:
    """What one commit leaves out.

    It may reject `most` messages; with None the first refused row refuses the transaction. `row_by_row`: a row whose
    messages are not known is given up alone, too. The table takes `columns`; without them, all. `undecided` are the columns
    that do not tell which row of a key is the latest (`sinks.rows.by_key`).
    """

    def __init__(
        self,
        directory: str,
        transaction: PreparedTransaction,
        most: int | None,
        where: str,
        input_: SinkInput,
        columns: Sequence[str] | None = None,
        *,
        undecided: Sequence[str] = (),
        row_by_row: bool = False,
    ) -> None:
        self._directory = directory
        self._files = transaction.files
        self._keys, self._compared = input_.keys, compared_columns(input_, undecided)
        self._columns = columns
        self._messages = RowMessages(directory, transaction.files)
        self._most = most
        self._where = where
        self._row_by_row = row_by_row
        self.of_groups = transaction.of_groups
        """Whether the rows are groups."""
        self._refused: dict[int, RefusedRow] = {}
        self._alone: set[int] = set()
        self._given = np.zeros(self._messages.rows, np.bool_)
        self.messages: set[int] = set()
        """The messages that are rejected so far."""
        self._misfits: tuple[RefusedRow, ...] = ()
        self._begin(Misfits.of(transaction.files))

    def _begin(self, misfits: Misfits) -> None:
        """Reject the messages of rows that tasks left out already, since their columns cannot hold them."""
        if not misfits:
            return
        if misfits.unnamed and not self._row_by_row:
            self._raise_unnamed(misfits.unnamed[0])
        self._misfits = misfits.all
        if self.of_groups:
            return
        self.messages |= {number for row in misfits.rows for number, _ in row.messages}
        self._require_few(self._misfits[-1])
        if misfits.more:
            raise SinkRefused(
                f"{self._where}: rows of so many messages do not fit their columns that they are not named; the first: "
                f"{self._misfits[0].error}. Nothing was written",
                problem=SinkProblem.TOO_MANY_REJECTS,
                rejects_max=self._most,
            )

    def order(self) -> Order:
        """In which order the rows come, and which of them are refused together: see `RowMessages.order`. The rows of groups
        have no order, and each is refused by itself.
        """
        if self.of_groups:
            return Order(np.arange(self._messages.rows), np.arange(self._messages.rows + 1))
        return self._messages.order(apart=self._row_by_row)

    def is_full(self, refused: int) -> bool:
        """Whether so many messages more are more than may be rejected."""
        return self._most is None or len(self.messages) + refused > self._most

    def all(self) -> Iterator[tuple[FileRows, Rows]]:
        """Every row of the files, superseded ones among them, with their places. None of them is to be reinstated later."""
        self._given[:] = True
        for superseded in (False, True):
            for part in prepared_parts(self._directory, self._files, self._columns, superseded=superseded):
                yield part, self._messages.starts[part.file] + part.numbers

    @property
    def superseded(self) -> npt.NDArray[np.bool_]:
        """Which rows a later one of their file supersedes, by their places."""
        return self._messages.superseded

    def take_back(self, places: Rows) -> None:
        """These superseded rows stay so, though `all` gave them."""
        self._given[places] = False

    def kept(self) -> Iterator[FileRows]:
        """The rows that are not left out by now, and then those that take the place of one that is left out by then."""
        self._given[:] = False
        out = self.left_out()
        for part in prepared_parts(self._directory, self._files, self._columns):
            yield from self._given_of(part, ~out)
        while len(next_ := self._next()):
            wanted = np.zeros(self._messages.rows, np.bool_)
            wanted[next_] = True
            for part in prepared_parts(self._directory, self._files, self._columns, superseded=True):
                yield from self._given_of(part, wanted)

    @property
    def reinstated(self) -> int:
        """How many superseded rows have taken a later one's place, or are left out themselves."""
        return int(np.count_nonzero(self._messages.superseded & (self._given | self.left_out())))

    def _given_of(self, part: FileRows, wanted: npt.NDArray[np.bool_]) -> Iterator[FileRows]:
        places = self._messages.starts[part.file] + part.numbers
        kept = wanted[places]
        if kept.any():
            self._given[places[kept]] = True
            yield part if kept.all() else part.only(kept)

    def _next(self) -> Rows:
        """The places of the rows that are to take the place of one that is left out, and were not given yet."""
        if not self._messages.superseded.any():
            return np.empty(0, np.int64)
        out = self.left_out()
        row, head = self._queues
        waiting = out[head] & ~out[row]
        _, first = np.unique(head[waiting], return_index=True)
        found: Rows = row[waiting][first]
        return found[~self._given[found]]

    @cached_property
    def _queues(self) -> tuple[Rows, Rows]:
        """The places of superseded rows, key by key and the later ones first; beside each that of its key's latest row."""
        keys, compared = self._keys, self._compared
        heads, head_places = self._rows_of(keys, superseded=False)
        others, places = self._rows_of(sorted({*keys, *compared}), superseded=True)
        found = queues_of(heads, others, keys, compared)
        return places[found.row], head_places[found.behind]

    def _rows_of(self, columns: Sequence[str], *, superseded: bool) -> tuple[pa.Table, Rows]:
        parts = list(prepared_parts(self._directory, self._files, columns, superseded=superseded))
        places = [self._messages.starts[part.file] + part.numbers for part in parts]
        return pa.Table.from_batches([part.rows for part in parts]), _joined(places)

    def add(self, row: RefusedRow) -> None:
        """Reject the messages of a refused row.

        Raises:
            SinkRefused: that is more than may be rejected, or the row's messages are not known.
        """
        place = self._messages.place(row.file, row.row)
        # Of a group given up alone the messages have parts in other groups, which stay.
        named = () if self.of_groups and self._row_by_row else self._messages.of_row(place)
        self._refused[place] = replace(row, messages=named)
        if self._messages.unnamed[place] and not self._row_by_row:
            self._raise_unnamed(row)
        if self.of_groups and named:
            return
        if self._messages.unnamed[place] or not named:
            self._alone.add(place)
        else:
            self.messages |= {number for number, _ in named}
        self._require_few(row)

    def _raise_unnamed(self, row: RefusedRow) -> NoReturn:
        raise SinkRefused(
            f"{self._where}: the table refuses a row that stands for several messages, or for a whole micro-batch, "
            "or that was prepared before the table had the rule: "
            f"{_reason(row)}: {row.text}. Nothing was written",
            problem=SinkProblem.MESSAGES_UNKNOWN,
            sqlstate=row.sqlstate,
            row=row.text,
        )

    def close(self) -> bool:
        """Add the messages that share rows with rejected ones.

        Returns whether the table is to be given all again: rows go that `kept` gave and it took, or others take their place.

        Raises:
            GroupsRefused: a row of a transaction `of_groups` was refused.
            SinkRefused: that is more than may be rejected, or a row that must go has messages that are not known.
        """
        if not self._refused and not self._misfits:
            return False
        last = next(reversed([*self._misfits, *self._refused.values()]))
        rows = tuple(row for row in (*self._misfits, *self._refused.values()) if row.messages)
        if self.of_groups and rows and not self._row_by_row:
            refused = GroupsRefused(
                f"{self._where}: the table refuses {len(rows)} rows of groups, the last for: {last.error}: "
                f"{last.text[:200]}. Nothing was written",
                sqlstate=last.sqlstate,
                row=last.text,
            )
            refused.rows = rows
            raise refused
        known = -1
        while known != len(self.messages):
            known = len(self.messages)
            self.messages |= self._messages.messages_of(self._messages.rows_of(self.messages))
        self._require_few(last)
        out = self.left_out()
        unnamed = out & self._messages.unnamed
        unnamed[list(self._alone)] = False
        if unnamed.any():
            raise SinkRefused(
                f"{self._where}: the table refuses a row ({last.error}: {last.text}) of a message that has a part in rows "
                "which stand for several messages. Nothing was written",
                problem=SinkProblem.MESSAGES_UNKNOWN,
                sqlstate=last.sqlstate,
                row=last.text,
            )
        if int(out.sum()) > LEFT_OUT_MAX:
            raise SinkRefused(
                f"{self._where}: the messages whose rows are refused have more than {LEFT_OUT_MAX} rows; nothing was "
                "written",
                sqlstate=last.sqlstate,
            )
        taken = out & self._given
        taken[list(self._refused)] = False
        return bool(taken.any()) or len(self._next()) > 0

    def rows(self) -> tuple[RefusedRow, ...]:
        """Every row of the files that is left out, in their order."""
        out = self.left_out()
        found = dict(self._refused)
        out[list(found)] = False
        if out.any():
            reasons: dict[int, RefusedRow] = {}
            causes = [*self._misfits, *found.values()]
            for row in causes:
                for number, _ in row.messages:
                    reasons.setdefault(number, row)
            some = causes[0]
            for superseded in (False, True):
                for part in prepared_parts(self._directory, self._files, superseded=superseded):
                    first = self._messages.starts[part.file]
                    for at in np.flatnonzero(out[first + part.numbers]).tolist():
                        place = first + int(part.numbers[at])
                        named = self._messages.of_row(place)
                        cause = next((reasons[number] for number, _ in named if number in reasons), some)
                        text = f"left out with a row of its message that is refused: {cause.error}"
                        refused = part.row(at).refused(cause.sqlstate, text)
                        found[place] = replace(refused, messages=named, goes_with_others=True)
        return tuple(found[place] for place in sorted(found))

    def left_out(self) -> npt.NDArray[np.bool_]:
        """Which rows are left out by now, by their places."""
        out = self._messages.rows_of(self.messages)
        out[list(self._alone)] = True
        return out

    def _require_few(self, row: RefusedRow) -> None:
        if self._most is None:
            raise SinkRefused(
                f"{self._where}: the table refuses a row, and nothing was written: {row.error}: {row.text[:200]}",
                sqlstate=row.sqlstate,
            )
        if len(self.messages) + len(self._alone) > self._most:
            raise SinkRefused(
                f"{self._where}: the table refuses the rows of more than {self._most} messages, which is more than may be "
                f"rejected (rejects_max_share); the last for: {row.error}: {row.text[:200]}. Nothing was written"
                f"{_LATER_PARENTS if row.sqlstate == NO_PARENT else ''}",
                problem=SinkProblem.TOO_MANY_REJECTS,
                sqlstate=row.sqlstate,
                rejects_max=self._most,
            )


def _reason(row: RefusedRow) -> str:
    return row.error if row.sqlstate is None else f"SQLSTATE {row.sqlstate}: {row.error}"


def _message_columns(path: str) -> Iterator[pa.RecordBatch]:
    """The message columns of a prepared file; without columns, where its writer named no messages."""
    with files_at(path).open_native(path) as opened, pq.ParquetFile(opened) as parquet:
        if MESSAGE_COLUMNS.names[0] not in parquet.schema_arrow.names:
            yield pa.RecordBatch.from_arrays([pa.nulls(parquet.metadata.num_rows)], names=["unnamed"])
            return
        yield from parquet.iter_batches(batch_size=64 * 1024, columns=MESSAGE_COLUMNS.names)


def _joined(parts: Sequence[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
