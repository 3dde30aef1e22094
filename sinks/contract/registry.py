"""Kinds of sinks: how a sink that the ledger describes is opened without its topology's code. The one place to add a kind.

A sink describes itself for the ledger (`Sink.description`: a `kind`, and where its table is). For each kind the registry has
the function that makes the sink from its description. Audit and command line know sinks by the registry alone. A module with
a sink of one's own adds its kind by a call:

    register_sink("csv", lambda address: CsvSink(address.text("path"), name=address.name))

The command line imports that module first where the setting `plugins` names it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.base.errors import CannotTell, Json, UsageError
from stormproof.core.contract.fold import fold_from_json
from stormproof.core.contract.sink import Lineage, SinkInput, SinkMode
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import OTHER, Sink


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """A sink as the ledger keeps it: its name, its description, and its input."""

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
        """The database that the description names; the ledger's, where it names none.

        The description has no password, since the ledger keeps no secrets: libpq takes one from PGPASSWORD or a password
        file. For the ledger's own server the ledger's password is used.
        """
        elsewhere = self.description.get("database")
        if elsewhere is None:
            return self.ledger_database
        found = Database.from_url(str(elsewhere), setting=f"the ledger's description of sink {self.name!r}")
        if found.redacted == self.ledger_database.redacted:
            return Database.of({**dict(self.ledger_database.parameters), **dict(found.parameters)})
        return found


OpenSink: TypeAlias = Callable[[SinkAddress], Sink]
"""Makes a sink from its description; connects to nothing."""

_KINDS: Final[dict[str, OpenSink | str]] = {
    "delta": "stormproof.sinks.delta.sink:described",
    "postgres": "stormproof.sinks.postgres.sink:described",
}


def register_sink(kind: str, open_: OpenSink | str) -> None:
    """Add a kind: `open_` makes its sinks from their descriptions, or names a `module:function` to import when it is needed.

    The same call may be repeated.

    Raises:
        UsageError: the kind is taken by another function.
    """
    if kind == OTHER or _name_of(_KINDS.get(kind, open_)) != _name_of(open_):
        raise UsageError(f"a kind of sink {kind!r} is registered already; choose another name for yours", kind=kind)
    _KINDS[kind] = open_


def described_sink(
    name: str, target: str, description: Mapping[str, Json] | None, ledger_database: Database
) -> tuple[Sink, SinkInput]:
    """A sink as the ledger describes it, and its input. The functions by which a map merges are known to its code alone.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that nobody has registered.
    """
    kind = None if description is None else str(description.get("kind"))
    if description is None or kind not in _KINDS:
        of_kind = "" if kind in (None, OTHER) else f" of kind {kind!r}, which is not registered,"
        raise CannotTell(
            f"sink {name!r} ({target}){of_kind} cannot be opened by its name alone; name the module that registers it in "
            "STORMPROOF_PLUGINS, or call `verify` of stormproof.trident.audit.verify with an opener of your own",
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
        {name: fold_from_json(fold) for name, fold in folds.items()},
        SinkMode(str(description["mode"])),
        _names(description.get("order_by")),
        None if description.get("delete_when") is None else str(description["delete_when"]),
        _names(description.get("keep")),
        lineage_of(description),
    )


def lineage_of(description: Mapping[str, Json]) -> Lineage | None:
    """The lineage columns of a sink as the ledger describes it; None: it has none."""
    found = description.get("lineage")
    if not isinstance(found, dict):
        return None
    txid, message = found.get("txid"), found.get("message")
    return Lineage(None if txid is None else str(txid), None if message is None else str(message))


def _names(found: Json) -> tuple[str, ...]:
    return tuple(str(name) for name in found) if isinstance(found, list) else ()


def _unreadable(sink: str) -> CannotTell:
    return CannotTell(f"the ledger's description of sink {sink!r} cannot be read", sink=sink)
