"""Checks of a state, its updater, its keys and its merges while the topology is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stormproof.core.arguments import instead_of, lacks, shown
from stormproof.core.errors import TopologyError
from stormproof.core.user_functions import refuse_unfit_call
from stormproof.trident.state.protocol import Merge, StateFactory, StateKind, StateUpdater

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
