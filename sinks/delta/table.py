"""What a Delta table must be for us to write to it: its columns' types, its protocol, its settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Final

from deltalake import DeltaTable, Field, Schema

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput
from stormproof.core.storage.address import is_url
from stormproof.sinks.delta.checks import dividing
from stormproof.sinks.delta.features import (
    DEFAULT,
    GENERATED,
    IDENTITY,
    TEXT_TYPE,
    AskedCommitter,
    Committer,
    TableFacts,
    characters_max,
    choose,
    refusal,
)
from stormproof.sinks.delta.head import TableHead
from stormproof.sinks.limits import ColumnLimit, Limits
from stormproof.sinks.lineage import require_lineage_takes_null

FOLDER_NAME_BYTES_MAX: Final = 255
PATH_BYTES_MAX: Final = 4_096
OBJECT_KEY_BYTES_MAX: Final = 1_024
FILE_NAME_BYTES: Final = 100
"""The longest names that file systems and object stores take, and what the name of a table's file takes, with a margin."""

CHECKPOINT_INTERVAL: Final = 100
"""Delta's default of 10 writes the table's whole state at every tenth commit, which is too often for small batches."""


def require_table(table: TableHead, input_: SinkInput, where: str, asked: AskedCommitter = "auto") -> Committer:
    """Refuse a table that cannot hold such rows, or to which nobody writes them safely; returns who is to write.

    `asked` is who shall write: "auto" is delta-rs where it can.

    Raises:
        SinkRefused: names the column and both types, or the feature, and what to do.
    """
    _require_columns(table, input_, where)
    return _require_features(table, input_, where, asked)


def committer_of(table: TableHead, input_: SinkInput, asked: AskedCommitter) -> Committer:
    """Who is to write to the table; it may refuse the rows all the same."""
    return choose(TableFacts.of(table, input_.mode), input_.mode).committer if asked == "auto" else Committer(asked)


def require_plain_files(table: TableHead, where: str) -> None:
    """Refuse a table whose files do not have all of its columns: a map reads the files as they are.

    Raises:
        SinkRefused: names the partition columns.
    """
    columns = table.metadata().partition_columns
    if columns:
        raise SinkRefused(
            f"{where}: the table is partitioned by {', '.join(columns)}, and a map reads no partitions; use another table"
        )


def require_more_than_partitions(table: DeltaTable, input_: SinkInput, where: str) -> None:
    """Refuse rows of partition columns alone: a file without a column holds no row. Spark says so at the commit.

    Raises:
        SinkRefused: names the partition columns.
    """
    columns = table.metadata().partition_columns
    if not input_.is_by_key and set(input_.schema.names) <= set(columns):
        raise SinkRefused(
            f"{where}: the table is partitioned by {', '.join(columns)}, and the rows have no other column: a file "
            "of such a table could hold no row of them. Give the rows one more column of the table",
            columns=[*columns],
        )


def column_limits(table: DeltaTable, input_: SinkInput, address: str) -> Limits:
    """What the writer stage checks: keys, columns of `order_by` and NOT NULL columns hold no NULL, text is no longer than
    its `varchar(n)`, and text by which a table is partitioned fits a file's path.
    """
    fields = table.schema().fields
    lengths = {f.name: characters_max(f.metadata.get(TEXT_TYPE)) for f in fields}
    return _limits(
        input_, {f.name for f in fields if not f.nullable}, table.metadata().partition_columns, lengths, address
    )


def limits_of_new(input_: SinkInput, partitions: Sequence[str], address: str) -> Limits:
    """The same for a table that is made for such rows."""
    return _limits(input_, {f.name for f in input_.schema if not f.nullable}, partitions, {}, address)


def _limits(
    input_: SinkInput,
    not_null: Set[str],
    partitions: Collection[str],
    lengths: Mapping[str, int | None],
    address: str,
) -> Limits:
    required = {*not_null, *input_.keys, *input_.order_by}
    return Limits(
        tuple(
            ColumnLimit(
                f.name,
                "a partition column" if f.name in partitions else str(f.type),
                not_null=f.name in required,
                path_bytes_max=_path_share(f.name, address, len(partitions)) if f.name in partitions else None,
                chars_max=lengths.get(f.name),
            )
            for f in input_.schema
        )
    )


def _path_share(name: str, address: str, partitions: int) -> int:
    """How many bytes a partition column's value may take: a folder's name ``name=value`` 255, and the whole path of a file,
    or the key of an object, what the system takes.
    """
    whole = OBJECT_KEY_BYTES_MAX if is_url(address) else PATH_BYTES_MAX
    folder = (whole - len(address.encode()) - FILE_NAME_BYTES) // partitions - 1
    return min(FOLDER_NAME_BYTES_MAX, folder) - len(name.encode()) - 1


def _require_columns(table: TableHead, input_: SinkInput, where: str) -> None:
    there = {f.name: f for f in table.schema().fields}
    for asked in Schema.from_arrow(input_.schema).fields:
        found = there.pop(asked.name, None)
        if found is None:
            raise SinkRefused(f"{where}: the table has no column {asked.name!r}", column=asked.name)
        if found.type != asked.type:
            raise SinkRefused(
                f"{where}: column {asked.name!r} is {_type_name(found.type)} in the table and "
                f"{_type_name(asked.type)} in the rows",
                column=asked.name,
                table_type=_type_name(found.type),
                rows_type=_type_name(asked.type),
            )
    require_lineage_takes_null(input_, {f.name for f in table.schema().fields if not f.nullable}, where)
    for name, field in there.items():
        if not field.nullable and not _is_filled(field):
            raise SinkRefused(
                f"{where}: the table's column {name!r} is NOT NULL, and the rows do not have it", column=name
            )


def _is_filled(field: Field) -> bool:
    """Whether Spark fills a column that the rows do not have."""
    return any(key in (GENERATED, DEFAULT) or key.startswith(IDENTITY) for key in field.metadata)


def _type_name(kind: object) -> str:
    return str(getattr(kind, "type", kind))


def _require_features(table: TableHead, input_: SinkInput, where: str, asked: AskedCommitter) -> Committer:
    choice = choose(TableFacts.of(table, input_.mode), input_.mode)
    if choice.refused:
        raise SinkRefused(
            f"{where}: {refusal(choice.refused[0], input_.mode)}",
            features=[found.feature.name for found in choice.refused],
        )
    if choice.needs_spark and asked == "delta-rs":
        raise SinkRefused(
            f"{where}: the table has {'; '.join(f.text for f in choice.needs_spark)}, which delta-rs does not write; a sink "
            "with committer='auto' or 'spark' does",
            features=[f.feature.name for f in choice.needs_spark],
        )
    divide = dividing(table.metadata().configuration)
    if divide and asked != "spark" and choice.committer is Committer.DELTA_RS:
        raise SinkRefused(
            f"{where}: the table's CHECK constraint {divide[0]!r} divides, and delta-rs leaves out the remainder where "
            "Spark does not: it could let rows in that violate the constraint. Give DeltaSink committer='spark'",
            constraint=divide[0],
        )
    return choice.committer if asked == "auto" else Committer(asked)
