"""How rows get into a Delta table: by adopting prepared files, or by one MERGE that upserts or folds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, QueryBuilder
from deltalake.transaction import AddAction

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import UsageError
from stormproof.core.sink import SinkInput
from stormproof.core.task.keyhash import hash_keys, is_hashable
from stormproof.sinks.content import Content
from stormproof.sinks.delta.judge import Judge
from stormproof.sinks.delta.log import SUPERSEDED, DeltaLog, Label
from stormproof.sinks.delta.newest_version import TableHead
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.delta.spark import SparkCommitter
from stormproof.sinks.merge_sql import DATAFUSION, assignments, later_condition, quoted, same_key
from stormproof.sinks.protocol import PreparedTransaction

HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Old log entries must stay until the checkpoint that replaces them is synced, so we remove them ourselves."""


class RowsToPut(Protocol):
    """The rows of a transaction: a sink has them in prepared files, a map in memory."""

    def check(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        """Check that all rows are there, and that the table can hold them.

        Raises:
            SinkRefused: rows are missing or changed, or the table cannot hold them.
        """
        ...

    def judge(
        self, table: DeltaTable, transaction: PreparedTransaction, spark: SparkCommitter | None, where: str
    ) -> Judge | None:
        """Who tells which of them the table refuses; None: nobody, and the table takes all or none.

        `spark` is who writes to it; None: delta-rs.
        """
        del table, transaction, spark, where
        return None

    def change(self, table: DeltaTable, transaction: PreparedTransaction) -> Content | None:
        """What they add to the content of a table by key, less what they replace in it; None: it is not known."""
        del table, transaction
        return None

    def put_next(self, log: DeltaLog, table: TableHead, transaction: PreparedTransaction, label: Label) -> bool:
        """Write them in the version behind `table`'s by a log entry of our own; whether that was done: see
        `newest_version.put_next`. Only rows that are appended, and that the table need not be asked about, are given to it.
        """
        del log, table, transaction, label
        return False

    def put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        """Write them to the table, in one version."""
        ...

    def put_by_spark(self, spark: SparkCommitter, transaction: PreparedTransaction, label: Label) -> None:
        """The same through Spark."""
        del spark, transaction, label
        raise UsageError(f"{type(self).__name__} are written by delta-rs alone")


def read_rows(table: DeltaTable, schema: pa.Schema, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of all rows, in the types of the schema. No statistics are gone by."""
    asked = f"SELECT {', '.join(map(quoted, names))} FROM t"
    for batch in pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(asked)):
        columns = [pc.cast(batch.column(at), schema.field(name).type) for at, name in enumerate(names)]
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema([schema.field(name) for name in names]))


def all_hashable(input_: SinkInput) -> bool:
    """Whether `rows_of_keys` can tell the keys apart."""
    return all(is_hashable(input_.schema.field(key).type) for key in input_.keys)


def rows_of_keys(table: DeltaTable, added: pa.Table, input_: SinkInput) -> pa.Table:
    """The rows whose keys `added` has; by an accident of 2^-64 others, too. The whole table is read, in bounded memory."""
    schema, keys, found = input_.schema, input_.keys, list[pa.RecordBatch]()
    wanted = np.unique(np.concatenate([hash_keys(batch, keys) for batch in added.to_batches()]))
    for batch in read_rows(table, schema, schema.names):
        hashes = hash_keys(batch, keys)
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found.append(batch.filter(pa.array(wanted[at] == hashes)))
    return pa.Table.from_batches(found, schema)


def adopt_files(table: DeltaTable, files: Sequence[AddAction], properties: CommitProperties) -> None:
    """Add files that are in the table's folder already. Without files the version holds its transaction identifier alone."""
    table.create_write_transaction(
        list(files),
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    )


def merge_rows(
    table: DeltaTable,
    rows: pa.Table | pa.RecordBatchReader,
    input_: SinkInput,
    properties: CommitProperties,
    *,
    streamed: bool = False,
) -> None:
    """MERGE rows by their keys: a column with a fold is folded, every other column is replaced; of an upsert, only where the
    added row is the later one. There must be at least one row.

    A MERGE that changes no row commits nothing, not even its transaction identifier. Then the identifier is committed by
    itself, and with it that all of the rows were superseded.
    """
    added, changed = {quoted(n): DATAFUSION.both(n)[1] for n in input_.schema.names}, assignments(input_, DATAFUSION)
    merge = table.merge(
        rows,
        same_key(input_, DATAFUSION),
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        writer_properties=written_for(table),
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    ).when_not_matched_insert(added)
    if changed:
        merge = merge.when_matched_update(changed, predicate=later_condition(input_, DATAFUSION))
    metrics = merge.execute()
    if not metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]:
        adopt_files(table, [], _with_superseded(properties, int(metrics["num_source_rows"])))


def _with_superseded(properties: CommitProperties, rows: int) -> CommitProperties:
    metadata = dict(properties.custom_metadata or {})
    before = int(metadata.get(SUPERSEDED, 0))
    return CommitProperties(
        custom_metadata={**metadata, SUPERSEDED: str(before + rows)},
        max_commit_retries=properties.max_commit_retries,
        app_transactions=properties.app_transactions,
    )
