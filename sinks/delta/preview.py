"""What a start would do with a Delta table: the table is read, and neither its folder nor its log is touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deltalake import Schema

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput
from stormproof.core.storage.address import is_url
from stormproof.core.storage.local_files import NOWHERE
from stormproof.sinks.delta.claims import other_claims
from stormproof.sinks.delta.evolve import changes_for, known_part
from stormproof.sinks.delta.features import AskedCommitter, Committer, TableFacts, choose, refusal
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.opening import opening
from stormproof.sinks.delta.power_loss import require_whole
from stormproof.sinks.delta.stores import load_table
from stormproof.sinks.delta.table import column_limits, limits_of_new, require_table
from stormproof.sinks.limits import Limits
from stormproof.sinks.preview import TableAction, TablePreview
from stormproof.sinks.protocol import SinkIdentity, SinkSession
from stormproof.sinks.row_rule import BY_DELTA_RS, SchemaContract
from stormproof.sinks.writer import FileWriter


class DeltaPreview:
    """What is looked at; `session` is opened for reading only."""

    def __init__(
        self,
        path: str,
        identity: SinkIdentity,
        input_: SinkInput,
        contract: SchemaContract,
        committer: AskedCommitter,
        partitions: Sequence[str],
    ) -> None:
        self._path = path
        self._identity = identity
        self._input = input_
        self._contract = contract
        self._committer: AskedCommitter = committer
        self._partitions = tuple(partitions)
        self._where = f"sink {identity.sink!r} ({path})"

    def of_table(self, session: SinkSession) -> TablePreview:
        """By the table that is there.

        Raises:
            SinkRefused: it cannot be read.
            StoreUnavailable: it cannot be opened.
        """
        log = DeltaLog(self._path)
        with opening(self._where, log, self._input.mode):
            require_whole(log, self._where)
            table = load_table(self._path)
            evolves = self._contract is SchemaContract.EVOLVE
            known = known_part(table, self._input) if evolves else self._input
            changes = changes_for(table, self._input) if evolves else ()
            table_id = str(table.metadata().id)
            try:
                committer = require_table(table, known, self._where, self._committer)
            except SinkRefused as refused:
                return TablePreview(TableAction.REFUSE, refused.message, table_id=table_id)
            if committer is Committer.SPARK and self._contract in BY_DELTA_RS:
                why = (
                    f"{self._where}: Spark commits to this table, and schema_contract={self._contract.value!r} is served by "
                    "delta-rs alone"
                )
                return TablePreview(TableAction.REFUSE, why, table_id=table_id)
            adopted = not self._input.is_by_key and committer is Committer.DELTA_RS
            return TablePreview(
                TableAction.ALTER if changes else TableAction.USE,
                changes=changes,
                table_id=table_id,
                other_lives=session.other_incarnations(),
                claimed_by=tuple(other_claims(table, self._identity)),
                writer=self._writer(
                    column_limits(table, self._input, self._path),
                    tuple(table.metadata().partition_columns) if adopted else (),
                ),
            )

    def of_new_table(self) -> TablePreview:
        """Where there is none."""
        folder = None if is_url(self._path) else _nearest_folder(self._path)
        if folder is not None and (not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK)):
            why = f"{self._where}: there is no table, and {folder} is no folder that this user may write to"
            return TablePreview(TableAction.REFUSE, why)
        refused = choose(TableFacts.of_new(self._input, self._partitions, {}), self._input.mode).refused
        if refused:
            return TablePreview(TableAction.REFUSE, f"{self._where}: {refusal(refused[0], self._input.mode)}")
        columns = ", ".join(f"{f.name} {getattr(f.type, 'type', f.type)}" for f in _made(self._input).fields)
        cut = f"; partitioned by {', '.join(self._partitions)}" if self._partitions else ""
        return TablePreview(
            TableAction.CREATE,
            changes=(f"columns: {columns}{cut}",),
            writer=self._writer(
                limits_of_new(self._input, self._partitions, self._path),
                () if self._input.is_by_key else self._partitions,
            ),
        )

    def _writer(self, limits: Limits, partitions: tuple[str, ...]) -> FileWriter:
        leaves_out = self._contract is SchemaContract.DISCARD_ROW
        return FileWriter(
            self._identity.sink,
            NOWHERE,
            limits,
            partitions=partitions,
            input=self._input,
            discards=self._contract is SchemaContract.DISCARD_VALUE,
            leaves_out=leaves_out,
            names_messages=leaves_out or bool(self._input.keep),
            keeps_messages=leaves_out,
        )


def _nearest_folder(path: str) -> Path:
    return next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())


def _made(input_: SinkInput) -> Schema:
    return Schema.from_arrow(input_.schema.empty_table().schema)
