"""Which kinds of sources and states give exactly-once together, and why: for compiler, documentation and tests.

And what a state, its factory or its store may support beyond its protocol: a caller tests for it with `isinstance`. A user's
own class need not inherit anything: it supports an ability whose methods it has.

And the checks of a state, its updater, its keys and its merges while the topology is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import pyarrow as pa

from stormproof.core.base.arguments import instead_of, lacks, shown
from stormproof.core.base.errors import Json, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import TableKey
from stormproof.core.contract.source import SourceKind
from stormproof.core.postgres.database import Database
from stormproof.core.user_code.functions import refuse_unfit_call
from stormproof.sinks.contract.protocol import EvidenceReport, Held, PreparedTransaction
from stormproof.trident.state.protocol import Merge, StateFactory, StateKind, StateUpdater

if TYPE_CHECKING:
    from stormproof.trident.state.map import Backing


class Service(StrEnum):
    """What a pair gives under exactly-once."""

    EXACTLY_ONCE = "exactly-once"
    DOUBLES = "refused: a crash doubles"
    """The state cannot tell a txid that comes again; served at-least-once."""
    UNSERVED = "refused: the source"
    """The source cannot serve it, whatever the state is."""


REFUSED: Final[Mapping[Service, tuple[str, str]]] = {
    Service.DOUBLES: (
        "the rows are the same each time, but the state cannot tell that it has them: keys written before a crash are "
        "written again after it",
        "a TransactionalMap or OpaqueMap, or run at-least-once",
    ),
    Service.UNSERVED: (
        "the source loses what was in flight, or hands it out again as new messages beside what was done with it; no state "
        "can see that",
        "put the messages into a PostgresQueue or files first, or run at-least-once",
    ),
}
"""Why, and what to choose instead."""


def service(source: SourceKind, state: StateKind) -> Service:
    """What a source and a state give together under exactly-once.

    A batch that is run again may have other messages, but only until its rows are fixed, and the state is touched after
    that. So a txid that comes again brings the same rows, and a state that knows which keys have them counts them once.
    """
    if source is SourceKind.NON_TRANSACTIONAL:
        return Service.UNSERVED
    return Service.DOUBLES if state is StateKind.NON_TRANSACTIONAL else Service.EXACTLY_ONCE


def require_served(
    sources: Mapping[str, SourceKind], state: StateKind, guarantee: Guarantee, *, name: str, target: str
) -> None:
    """Refuse a state that cannot serve the guarantee with these spouts. The weaker guarantees are always served.

    Raises:
        TopologyError: names spout, state, reason, and what to choose instead.
    """
    if guarantee is not Guarantee.EXACTLY_ONCE:
        return
    for spout, source in sources.items():
        given = service(source, state)
        if given in REFUSED:
            reason, instead = REFUSED[given]
            raise TopologyError(
                f"state {name!r} ({target}, {state.value}) behind spout {spout!r} ({source.value}) cannot serve "
                f"exactly-once: {reason}. Choose instead: {instead}",
                component=name,
                spout=spout,
                source=source.value,
                state=state.value,
            )


@runtime_checkable
class SupportsLastTxid(Protocol):
    """A state that keeps the txid of its last `commit` together with its values: an audit compares it with the ledger."""

    def last_txid(self) -> int | None:
        """The txid of the last commit that it holds; None: it holds none."""
        ...


@runtime_checkable
class SupportsEvidence(Protocol):
    """A state that remembers, as a sink does, what it committed and for which topology."""

    @property
    def table_id(self) -> str:
        """What tells this store from another of the same name."""
        ...

    def held(self) -> Held | None:
        """The last transaction that it holds for this context's identity."""
        ...

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to it."""
        ...

    def announce(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Announce the transaction of the next `begin_commit`: its digest and rows are kept with the values."""
        ...

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What it remembers of txids from `first` to `last`."""
        ...


@runtime_checkable
class SupportsBacking(Protocol):
    """A map over a store of which more is known than a state says: the limits of its columns, claims, lost files."""

    @property
    def backing(self) -> Backing:
        """What stores its rows."""
        ...


@runtime_checkable
class SupportsTable(Protocol):
    """A factory that knows the table of its states; `database` is the run's, for a factory that names none."""

    def table_key(self, database: Database | None) -> TableKey | None:
        """As `SinkSpec.table_key`: by its name alone."""
        ...

    def find_table(self, database: Database | None) -> TableKey | None:
        """As `Sink.find_table`: by the store's answer."""
        ...

    def description(self, database: Database | None) -> dict[str, Json]:
        """As `Sink.description`; no secrets. Empty: only the topology's own code can open it."""
        ...


@runtime_checkable
class SupportsRowCheck(Protocol):
    """A factory that knows without a connection which columns its store cannot hold."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for such a column."""
        ...


@runtime_checkable
class SupportsStoreIdentity(Protocol):
    """A key-value store with an identity, by which two connections to one store are recognised."""

    @property
    def store_identity(self) -> str:
        """Equal for all connections that reach the same keys; for example server, database and key prefix."""
        ...


KINDS: Final = tuple(kind.value for kind in StateKind)


def require_state(
    name: str,
    factory: StateFactory,
    *,
    updater: StateUpdater | None,
    keys: tuple[str, ...],
    merges: Mapping[str, Merge] | None,
) -> None:
    """Check the arguments of a state among the sinks.

    Raises:
        TopologyError: one of them is not what it should be; the error names it.
    """
    where = f"state {name!r}"
    require_factory(factory, where, name)
    if updater is not None:
        require_updater(updater, where, name)
    require_keys(keys, where, name)
    if merges is None:
        return
    if not isinstance(merges, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{where}: merges is {shown(merges)}; give a function for each column, like merges={{'n': RowMerge(max)}}",
            component=name,
        )
    for column, merge in merges.items():
        if not callable(merge):
            raise TopologyError(
                f"{where}: merges[{column!r}] is {shown(merge)}; give a function, like RowMerge(max)", component=name
            )
        instead = "write one of two arrays, or RowMerge(f) for one of two values"
        refuse_unfit_call(name, f"{where}: merges[{column!r}]", merge, ("held", "added"), instead)


def require_factory(factory: StateFactory, where: str, component: str) -> None:
    """Raise TopologyError where `factory` makes no states."""
    if lacks(factory, "kind", "target", "make"):
        instead = instead_of(factory, "give one like PostgresMap('totals')")
        if not lacks(factory, "name", "target", "check", "open"):
            instead = "it is a sink: end the stream in it with .into(...)"
        raise TopologyError(f"{where}: {shown(factory)} is no state; {instead}", component=component)
    if factory.kind not in KINDS:
        raise TopologyError(
            f"{where}: {type(factory).__name__}.kind is {factory.kind!r}; it must be one of {', '.join(KINDS)}",
            component=component,
        )


def require_updater(updater: StateUpdater, where: str, component: str) -> None:
    """Raise TopologyError where `updater` cannot update a state."""
    if lacks(updater, "update"):
        instead = instead_of(updater, "give an object with update(state, rows)")
        raise TopologyError(f"{where}: updater is {shown(updater)}; {instead}", component=component)
    instead = "write update(self, state, rows)"
    refuse_unfit_call(component, f"{where}: updater", updater.update, ("state", "rows"), instead)


def require_keys(keys: object, where: str, component: str) -> None:
    """Raise TopologyError where `keys` is no list of column names. A text would be taken letter by letter."""
    if not isinstance(keys, (tuple, list)) or not all(isinstance(key, str) for key in keys):
        raise TopologyError(
            f"{where}: keys is {shown(keys)}; give the key columns' names, like keys=['word']", component=component
        )


def as_state_kind(kind: StateKind | str, where: str) -> StateKind:
    """The kind by its name.

    Raises:
        TopologyError: there is none of that name.
    """
    try:
        return StateKind(kind)
    except ValueError:
        raise TopologyError(f"{where}: kind is {kind!r}; known: {', '.join(KINDS)}") from None
