"""The way back from a sink's name to its evidence: a description in the ledger, and a session made of it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.errors import CannotTell, Json
from stormproof.core.postgres.database import Database
from stormproof.core.sink import Fold, SinkInput, SinkSpec
from stormproof.sinks.protocol import Sink, SinkIdentity, SinkSession
from stormproof.trident.audit.ledger import SinkBinding
from stormproof.trident.state.protocol import StateFactory

OPENED: Final = ("delta", "postgres", "delta-map", "postgres-map")
"""The kinds that can be opened by their description."""

SinkOpener: TypeAlias = Callable[[SinkIdentity, SinkBinding], SinkSession]
"""Opens a sink for reading only."""


def describe_sink(
    sink: SinkSpec, input_: SinkInput, *, files: str | None = None, ledger_database: Database | None = None
) -> dict[str, Json]:
    """What the ledger keeps of a sink, so that the audit can open it without the topology's code. Never a secret.

    A sink of a kind that is not Stormproof's own is described as `other`; its evidence can only be checked by a caller
    who passes an opener. `files` is the folder of its prepared files. A sink in the ledger's own database is described
    without a database: restored elsewhere, the ledger must not have the old server's table inspected.
    """
    description = _description(sink, input_, files)
    if ledger_database is not None and description.get("database") == ledger_database.without_password:
        description["database"] = None
    return description


def _description(sink: SinkSpec, input_: SinkInput, files: str | None) -> dict[str, Json]:
    from stormproof.sinks.delta import DeltaSink
    from stormproof.sinks.postgres import PostgresSink
    from stormproof.trident.state.sink import StateSink

    keys: list[Json] = [*input_.keys]
    folds: dict[str, Json] = {name: fold.value for name, fold in input_.folds.items()}
    description: dict[str, Json] = {
        "kind": "other",
        "mode": "fold" if input_.is_fold else "append",
        "keys": keys,
        "folds": folds,
        "schema": base64.b64encode(input_.schema.serialize().to_pybytes()).decode("ascii"),
        "files": files,
    }
    if isinstance(sink, StateSink):
        return {**description, **sink.description(input_)}
    if isinstance(sink, DeltaSink):
        return {**description, "kind": "delta", "path": sink.target}
    if isinstance(sink, PostgresSink):
        database = None if sink.database is None else sink.database.without_password
        table = sink.target if sink.database is None else sink.target.removesuffix(f" at {sink.database.redacted}")
        return {**description, "kind": "postgres", "table": table, "database": database}
    return description


def opener_for(ledger_database: Database) -> SinkOpener:
    """An opener for Stormproof's own sinks, by their descriptions."""

    def open_sink(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        return open_for_inspection(identity, binding, ledger_database)

    return open_sink


def open_for_inspection(identity: SinkIdentity, binding: SinkBinding, ledger_database: Database) -> SinkSession:
    """A session for reading only: makes nothing, fences nobody.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that only its own code can open.
        SinkRefused: the table is gone or cannot be what was written to.
        StoreUnavailable: it cannot be reached.
    """
    sink, input_ = described_sink(binding, ledger_database)
    return sink.inspect(identity, input_)


def described_sink(binding: SinkBinding, ledger_database: Database) -> tuple[Sink, SinkInput]:
    """A sink as the ledger describes it, and what it is given; how a map's values are merged only its code knows.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that only its own code can open.
    """
    description = binding.description
    if description is None or description.get("kind") not in OPENED:
        raise CannotTell(
            f"sink {binding.sink!r} ({binding.target}) cannot be opened by its name alone; "
            "call stormproof.trident.audit.verify with an opener of your own",
            sink=binding.sink,
        )
    input_ = _input_of(binding, description)
    if description["kind"] == "delta-map":
        from stormproof.trident.state.delta import DeltaMap

        return _described_map(binding, DeltaMap(str(description["path"]), str(description["state"])), input_)
    if description["kind"] == "delta":
        from stormproof.sinks.delta import DeltaSink

        files = description.get("files") if input_.is_fold else None
        staging = None if files is None else str(files)
        return DeltaSink(str(description["path"]), name=binding.sink, staging=staging), input_
    from stormproof.sinks.postgres import PostgresSink

    database = ledger_database
    elsewhere = description.get("database")
    if elsewhere is not None:
        database = Database.from_url(str(elsewhere), setting=f"the ledger's description of sink {binding.sink!r}")
        # Without its password, which is not the ledger's to keep: libpq finds it in PGPASSWORD or a password file, where
        # it is not the one that the ledger itself was reached with.
        if database.redacted == ledger_database.redacted:
            database = Database.of({**dict(ledger_database.parameters), **dict(database.parameters)})
    if description["kind"] == "postgres-map":
        from stormproof.trident.state.postgres import PostgresMap

        map_ = PostgresMap(str(description["table"]), str(description["state"]), database=database)
        return _described_map(binding, map_, input_)
    return PostgresSink(str(description["table"]), name=binding.sink, database=database), input_


def _described_map(binding: SinkBinding, state: StateFactory, input_: SinkInput) -> tuple[Sink, SinkInput]:
    from stormproof.trident.state.sink import StateSink

    files = (binding.description or {}).get("files")
    staging = None if files is None else str(files)
    sink = StateSink(binding.sink, state, keys=input_.keys, staging=staging)
    return sink, SinkInput(input_.schema, input_.keys)


def _input_of(binding: SinkBinding, description: dict[str, Json]) -> SinkInput:
    keys, folds = description.get("keys"), description.get("folds")
    if not isinstance(keys, list) or not isinstance(folds, dict):
        raise CannotTell(f"the ledger's description of sink {binding.sink!r} cannot be read", sink=binding.sink)
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(str(description["schema"]))))
    return SinkInput(schema, tuple(str(key) for key in keys), {name: Fold(str(fold)) for name, fold in folds.items()})
