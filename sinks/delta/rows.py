"""How rows get into a Delta table by delta-rs: by adopting files, or by one MERGE that upserts or folds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, QueryBuilder
from deltalake.transaction import AddAction

from stormproof.core.arrow_compute import pc
from stormproof.core.sink import SinkInput
from stormproof.core.task.keyhash import hash_keys, is_hashable
from stormproof.sinks.delta.log import SUPERSEDED
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.merge_sql import DATAFUSION, assignments, later_condition, quoted, same_key

HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Old log entries must stay until the checkpoint that replaces them is synced, so we remove them ourselves."""


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
