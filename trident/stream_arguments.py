"""Arguments of a stream's operations: the keys of a join, and the functions that stand for operations without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stormproof.core.arguments import shown
from stormproof.core.errors import TopologyError


def join_keys(on: str | Sequence[str] | Mapping[str, str], where: str) -> dict[str, str]:
    """The left side's keys, and what the right side calls them."""
    if isinstance(on, str):
        return {on: on}
    names: list[object] = list(on) if isinstance(on, Iterable) else [on]  # pyright: ignore[reportUnnecessaryIsInstance]
    keys = list[object](on.values()) if isinstance(on, Mapping) else names
    for name in [*names, *keys]:
        if not isinstance(name, str):
            raise TopologyError(
                f"{where}: on names {shown(name)}; give the keys' names: 'id', ['id', 'day'] or {{'left_id': 'right_id'}}"
            )
    if len(set(names)) != len(names):
        raise TopologyError(f"{where}: on names a key twice: {', '.join(map(str, names))}; name each once")
    return {str(one): str(other) for one, other in zip(names, keys, strict=True)}


def project(*values: object) -> object:
    """Names the component of a projection; never called."""
    return values


def merge(*values: object) -> object:
    """Names the component of a merge; never called."""
    return values


def repartition(*values: object) -> object:
    """Names the component that stands between a repartition and what cannot take one itself; never called."""
    return values
