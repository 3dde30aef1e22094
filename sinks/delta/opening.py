"""How a Delta table is opened: torn log entries are put aside, a missing table is made, its folders are synced; and how it
follows its rows' schema: columns are added, in a version of its own before the batch that needs them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures
from deltalake.exceptions import DeltaError, TableNotFoundError

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.sinks.contract.protocol import SinkIdentity, SinkProblem
from stormproof.sinks.contract.row_rule import Change
from stormproof.sinks.delta.bounds import WITH_STATISTICS, by_delta_rs, narrowed
from stormproof.sinks.delta.claims import properties_of
from stormproof.sinks.delta.delta_rs import is_table, may_pass, panics_as_errors, require_conditional_put, shown
from stormproof.sinks.delta.features import TableFacts, choose, refusal
from stormproof.sinks.delta.log import DeltaLog, LogEntry
from stormproof.sinks.delta.newest_version import entry_of
from stormproof.sinks.delta.power_loss import put_torn_aside
from stormproof.sinks.delta.table import CHECKPOINT_INTERVAL


@contextmanager
def opening(where: str, log: DeltaLog, mode: SinkMode) -> Generator[str]:
    """Around code that opens the table: turns errors of delta-rs and of the file system into ours, which name `where`.

    Raises:
        SinkRefused: there is no table, or it has a feature that delta-rs cannot read.
        StoreUnavailable: it cannot be opened.
    """
    try:
        with panics_as_errors():
            yield where
    except TableNotFoundError as error:
        raise SinkRefused(
            f"{where}: there is no Delta table: {shown(error)}", problem=SinkProblem.TABLE_GONE
        ) from error
    except (DeltaError, OSError) as error:
        refused = (
            choose(TableFacts(log.protocol_features(), {}, {}), mode).refused if isinstance(error, DeltaError) else ()
        )
        if refused:
            raise SinkRefused(
                f"{where}: {refusal(refused[0], mode)}", features=[found.feature.name for found in refused]
            ) from error
        raise StoreUnavailable(f"{where}: the table cannot be opened: {shown(error)}") from error


def prepare_table(
    path: str,
    identity: SinkIdentity,
    input_: SinkInput,
    where: str,
    *,
    create: bool,
    partitions: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> None:
    """Put a torn log entry aside, make the table if it is missing and `create`, and sync its folders.

    A table that is made has these `partitions`, and these `settings` among its properties.

    Raises:
        SinkRefused: the table is missing and not to be made, or a power loss took more than its newest log entry.
    """
    put_torn_aside(DeltaLog(path), where)
    require_conditional_put(path, where)
    if not is_table(path):
        if not create:
            raise SinkRefused(f"{where}: there is no Delta table", problem=SinkProblem.TABLE_GONE)
        _create(path, identity, input_, partitions, settings or {}, where)
    files_at(path).settle_folder(path)


def _create(
    path: str,
    identity: SinkIdentity,
    input_: SinkInput,
    partitions: Sequence[str],
    settings: Mapping[str, str],
    where: str,
) -> None:
    files, log = files_at(path), DeltaLog(path)
    refused = choose(TableFacts.of_new(input_, partitions, settings), input_.mode).refused
    if refused:
        raise SinkRefused(f"{where}: {refusal(refused[0], input_.mode)}", features=[f.feature.name for f in refused])
    files.make_folder(path)
    ours = {"delta.checkpointInterval": str(CHECKPOINT_INTERVAL), **settings, **properties_of(identity)}
    if input_.is_by_key and (columns := narrowed(input_.schema, partitions, ours, by_delta_rs)) is not None:
        ours[WITH_STATISTICS] = columns
    try:
        with tempfile.TemporaryDirectory(prefix="stormproof-make-") as folder:
            DeltaTable.create(
                folder,
                Schema.from_arrow(input_.schema.empty_table().schema),
                partition_by=[*partitions],
                configuration=ours,
                raise_if_key_not_exists=False,
            )
            entry = _first_entry(folder)
    except DeltaError as error:
        if may_pass(error) or not (settings or partitions):
            raise
        raise SinkRefused(
            f"{where}: delta-rs cannot make such a table: {shown(error)}; make it with Spark, or name other properties and "
            "partitions"
        ) from error
    files.make_folder(log.folder)
    with suppress(FileExistsError):  # another one made it
        files.put_new(log.entry_path(0), entry)
    files.sync(log.entry_path(0))
    files.sync_folder(log.folder)
    files.sync_folder(path)


def _first_entry(folder: str) -> bytes:
    """The log entry of the table that delta-rs made in a folder, with a protocol by which every reader can read it.

    Where its protocol lists features, delta-rs leaves out that of NOT NULL, without which Spark does not read the table. It
    lists that of variants, which no table of ours has, beside deletion vectors.
    """
    with open(DeltaLog(folder).entry_path(0), "rb") as made:
        actions = [json.loads(line) for line in made]
    protocol = next(action["protocol"] for action in actions if "protocol" in action)
    if "writerFeatures" in protocol:
        protocol["writerFeatures"] = sorted({*protocol["writerFeatures"], "invariants"} - {"variantType"})
        protocol["readerFeatures"] = sorted({*protocol["readerFeatures"]} - {"variantType"})
    return entry_of("CREATE TABLE", {}, [action for action in actions if "commitInfo" not in action], {})


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
    return [str(Change(f.name, None, str(getattr(f.type, "type", f.type)))) for f in fields]


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
