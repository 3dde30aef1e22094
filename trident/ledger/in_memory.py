"""A ledger in an SQLite database in memory: of a topology that keeps nothing beyond its process, and of simulations."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable
from typing import Final, cast
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection

from stormproof.core.contract.source import Source
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.memory import MemorySource
from stormproof.sinks.contract.protocol import Sink
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.ledger import tables

_STATEMENTS: Final[dict[object, object]] = {}
"""SQLAlchemy's compiled statements, shared by all of these databases: else each one would compile every statement."""

_LEDGERS: Final[WeakKeyDictionary[Source, dict[str, sa.Engine]]] = WeakKeyDictionary()
"""By source and topology: as long as the source's object lives, more can be put into it and the topology run again."""


def ledger_in_memory(topology: str, source: Source, sinks: Iterable[Sink]) -> sa.Engine | None:
    """The ledger of a topology whose messages and rows all end with the process; None of any other."""
    sources = tuple(source.sources.values()) if isinstance(source, SourceGroup) else (source,)
    if not all(isinstance(one, MemorySource) for one in sources) or not all(
        isinstance(one, MemorySink) for one in sinks
    ):
        return None
    ledgers = _LEDGERS.setdefault(sources[0], {})
    if topology not in ledgers:
        ledgers[topology] = memory_ledger_engine()
    return ledgers[topology]


class _ClosedWithItsEngine(sqlite3.Connection):
    """From Python 3.13 on, a connection warns where it is still open when it is no longer used."""

    def __del__(self) -> None:
        self.close()


def memory_ledger_engine() -> sa.Engine:
    """A new database in memory with the ledger's tables. It lasts as long as the engine."""
    model, content = _model()

    def connect() -> DBAPIConnection:
        connection = sqlite3.connect(":memory:", check_same_thread=False, factory=_ClosedWithItsEngine)
        connection.deserialize(content)
        return cast("DBAPIConnection", connection)

    engine = sa.Engine(sa.pool.StaticPool(connect), model.dialect, model.url)
    return engine.execution_options(compiled_cache=_STATEMENTS)


@functools.cache
def _model() -> tuple[sa.Engine, bytes]:
    """An engine whose dialect the others share, and a database with the ledger's empty tables. Made once a process."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.execution_options(schema_translate_map={tables.SCHEMA: None}).begin() as connection:
        tables.metadata.create_all(connection)
    with engine.connect() as connection:
        held: sqlite3.Connection | None = connection.connection.driver_connection
        assert held is not None
        return engine, held.serialize()
