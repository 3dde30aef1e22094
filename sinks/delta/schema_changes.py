"""How a Delta table follows its rows' schema: columns are added in a version before the batch that needs them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.row_rule import SchemaChange
from stormproof.sinks.delta.log import DeltaLog, LogEntry

CHANGED_BY: Final = "stormproof.schema.application"
CHANGED_FOR: Final = "stormproof.schema.txid"
CHANGES: Final = "stormproof.schema.changes"
"""Keys of the metadata of a version that changes the schema: whose, for which txid, and what, as a JSON list of texts."""


def _lacking(table: DeltaTable, input_: SinkInput) -> list[Field]:
    there = {f.name.lower() for f in table.schema().fields}
    return [
        f
        for f in Schema.from_arrow(input_.schema.empty_table().schema).fields
        if f.name.lower() not in there and f.name not in input_.keys
    ]


def known_part(table: DeltaTable, input_: SinkInput) -> SinkInput:
    """The input without the columns that the table is going to get; all else is checked as it is."""
    lacking = {f.name for f in _lacking(table, input_)}
    schema = input_.schema
    for name in lacking:
        schema = schema.remove(schema.get_field_index(name))
    return replace(input_, schema=schema)


def changes_for(table: DeltaTable, input_: SinkInput) -> tuple[str, ...]:
    """What `add_columns` would change, each in a few words."""
    return tuple(_named(_lacking(table, input_)))


def _named(fields: list[Field]) -> list[str]:
    return [str(SchemaChange(f.name, None, str(getattr(f.type, "type", f.type)))) for f in fields]


def require_kept(table: DeltaTable, input_: SinkInput, log: DeltaLog, where: str) -> None:
    """Refuse to add columns to a table whose file format has options: delta-rs drops them.

    Raises:
        SinkRefused: names the options and the way on.
    """
    options = log.file_format(table.version())["options"] if _lacking(table, input_) else {}
    if options:
        raise SinkRefused(
            f"{where}: the table's file format has options ({', '.join(options)}), which are lost where delta-rs adds "
            f"columns; add {', '.join(changes_for(table, input_))} with ALTER TABLE"
        )


def add_columns(table: DeltaTable, input_: SinkInput, application: str, txid: int) -> bool:
    """Add the columns that the table lacks, nullable, in one version; whether the table was changed.

    May be repeated: a crash before the batch's own version leaves a table that has them. The version names the txid.
    """
    fields = [Field(f.name, f.type, nullable=True) for f in _lacking(table, input_)]
    if fields:
        table.alter.add_columns(fields, commit_properties=_changing(application, txid, _named(fields)))
    return list_not_null(table, _changing(application, txid, [])) or bool(fields)


def list_not_null(table: DeltaTable, properties: CommitProperties) -> bool:
    """List the feature of NOT NULL where the table's protocol lacks it; whether it did."""
    if lists_not_null(table):
        return False
    table.alter.add_feature(TableFeatures.Invariants, commit_properties=properties)
    return True


def lists_not_null(table: DeltaTable) -> bool:
    """Whether the protocol lists the feature of NOT NULL, where columns have it and the protocol lists features.

    A timestamp without a zone makes delta-rs list a table's features. It leaves that one out, and Spark then does not read
    the table.
    """
    listed = table.protocol().writer_features
    return not listed or "invariants" in listed or all(f.nullable for f in table.schema().fields)


def _changing(application: str, txid: int, changes: list[str]) -> CommitProperties:
    metadata = {CHANGED_BY: application, CHANGED_FOR: str(txid), CHANGES: json.dumps(changes)}
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0)


def versions_for(
    log: DeltaLog, application: str, txid: int, *, before: int, versions_max: int = 100
) -> tuple[LogEntry, ...]:
    """The versions that changed the schema for a txid whose own version is `before`, by the table's log."""
    found: list[LogEntry] = []
    for entry in log.back_from(before - 1):
        if entry.version < before - versions_max or entry.ours(application) is not None:
            break
        if entry.info.get(CHANGED_BY) == application and entry.info.get(CHANGED_FOR) == str(txid):
            found.insert(0, entry)
    return tuple(found)


def changes_of(log: DeltaLog, application: str, txid: int, *, before: int) -> tuple[str, ...]:
    """What was changed for a txid whose own version is `before`, by the table's log."""
    changing = versions_for(log, application, txid, before=before)
    return tuple(text for entry in changing for text in json.loads(entry.info[CHANGES]))
