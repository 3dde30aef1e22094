"""DeltaSink: a Delta table, as a topology names it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args
from urllib.parse import unquote

from deltalake import Schema
from deltalake.exceptions import DeltaError

from stormproof.core.base.arguments import require_flag, require_path, shown
from stormproof.core.base.arguments import require_whole as require_number
from stormproof.core.base.dataset import DatasetName, at_path
from stormproof.core.base.errors import Json, SinkRefused, StoreUnavailable, TopologyError, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import Lineage, SinkInput, SinkMode, TableKey
from stormproof.core.graph.checks import fitting_name
from stormproof.core.postgres.database import Database
from stormproof.core.storage.files import NOWHERE, files_at
from stormproof.core.storage.protocol import absolute, checked_options, is_url, refusal_of_url, shown_url, use_storage
from stormproof.sinks.contract.preview import TableAction, TablePreview
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.contract.row_rule import (
    Columns,
    RowRule,
    SchemaContract,
    TableSink,
    check_fold_input,
    check_upsert_input,
    column_names,
)
from stormproof.sinks.delta.catalog import CatalogTable
from stormproof.sinks.delta.features import AskedCommitter, TableFacts, as_asked, choose, refusal
from stormproof.sinks.delta.judge import CONSTRAINT, checks_of
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.object_store import check_store
from stormproof.sinks.delta.opening import opening, other_claims, prepare_table
from stormproof.sinks.delta.power_loss import put_torn_aside, require_whole
from stormproof.sinks.delta.schema_changes import changes_for
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.spark import spark_runs
from stormproof.sinks.delta.table import check_types, key_of_path, limits_of_new, locate
from stormproof.sinks.delta.versions import is_table, load_table, panics_as_errors
from stormproof.sinks.prepare.writer import FileWriter


class DeltaPreview:
    """What is looked at; `session` is opened for reading only."""

    def __init__(
        self,
        path: str,
        identity: SinkIdentity,
        input_: SinkInput,
        contract: SchemaContract,
        partitions: Sequence[str],
    ) -> None:
        self._path = path
        self._identity = identity
        self._input = input_
        self._contract = contract
        self._partitions = tuple(partitions)
        self._where = f"sink {identity.sink!r} ({path})"

    def of_table(self, session: DeltaSession) -> TablePreview:
        """By the table that is there.

        Raises:
            SinkRefused: it cannot be read.
            StoreUnavailable: it cannot be opened.
        """
        log = DeltaLog(self._path)
        with opening(self._where, log, self._input.mode):
            require_whole(log, self._where)
            table = load_table(self._path)
            changes = changes_for(table, self._input) if self._contract is SchemaContract.EVOLVE else ()
            table_id = str(table.metadata().id)
            try:
                session.require_fit(table)
            except SinkRefused as refused:
                return TablePreview(TableAction.REFUSE, refused.message, table_id=table_id)
            return TablePreview(
                TableAction.ALTER if changes else TableAction.USE,
                changes=changes,
                table_id=table_id,
                other_lives=session.other_incarnations(),
                claimed_by=other_claims(table, self._identity),
                writer=replace(session.writer(), directory=NOWHERE, guarded=False, private=True),
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
        leaves_out = self._contract is SchemaContract.DISCARD_ROW
        cut = f"; partitioned by {', '.join(self._partitions)}" if self._partitions else ""
        return TablePreview(
            TableAction.CREATE,
            changes=(f"columns: {columns}{cut}",),
            writer=FileWriter(
                self._identity.sink,
                NOWHERE,
                limits_of_new(self._input, self._partitions, self._path),
                partitions=() if self._input.is_by_key else self._partitions,
                input=self._input,
                discards=self._contract is SchemaContract.DISCARD_VALUE,
                leaves_out=leaves_out,
                names_messages=leaves_out or bool(self._input.keep),
                keeps_messages=leaves_out,
            ),
        )


def _nearest_folder(path: str) -> Path:
    return next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())


def _made(input_: SinkInput) -> Schema:
    return Schema.from_arrow(input_.schema.empty_table().schema)


_NEEDS_FEATURE: Final = re.compile(
    r"delta\.(?:(?:feature|columnMapping|universalFormat|coordinatedCommits)\.|checkpointPolicy$|min(?:Reader|Writer)Version$|"
    r"enable(?!ChangeDataFeed$|DeletionVectors$|ExpiredLogCleanup$))"
)
"""Properties that a table may have only beside a feature of its protocol."""
STAGING_FOLDER = ".stormproof-staging"


class DeltaSink(TableSink):
    """Appends to, upserts or folds into, the Delta table in the folder `path`; made where it is missing.

    Without a `mode`, the results of a persistent aggregate are folded, and all other rows are appended. With
    ``mode="upsert"`` a row replaces the row of its `key`, unless that one is later by `order_by`: an older row that comes
    late changes nothing. Of rows that are equal in `order_by`, a deletion wins, and then the row with the greater values.
    `delete_when` names a boolean column: where it is true the key is deleted. The row stays, with its marker, so that an
    older row cannot bring the key back; readers filter by the marker. `keep` names columns that are written when a key is
    new and left alone afterwards. ``order_by="any"``: every batch replaces what earlier ones wrote.

    `lineage`: each row is stored with the txid of its transaction and the id of its message, in the columns ``_txid`` and
    ``_message_id``, or as `Lineage` names them (docs/sinks.md).

    `schema_contract` says what becomes of columns and values that the table cannot hold. ``"freeze"``: a column is refused
    by name when the sink is opened, and a value fails its message. ``"evolve"``: the table gets the columns that it lacks,
    and in Postgres wider types, with the first batch that has them, on record with the txid. ``"discard_value"``: such a
    value is NULL, and counted by txid and column; where a column takes no NULL, it fails its message. ``"discard_row"``: the
    message of such a row is a reject of this sink, whole, and the rest of the batch is committed.

    Appended files are written into the table's own folder and added by the log. The files of an upsert or a fold go to
    `staging`: by default `.stormproof-staging/TABLE` beside the table. There, whoever reaches the table reaches them, on the
    same file system, and neither VACUUM nor a reader of the table's folder comes upon them.

    A table that is made is partitioned by the columns of `partition_by`, and has `properties` ("delta.appendOnly", say). Of
    one that is there both are left as they are.

    `committer` is who writes: "auto" is delta-rs, and Spark where the table has a feature that delta-rs does not write
    (docs/delta.md). Spark is that of the process, or is started when the sink is opened.

    With `compact_every` the driver compacts the table after so many batches, once a batch is committed: small files become
    large ones, and no row changes. The next commit waits for it; a failure is logged, and costs no batch. `stormproof
    compact` does the same by hand. The old files stay until a VACUUM removes them. Let no other program compact such a table
    by delta-rs (1.6.6): two compactions at once, of which the later one is by delta-rs, leave its rows there twice. Ours
    looks whether the files are still the table's, and so does Spark's; the audit names such a version.

    In the place of `path` may stand ``CatalogTable("lake.orders")``, a table that Spark's catalog knows by name. Its folder
    is looked up when a run starts; where the table is missing, it is made and registered.

    `path` may be the URL of a folder in an object store (docs/sinks.md), which `storage_options` reach, as delta-rs names
    them. This process reaches everything below that URL with them from then on; they are in no text of this object.

    `content_digests`: appended rows are hashed as they are written. `audit verify --deep` compares the files that were
    written without that, and with it also rows that a compaction moved to other files. It takes 10 to 200 nanoseconds a row,
    by the columns, of a task's time.

    Guarantee:
        Exactly-once with one driver a topology, by the transaction identifier in the table's log. Delta's own conflict
        check guards against a second writer that also commits through delta-rs. Spark on a local disk may overwrite a log
        entry that another program writes at the same instant; topologies exclude each other by a lock.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CatalogTable,
        *,
        mode: SinkMode | str | None = None,
        key: Columns | None = None,
        order_by: Columns | None = None,
        delete_when: str | None = None,
        keep: Columns | None = None,
        lineage: Lineage | bool = False,
        schema_contract: SchemaContract | str = SchemaContract.FREEZE,
        name: str | None = None,
        staging: str | Path | None = None,
        partition_by: Columns = (),
        properties: Mapping[str, str] | None = None,
        committer: AskedCommitter = "auto",
        compact_every: int | None = None,
        storage_options: Mapping[str, str] | None = None,
        content_digests: bool = False,
    ) -> None:
        self._table = path if isinstance(path, CatalogTable) else None
        if not isinstance(path, CatalogTable):
            require_path("DeltaSink", "path", path)
        text = str(path) if isinstance(path, CatalogTable) else os.fspath(path)
        # Before there is a name: none may have what could be a secret.
        if is_url(text) and (refusal := refusal_of_url(text)) is not None:
            raise TopologyError(f"DeltaSink: {shown_url(text)}: {refusal}")
        where = f"DeltaSink({text!r})"
        if compact_every is not None:
            require_number(where, "compact_every", compact_every, 1)
        if committer not in get_args(AskedCommitter):
            known = ", ".join(map(repr, get_args(AskedCommitter)))
            raise UsageError(f"{where}: no committer {shown(committer)}; known: {known}")
        if staging is not None:
            require_path(where, "staging", staging)
        self._rule = RowRule.given(where, mode, key, order_by, delete_when, keep, lineage)
        self._contract = SchemaContract.given(where, schema_contract)
        self._staging_given = None if staging is None else absolute(staging)
        self._storage_options = None if storage_options is None else checked_options(where, storage_options)
        self._found: str | None = None
        if self._table is None:
            self._take(text.rstrip("/") if is_url(text) else str(Path(text).absolute()))
        own_name = Path(text).name if self._table is None else self._table.table
        self._name = fitting_name(f"delta.{own_name}") if name is None else name
        self._partition_by = () if partition_by in ((), []) else column_names(where, "partition_by", partition_by)
        self._properties = {} if properties is None else _table_properties(where, properties)
        self._committer: AskedCommitter = committer
        self._compact_every = compact_every
        require_flag(where, "content_digests", content_digests)
        self._content_digests = content_digests

    @property
    def target(self) -> str:
        """The table's folder; of a table that is named by its catalog, that name."""
        return self._path if self._table is None else str(self._table)

    @property
    def dataset(self) -> DatasetName:
        """The table's folder."""
        return at_path(self._path)

    def refusals(self, input_: SinkInput, database: Database | None = None) -> Sequence[str]:
        """The table's CHECK constraints."""
        try:
            with panics_as_errors():
                there = is_table(self._path)
                settings = load_table(self._path).metadata().configuration if there else {}
        except (DeltaError, OSError) as error:
            raise StoreUnavailable(f"sink {self._name!r} ({self._path}): {error}") from error
        return [f"CHECK {name}: {text}" for name, text in checks_of(settings).items()]

    def committed_by(self, input_: SinkInput) -> str | None:
        """The committer, and the features that need Spark. Of a table that is named by its catalog this is told while the
        process has a Spark: none is started for it.
        """
        if self._table is not None and not spark_runs():
            return None
        try:
            with panics_as_errors():
                facts = TableFacts.of(load_table(self._path), input_.mode) if is_table(self._path) else None
        except (DeltaError, OSError, SinkRefused):
            return None
        if facts is None or self._committer != "auto":
            return None if self._committer == "auto" else self._committer
        choice = choose(facts, input_.mode)
        why = "; ".join(found.text for found in choice.needs_spark)
        return f"{choice.committer}, since the table has {why}" if why else choice.committer.value

    @property
    def may_lose_files(self) -> bool:
        """On a disk it may: the files of a MERGE are synced only after the log has them."""
        return self._found is None or not is_url(self._found)

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """Its kind and its folder, and what else it was given. Who opens it by this needs no catalog."""
        described: dict[str, Json] = {"kind": "delta", "path": self._path}
        if self._table is not None:
            described["table"] = str(self._table)
        if self._committer != "auto":
            described["committer"] = self._committer
        if self._partition_by:
            described["partition_by"] = [*self._partition_by]
        if self._properties:
            described["properties"] = dict(self._properties)
        if self._contract is not SchemaContract.FREEZE:
            described["schema_contract"] = self._contract.value
        return described

    def table_key(self) -> TableKey:
        """The folder's path, or the catalog's name."""
        return key_of_path(self._path) if self._table is None else ("delta by name", str(self._table))

    def find_table(self) -> TableKey:
        """The folder by device and inode, or the place where it would be made."""
        self._look_up()
        return locate(self._path, f"sink {self._name!r} ({self._path})")

    def files_in(self, input_: SinkInput) -> str:
        """The table's own folder where files are added, else the staging folder beside it."""
        return self._staging if input_.is_by_key else self._path

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where no Delta table can take such rows; every guarantee is served."""
        where = f"sink {self._name!r}"
        if self._table is None:
            self._check_place(where)
        check_types(input_.schema, where)
        missing = [name for name in self._partition_by if name not in input_.schema.names]
        if missing:
            raise TopologyError(
                f"{where}: partition_by names {missing[0]!r}, which the rows do not have", column=missing[0]
            )
        check_upsert_input(input_, where)
        check_fold_input(input_, where)

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> DeltaSession:
        """Make the table if it is missing and `create`, and check that it can hold the rows.

        The first commit fences older epochs: a stale driver of the same identity conflicts with it. A torn newest log entry
        is put aside.
        """
        unregistered = self._look_up()
        with opening(f"sink {identity.sink!r} ({self._path})", DeltaLog(self._path), input_.mode) as where:
            if unregistered is not None:
                put_torn_aside(DeltaLog(self._path), where)  # else whose table it is cannot be read
                unregistered.require_free(self._path, identity, where, create=create)
            prepare_table(
                self._path,
                identity,
                input_,
                where,
                create=create,
                partitions=self._partition_by,
                settings=self._properties,
            )
            if unregistered is not None:
                unregistered.register(self._path, f"sink {identity.sink!r}")
            if input_.is_by_key:
                files_at(self._staging).settle_folder(self._staging, private=True)
            session = self._session(identity, input_, epoch, reading=False)
            session.settle()
            return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> DeltaSession:
        """Open for reading only."""
        with opening(f"sink {identity.sink!r} ({self._path})", DeltaLog(self._path), input_.mode) as where:
            require_whole(DeltaLog(self._path), where)
            return self._session(identity, input_, 0, reading=True)

    def preview(self, identity: SinkIdentity, input_: SinkInput, database: Database | None = None) -> TablePreview:
        """By the table's own log, or by what it would be made of."""
        try:
            unregistered = self._look_up()
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message)
        where, action = f"sink {identity.sink!r} ({self._path})", TableAction.CANNOT_TELL
        if unregistered is not None:
            try:
                with opening(where, DeltaLog(self._path), input_.mode):
                    require_whole(DeltaLog(self._path), where)
                    action = TableAction.REFUSE
                    unregistered.require_free(self._path, identity, where, create=True)
            except SinkRefused as refused:
                return TablePreview(action, refused.message)
        preview = DeltaPreview(self._path, identity, input_, self._contract, self._partition_by)
        if not is_table(self._path):
            if self._table is not None and unregistered is None:
                return TablePreview(TableAction.REFUSE, f"{self._table}: there is no Delta table in {self._path}")
            return preview.of_new_table()
        try:
            found = preview.of_table(self.inspect(identity, input_))
            return found if unregistered is None else replace(found, dropped=unregistered.dropped(self._path, where))
        except SinkRefused as refused:
            return TablePreview(TableAction.CANNOT_TELL, refused.message)

    @property
    def _path(self) -> str:
        """The table's folder."""
        if self._found is None:
            self._look_up()
        assert self._found is not None
        return self._found

    @property
    def _staging(self) -> str:
        beside = os.path.join(os.path.dirname(self._path), STAGING_FOLDER, os.path.basename(self._path))
        return beside if self._staging_given is None else self._staging_given

    def _look_up(self) -> CatalogTable | None:
        """Have the catalog say where the table is, or would be; a path is where it was. See `CatalogTable.place`.

        Returns a table that is still to be registered.
        """
        if self._table is None:
            return None
        where = f"sink {self._name!r}"
        found = self._table.place(where)
        self._take(found.folder)
        self._check_place(where)
        return None if found.is_registered else self._table

    def _take(self, path: str) -> None:
        self._found = path
        if self._storage_options is not None:
            for address in (self._path, self._staging):
                use_storage(address, self._storage_options)

    def _check_place(self, where: str) -> None:
        if is_url(self._path):
            check_store(self._path, where)
            if self._committer == "spark":
                raise TopologyError(f"{where}: committer='spark' is not served in an object store; use 'auto'")
        elif unquote(self._path) != self._path or "\\" in self._path:
            raise TopologyError(
                f"{where}: delta-rs takes a percent sign with two digits, or a backslash, in {self._path!r} for another "
                "character, and would open another folder; rename the folder"
            )

    def _session(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, reading: bool) -> DeltaSession:
        directory = self.files_in(input_)
        return DeltaSession(
            self._path,
            directory,
            identity=identity,
            input_=input_,
            epoch=epoch,
            reading=reading,
            contract=self._contract,
            committer=self._committer,
            compact_every=self._compact_every,
            content_digests=self._content_digests,
        )


def _table_properties(where: str, given: Mapping[str, str]) -> dict[str, str]:
    wrong = not isinstance(given, Mapping) or any(  # pyright: ignore[reportUnnecessaryIsInstance]
        not isinstance(part, str) or not part  # pyright: ignore[reportUnnecessaryIsInstance]
        for pair in given.items()
        for part in pair
    )
    if wrong:
        raise UsageError(
            f"{where}: properties is {shown(given)}; it must be a dict of texts, such as {{'delta.appendOnly': 'true'}}"
        )
    checks = [name for name in given if name.startswith(CONSTRAINT)]
    if checks:
        raise UsageError(
            f"{where}: properties has {checks[0]!r}: a merge does not ask a CHECK constraint that is only a property; "
            "make the table without it, and add it with ALTER TABLE ... ADD CONSTRAINT, or delta-rs' alter.add_constraint"
        )
    unmade = [name for name in given if _NEEDS_FEATURE.match(name)]
    if unmade:
        raise UsageError(
            f"{where}: properties has {unmade[0]!r}, which takes a feature that delta-rs does not lay out in a new table: "
            "readers could not read it; make the table with Spark, and leave the property out"
        )
    return dict(given)


def described(address: SinkAddress) -> DeltaSink:
    """The sink of a ledger's description."""
    staging = address.files if address.input.is_by_key else None
    told = address.description
    partitions, properties = told.get("partition_by"), told.get("properties")
    return DeltaSink(
        address.text("path"),
        name=address.name,
        staging=staging,
        partition_by=[str(name) for name in partitions] if isinstance(partitions, list) else (),
        properties={n: str(value) for n, value in properties.items()} if isinstance(properties, dict) else None,
        committer=as_asked(told.get("committer")),
        schema_contract=str(told.get("schema_contract", SchemaContract.FREEZE)),
    )
