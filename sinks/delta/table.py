"""What a Delta table must be for us to write to it: its columns' types, its protocol, its settings."""

from __future__ import annotations

from typing import Final

from deltalake import DeltaTable, Schema

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta.features import Committer, TableFacts, choose, refusal
from stormproof.sinks.limits import ColumnLimit, Limits

CHECKPOINT_INTERVAL: Final = 100
"""Delta's default of 10 writes the table's whole state at every tenth commit, which is too often for small batches."""


def require_table(table: DeltaTable, input_: SinkInput, where: str) -> Committer:
    """Refuse a table that cannot hold such rows, or to which nobody writes them safely; returns who is to write.

    Raises:
        SinkRefused: names the column and both types, or the feature, and what to do.
    """
    _require_columns(table, input_, where)
    return _require_features(table, input_, where)


def column_limits(table: DeltaTable, input_: SinkInput) -> Limits:
    """What the writer stage checks: keys, columns of `order_by` and NOT NULL columns hold no NULL, text by which a
    table is partitioned is not empty.
    """
    required = {f.name for f in table.schema().fields if not f.nullable} | {*input_.keys, *input_.order_by}
    partitions = set(table.metadata().partition_columns)
    return Limits(
        tuple(
            ColumnLimit(
                f.name,
                "a partition column" if f.name in partitions else str(f.type),
                not_null=f.name in required,
                no_empty=f.name in partitions,
            )
            for f in input_.schema
        )
    )


def _require_columns(table: DeltaTable, input_: SinkInput, where: str) -> None:
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
    for name, field in there.items():
        if not field.nullable:
            raise SinkRefused(
                f"{where}: the table's column {name!r} is NOT NULL, and the rows do not have it", column=name
            )


def _type_name(kind: object) -> str:
    return str(getattr(kind, "type", kind))


def _require_features(table: DeltaTable, input_: SinkInput, where: str) -> Committer:
    choice = choose(TableFacts.of(table), input_.mode)
    if choice.refused:
        raise SinkRefused(
            f"{where}: {refusal(choice.refused[0], input_.mode)}",
            features=[found.feature.name for found in choice.refused],
        )
    if choice.needs_spark:
        raise SinkRefused(
            f"{where}: the table has {'; '.join(f.text for f in choice.needs_spark)}, which delta-rs does not write",
            features=[f.feature.name for f in choice.needs_spark],
        )
    return choice.committer
