"""How a Delta table is opened: torn log entries are put aside, a missing table is made, its folders are synced."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress

from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.core.sink import SinkInput, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.sinks.delta.bounds import WITH_STATISTICS, by_delta_rs, narrowed
from stormproof.sinks.delta.claims import properties_of
from stormproof.sinks.delta.entries import entry_of
from stormproof.sinks.delta.failures import may_pass, panics_as_errors, shown
from stormproof.sinks.delta.features import TableFacts, choose, refusal
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.power_loss import put_torn_aside
from stormproof.sinks.delta.stores import is_table, require_conditional_put
from stormproof.sinks.delta.table import CHECKPOINT_INTERVAL
from stormproof.sinks.protocol import SinkIdentity, SinkProblem


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
