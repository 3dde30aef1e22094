"""Kinds of sinks: how one that the ledger describes is opened again without its topology's code. The one place to add one.

A sink says of itself what the ledger is to keep (`Sink.description`: a `kind`, and where its table is); the registry
holds for each kind the function that makes the sink of such a description again. Audit and command line know sinks by this
alone. A kind of one's own is added by a call in the module that has the sink:

    register_sink("sqlite", lambda address: SqliteSink(address.text("path"), name=address.name))

The command line imports that module first where the setting `plugins` names it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.errors import CannotTell, Json, UsageError
from stormproof.core.postgres.database import Database
from stormproof.core.sink import Fold, SinkInput, SinkMode
from stormproof.sinks.protocol import Sink

OTHER: Final = "other"
"""The kind of a sink that says nothing of itself."""


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """A sink as the ledger keeps it: its name, what it said of itself, and what it is given."""

    name: str
    target: str
    description: Mapping[str, Json]
    input: SinkInput
    ledger_database: Database

    def text(self, key: str) -> str:
        """A text of the description.

        Raises:
            CannotTell: there is none under this key.
        """
        found = self.description.get(key)
        if not isinstance(found, str):
            raise _unreadable(self.name)
        return found

    @property
    def files(self) -> str | None:
        """The folder of its prepared files."""
        found = self.description.get("files")
        return None if found is None else str(found)

    @property
    def database(self) -> Database:
        """The database that the description names: the ledger's, where it names none.

        It is described without its password, which is not the ledger's to keep. libpq finds one in PGPASSWORD or a password
        file; for the server that the ledger itself is on, the ledger's is taken.
        """
        elsewhere = self.description.get("database")
        if elsewhere is None:
            return self.ledger_database
        found = Database.from_url(str(elsewhere), setting=f"the ledger's description of sink {self.name!r}")
        if found.redacted == self.ledger_database.redacted:
            return Database.of({**dict(self.ledger_database.parameters), **dict(found.parameters)})
        return found


OpenSink: TypeAlias = Callable[[SinkAddress], Sink]
"""Makes a sink of its description; connects to nothing."""

_KINDS: Final[dict[str, OpenSink | str]] = {
    "delta": "stormproof.sinks.delta.sink:described",
    "postgres": "stormproof.sinks.postgres.sink:described",
}


def register_sink(kind: str, open_: OpenSink | str) -> None:
    """Add a kind: `open_` makes its sinks of their descriptions, or is `module:function` where that is to be imported late.

    The same call may be repeated.

    Raises:
        UsageError: the kind is taken by another function.
    """
    if kind == OTHER or _name_of(_KINDS.get(kind, open_)) != _name_of(open_):
        raise UsageError(f"a kind of sink {kind!r} is registered already; choose another name for yours", kind=kind)
    _KINDS[kind] = open_


def describe_sink(
    sink: Sink, input_: SinkInput, *, files: str | None = None, ledger_database: Database | None = None
) -> dict[str, Json]:
    """What the ledger keeps of a sink, so that it can be opened without the topology's code. Never a secret.

    A sink that says nothing of itself is of kind `other`: its evidence can only be checked by a caller who opens it.
    `files` is the folder of its prepared files. A sink in the ledger's own database is described without a database:
    restored elsewhere, the ledger must not have the old server's table inspected.
    """
    description: dict[str, Json] = {
        "kind": OTHER,
        "mode": input_.mode.value,
        "keys": [*input_.keys],
        "folds": {name: fold.value for name, fold in input_.folds.items()},
        "schema": base64.b64encode(input_.schema.serialize().to_pybytes()).decode("ascii"),
        "files": files,
        **sink.description(input_),
    }
    if ledger_database is not None and description.get("database") == ledger_database.without_password:
        description["database"] = None
    return description


def described_sink(
    name: str, target: str, description: Mapping[str, Json] | None, ledger_database: Database
) -> tuple[Sink, SinkInput]:
    """A sink as the ledger describes it, and what it is given; by what functions a map merges only its code knows.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that nobody has registered.
    """
    kind = None if description is None else str(description.get("kind"))
    if description is None or kind not in _KINDS:
        of_kind = "" if kind in (None, OTHER) else f" of kind {kind!r}, which is not registered,"
        raise CannotTell(
            f"sink {name!r} ({target}){of_kind} cannot be opened by its name alone; name the module that registers it in "
            "STORMPROOF_PLUGINS, or call stormproof.trident.audit.verify with an opener of your own",
            sink=name,
        )
    input_ = _input_of(name, description)
    return _opener(kind)(SinkAddress(name, target, description, input_, ledger_database)), input_


def _opener(kind: str) -> OpenSink:
    found = _KINDS[kind]
    if isinstance(found, str):
        module, _, function = found.partition(":")
        found = _KINDS[kind] = getattr(import_module(module), function)
    return found


def _name_of(open_: OpenSink | str) -> str:
    return open_ if isinstance(open_, str) else f"{open_.__module__}:{open_.__qualname__}"


def _input_of(sink: str, description: Mapping[str, Json]) -> SinkInput:
    keys, folds = description.get("keys"), description.get("folds")
    if not isinstance(keys, list) or not isinstance(folds, dict):
        raise _unreadable(sink)
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(str(description["schema"]))))
    return SinkInput(
        schema,
        tuple(str(key) for key in keys),
        {name: Fold(str(fold)) for name, fold in folds.items()},
        SinkMode(str(description["mode"])),
    )


def _unreadable(sink: str) -> CannotTell:
    return CannotTell(f"the ledger's description of sink {sink!r} cannot be read", sink=sink)
