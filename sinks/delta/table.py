"""What a Delta table must be for us to write to it: its columns' types, its protocol, its settings."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, Schema

from stormproof.core.errors import SinkRefused, TopologyError
from stormproof.core.sink import SinkInput
from stormproof.sinks.limits import ColumnLimit, Limits

CHECKPOINT_INTERVAL: Final = 100
"""Delta's default of 10 writes the table's whole state at every tenth commit, which is too often for small batches."""

_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "checkConstraints",
        "changeDataFeed",
    }
)
_FEATURES_APPEND: Final = _FEATURES | {"deletionVectors"}


def check_types(schema: pa.Schema, where: str) -> None:
    """Raise TopologyError for a column that no Delta table can hold."""
    for field in schema:
        kind = field.type
        if pa.types.is_timestamp(kind) and kind.unit != "us":
            raise TopologyError(f"{where}: column {field.name!r} is {kind}; Delta holds microseconds: timestamp[us]")
        try:
            Schema.from_arrow(pa.schema([field]))
        except Exception as error:
            raise TopologyError(
                f"{where}: column {field.name!r} is {kind}, which Delta cannot hold: {error}"
            ) from error
        if pa.types.is_unsigned_integer(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
            raise TopologyError(f"{where}: column {field.name!r} is {kind}, which Delta cannot hold")


def require_table(table: DeltaTable, input_: SinkInput, where: str) -> None:
    """Refuse a table that cannot hold such rows, or to which this committer cannot write safely.

    Raises:
        SinkRefused: names the column and both types, the feature, or the setting.
    """
    _require_columns(table, input_, where)
    _require_features(table, input_, where)
    _require_settings(table, input_, where)


def column_limits(table: DeltaTable, input_: SinkInput) -> Limits:
    """What the writer stage checks: keys and NOT NULL columns hold no NULL."""
    required = {f.name for f in table.schema().fields if not f.nullable} | set(input_.keys)
    return Limits(tuple(ColumnLimit(f.name, str(f.type), not_null=f.name in required) for f in input_.schema))


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


def _require_features(table: DeltaTable, input_: SinkInput, where: str) -> None:
    protocol = table.protocol()
    wanted = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    unknown = sorted(wanted - (_FEATURES if input_.is_by_key else _FEATURES_APPEND))
    if unknown or protocol.min_reader_version > 3 or protocol.min_writer_version > 7:
        raise SinkRefused(
            f"{where}: the table needs {', '.join(unknown) or 'a newer protocol'} (reader "
            f"{protocol.min_reader_version}, writer {protocol.min_writer_version}), which this committer does not "
            "write; use another table",
            features=list(unknown),
        )


def _require_settings(table: DeltaTable, input_: SinkInput, where: str) -> None:
    metadata = table.metadata()
    settings = metadata.configuration
    reason: str | None = None
    if metadata.partition_columns:
        reason = f"is partitioned by {', '.join(metadata.partition_columns)}; partitioned tables are not supported yet"
    elif settings.get("delta.setTransactionRetentionDuration"):
        reason = "has delta.setTransactionRetentionDuration set, which forgets what was applied; unset it"
    elif settings.get("delta.columnMapping.mode", "none") != "none":
        reason = "has column mapping on, so prepared files would not have its columns' physical names"
    elif input_.is_by_key and settings.get("delta.appendOnly") == "true":
        reason = "is append-only, and a fold changes rows"
    elif input_.is_by_key and settings.get("delta.enableChangeDataFeed") == "true":
        reason = "has its change data feed on, which a fold does not write yet"
    elif not input_.is_by_key and any(key.startswith("delta.constraints.") for key in settings):
        reason = "has CHECK constraints, which adopted files would not be checked against"
    else:
        reason = next(
            (
                f"has column {field.name!r} with {key}, which adopted files and merges would not honour"
                for field in table.schema().fields
                for key in field.metadata
                if key in ("delta.generationExpression", "delta.invariants") or key.startswith("delta.identity.")
            ),
            None,
        )
    if reason is not None:
        raise SinkRefused(f"{where}: the table {reason}")
