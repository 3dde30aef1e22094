"""The lineage columns of a sink: its argument `lineage`, its input with them, and a writer of rows that are one message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from stormproof.core.arguments import shown
from stormproof.core.errors import SinkRefused, TopologyError
from stormproof.core.folds import Fold
from stormproof.core.lineage import Lineage
from stormproof.core.sink import PreparedFile, SinkInput, SinkMode, SinkWriter, TaskContext, TaskWriter


def given_lineage(where: str, lineage: Lineage | bool) -> Lineage | None:
    """Check a sink's argument.

    Raises:
        TopologyError: it is neither, or names no column, one that is no name, or one name twice.
    """
    if isinstance(lineage, bool):
        return Lineage() if lineage else None
    if not isinstance(lineage, Lineage):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{where}: lineage={shown(lineage)}: use True, or Lineage(txid='_txid', message='_message_id')",
            argument="lineage",
        )
    names = [name for name in (lineage.txid, lineage.message) if name is not None]
    wrong = [name for name in names if not isinstance(name, str) or not name]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or len({name.lower() for name in names}) < len(names) or not names:
        what = f"{shown(wrong[0])} is no column's name" if wrong else "name one or two columns, each by its own name"
        raise TopologyError(f"{where}: lineage: {what}", argument="lineage")
    return lineage


def with_lineage(rows: SinkInput, lineage: Lineage | None, where: str) -> SinkInput:
    """What becomes of rows that are stored with these columns.

    Raises:
        TopologyError: the rows have a column of such a name, an upsert names one, or the rows of a fold are to name their
            message.
    """
    if lineage is None:
        return rows
    added = lineage.columns
    there = {name.lower(): name for name in rows.schema.names}
    same = [there[name.lower()] for name in added.names if name.lower() in there]
    if same:
        raise TopologyError(
            f"{where}: the rows have a column {same[0]!r} of their own: name the lineage columns otherwise, with "
            "lineage=Lineage(txid=..., message=...)",
            field=same[0],
        )
    marker = [] if rows.delete_when is None else [rows.delete_when]
    for name in (*rows.keys, *rows.order_by, *marker, *rows.keep):
        if name in added.names:
            raise TopologyError(
                f"{where}: {name!r} is a lineage column, which says who wrote a row and nothing of the row: it can be no "
                "key, order, delete marker or kept column. Name a column of the rows",
                field=name,
            )
    folds = dict(rows.folds)
    if rows.mode is SinkMode.FOLD:
        if lineage.message is not None:
            raise TopologyError(
                f"{where}: a row of a fold is made of many messages, so column {lineage.message!r} can name none; store the "
                "txid of its last change alone, with lineage=Lineage(message=None)",
                field=lineage.message,
            )
        folds.update(dict.fromkeys(added.names, Fold.MAX))  # txids only rise: the greatest is the last change's
    return replace(rows, schema=pa.schema([*rows.schema, *added]), folds=folds, lineage=lineage)


def require_lineage_takes_null(input_: SinkInput, not_null: Collection[str], where: str) -> None:
    """Refuse a table whose column for messages' ids takes no NULL: rows of several messages have none.

    Raises:
        SinkRefused: names the column.
    """
    if input_.lineage is not None and input_.lineage.message in not_null:
        raise SinkRefused(
            f"{where}: the table's column {input_.lineage.message!r} is NOT NULL, and a row that no single message made has "
            "no message id. Drop the column's NOT NULL, or store the txid alone, with lineage=Lineage(message=None)",
            column=input_.lineage.message,
        )


@dataclass(frozen=True, slots=True)
class OneMessageWriter:
    """A writer of rows that are all of one message, such as a micro-batch's: it adds the lineage columns to them."""

    of: SinkWriter
    lineage: Lineage
    message: str

    @property
    def sink(self) -> str:
        """The sink's name."""
        return self.of.sink

    @property
    def names_messages(self) -> bool:
        """As the other writer."""
        return self.of.names_messages

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that the other writer refuses."""
        return self.of.check(rows)

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        task = self.of.open_task(context, pa.schema([*schema, *self.lineage.columns]))
        return _WithLineage(task, self._added(context.txid))

    def _added(self, txid: int) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        def added(rows: pa.RecordBatch) -> pa.RecordBatch:
            ids = pa.scalar(self.message, pa.string())
            return self.lineage.added_to(rows, txid, lambda: pa.repeat(ids, rows.num_rows))

        return added

    def files_in(self) -> str | None:
        """The folder of the other writer."""
        return self.of.files_in()

    def resource(self) -> object | None:
        """That of the other writer."""
        return self.of.resource()


class _WithLineage:
    def __init__(self, task: TaskWriter, added: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        self._task, self._added = task, added

    def write(self, rows: pa.RecordBatch) -> None:
        self._task.write(self._added(rows))

    def close(self) -> Sequence[PreparedFile]:
        return self._task.close()

    def discard(self) -> None:
        self._task.discard()


def one_message_writer(writer: SinkWriter, input_: SinkInput, message: str) -> SinkWriter:
    """The writer, with lineage columns where the sink stores them."""
    return writer if input_.lineage is None else OneMessageWriter(writer, input_.lineage, message)
