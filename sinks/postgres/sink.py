"""PostgresSink: a Postgres table, as a topology names it."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from stormproof.core.base.arguments import require_flag, require_path
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import Json, SettingsError
from stormproof.core.base.guarantee import Guarantee
from stormproof.core.contract.lineage import Lineage
from stormproof.core.contract.sink import SinkInput, SinkMode, TableKey
from stormproof.core.graph.checks import fitting_name
from stormproof.core.postgres.database import Database
from stormproof.core.storage.address import absolute
from stormproof.core.storage.local_files import NOWHERE
from stormproof.sinks.contract.preview import TablePreview
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.contract.row_rule import Columns, RowRule, SchemaContract, TableSink, check_upsert_input
from stormproof.sinks.postgres.connection import asked, key_of_name, locate
from stormproof.sinks.postgres.preview import PostgresPreview
from stormproof.sinks.postgres.refusals import what_can_refuse
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.postgres.table import TableName, check_types, find_oid
from stormproof.sinks.rows.by_key import check_fold_input

STAGING_FOLDER = Path(".stormproof", "staging")


class PostgresSink(TableSink):
    """Appends to, upserts or folds into, a Postgres table; made where it is missing.

    For `mode` and the arguments of an upsert see `DeltaSink`. A table that is upserted into, or folded into, has a primary
    key or a unique index on exactly the key's columns. For `schema_contract` see there, too.

    `content_digests`: appended rows are hashed as they are written, in the tasks. Without it `audit verify --deep` compares
    no appended row.

    `database` and `staging` may be left to the run's settings (`placed`). Guard and evidence are in the schema
    `stormproof_sink` of the same database, and are written in the same transaction as the rows.

    Guarantee:
        Exactly-once, also where Postgres is restarted or the answer to a COMMIT is lost. An unlogged table, which a crash of
        the server empties, is refused.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(
        self,
        table: str,
        *,
        mode: SinkMode | str | None = None,
        key: Columns | None = None,
        order_by: Columns | None = None,
        delete_when: str | None = None,
        keep: Columns | None = None,
        lineage: Lineage | bool = False,
        schema_contract: SchemaContract | str = SchemaContract.FREEZE,
        name: str | None = None,
        database: Database | str | None = None,
        staging: str | Path | None = None,
        content_digests: bool = True,
    ) -> None:
        where = f"PostgresSink({table!r})"
        self._table = TableName.parse(table)
        self._rule = RowRule.given(where, mode, key, order_by, delete_when, keep, lineage)
        self._contract = SchemaContract.given(where, schema_contract)
        if staging is not None:
            require_path(where, "staging", staging)
        self._name = fitting_name(f"postgres.{self._table}") if name is None else name
        self._database = Database.given(where, database)
        require_flag(where, "content_digests", content_digests)
        self._content_digests = content_digests
        self._staging = None if staging is None else absolute(staging)

    @property
    def target(self) -> str:
        """The table, with its database where one is given; no secrets."""
        return str(self._table) if self._database is None else f"{self._table} at {self._database.redacted}"

    @property
    def dataset(self) -> DatasetName | None:
        """The table; without a schema of its own it is called as in `public`."""
        table = f"{self._table.schema or 'public'}.{self._table.table}"
        return None if self._database is None else self._database.dataset(table)

    @property
    def table(self) -> str:
        """The table's name, with its schema where one was given."""
        return str(self._table)

    @property
    def database(self) -> Database | None:
        """The database that was given."""
        return self._database

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """Its kind, its table and its database."""
        database = None if self._database is None else self._database.without_password
        contract = {} if self._contract is SchemaContract.FREEZE else {"schema_contract": self._contract.value}
        return {"kind": "postgres", "table": self.table, "database": database, **contract}

    def table_key(self) -> TableKey:
        """The database and the name as they were given."""
        return key_of_name(self._database, self._table)

    def find_table(self) -> TableKey:
        """The table that has this name in the database, or would be made."""
        return locate(self._known_database(), self._table, f"sink {self._name!r} ({self.target})")

    def refusals(self, input_: SinkInput, database: Database | None = None) -> list[str]:
        """The rules of the table that can refuse rows at a commit; none where there is no table yet, or no database is
        known. `database` is asked where the sink names none.

        Raises:
            StoreUnavailable: there is no connection, or it is lost.
            SinkRefused: the database refuses to answer.
        """
        database = self._database or database
        if database is None:
            return []
        with asked(database, f"sink {self._name!r} ({self.target})") as connection:
            oid = find_oid(connection, self._table)
            return [] if oid is None else what_can_refuse(connection, oid, input_)

    def files_in(self, input_: SinkInput) -> str:
        """The staging folder."""
        return absolute(STAGING_FOLDER / self._name) if self._staging is None else self._staging

    def placed(self, database: Database, staging: str) -> PostgresSink:
        """This sink with the run's database, and a folder below `staging` named after it, where it names none itself."""
        made = copy.copy(self)
        made._database = self._database or database
        made._staging = os.path.join(staging, self._name) if self._staging is None else self._staging
        return made

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where no Postgres table can take such rows; every guarantee is served."""
        where = f"sink {self._name!r}"
        check_types(input_.schema, where)
        check_upsert_input(input_, where)
        check_fold_input(input_, where)

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> PostgresSession:
        """Fence older epochs out, make the table if it is missing and `create`, and check that it can hold the rows."""
        session = self._session(identity, input_, epoch)
        try:
            session.take_over(create=create)
        except BaseException:
            session.close()
            raise
        return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> PostgresSession:
        """Open for reading only."""
        return self._session(identity, input_, None)

    def preview(self, identity: SinkIdentity, input_: SinkInput, database: Database | None = None) -> TablePreview:
        """By the table's catalog, or by what it would be made of."""
        database = self._database or database
        session = PostgresSession(
            database or Database.of({}),
            self._table,
            staging=NOWHERE,
            identity=identity,
            input_=input_,
            epoch=None,
            contract=self._contract,
            content_digests=False,
        )
        return PostgresPreview(database, session).now()

    def operate(self, identity: SinkIdentity, input_: SinkInput, epoch: int, staging: str) -> PostgresSession:
        """Open under an epoch that stands, for a command on a batch whose driver has stopped: fences nobody."""
        return self._session(identity, input_, epoch, staging)

    def _session(
        self, identity: SinkIdentity, input_: SinkInput, epoch: int | None, staging: str | None = None
    ) -> PostgresSession:
        return PostgresSession(
            self._known_database(),
            self._table,
            staging=staging or self.files_in(input_),
            identity=identity,
            input_=input_,
            epoch=epoch,
            contract=self._contract,
            content_digests=self._content_digests,
        )

    def _known_database(self) -> Database:
        if self._database is None:
            raise SettingsError(f"sink {self._name!r}: no database is given; pass PostgresSink(..., database=URL)")
        return self._database


def described(address: SinkAddress) -> PostgresSink:
    """The sink of a ledger's description."""
    contract = str(address.description.get("schema_contract", SchemaContract.FREEZE))
    return PostgresSink(address.text("table"), name=address.name, database=address.database, schema_contract=contract)
