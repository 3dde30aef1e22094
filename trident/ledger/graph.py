"""The shape of a topology's graph as the ledger keeps it, and which changes of it go on from where the old one stood."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stormproof.core.errors import Json
from stormproof.core.plan import Plan

ACCEPTED_CHANGE: Final = "accept_change"
"""Reason of an operator's event that lets a changed graph go on under the same incarnation."""

SHOWN_CHARACTERS: Final = 12
"""So much of a fingerprint is shown, and typed by whom accepts it."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph's canonical description: source, components, and sinks with what they are given. Nothing of functions."""

    description: dict[str, Json]

    @property
    def fingerprint(self) -> str:
        """Equal for equal descriptions."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @property
    def shown(self) -> str:
        """The fingerprint as people see it."""
        return self.fingerprint[:SHOWN_CHARACTERS]

    @property
    def sinks(self) -> dict[str, dict[str, Json]]:
        """Each sink's description, by name."""
        return _parts(self.description, "sinks")

    @property
    def components(self) -> dict[str, dict[str, Json]]:
        """Each other component's description, by name."""
        return _parts(self.description, "components")


def _parts(description: Mapping[str, Json], kind: str) -> dict[str, dict[str, Json]]:
    parts = description.get(kind)
    if not isinstance(parts, dict):
        return {}
    return {name: part for name, part in parts.items() if isinstance(part, dict)}


def graph_of(plan: Plan, source: str) -> Graph:
    """What a compiled topology is, for the ledger."""
    targets = {spec.name: spec.target for spec in plan.sink_specs}
    sinks: dict[str, Json] = {
        name: {
            "target": targets.get(name, ""),
            "columns": [[f.name, str(f.type), f.nullable] for f in input_.schema],
            "keys": [*input_.keys],
            "folds": {column: fold.value for column, fold in input_.folds.items()},
        }
        for name, input_ in plan.sinks.items()
    }
    components: dict[str, Json] = {}
    for number, stage in enumerate(plan.stages):
        for entry in stage.entries:
            components[f"{entry.component}/{entry.stream}@{number}"] = {"stage": number, "feeds": [*entry.children]}
        for key, node in stage.nodes.items():
            components[key] = {"stage": number, "kind": type(node).__name__, "to": _children(node)}
    return Graph({"source": source, "components": components, "sinks": sinks})


def _children(node: object) -> list[Json]:
    children = getattr(node, "children", ())
    if isinstance(children, Mapping):
        return [f"{stream}>{child}" for stream, keys in children.items() for child in keys]
    return [*children]


class ChangeKind(StrEnum):
    """What is different; append-only."""

    SINK_ADDED = "sink_added"
    SINK_REMOVED = "sink_removed"
    SINK_CHANGED = "sink_changed"
    """It is given other columns, keys or folds: what it holds was made of the old ones."""
    COMPONENTS = "components"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two graphs of one topology."""

    kind: ChangeKind
    text: str
    sink: str | None = None

    @property
    def needs_acceptance(self) -> bool:
        """Whether a person must say that it is meant."""
        return self.kind is ChangeKind.SINK_CHANGED


def changes(before: Graph, after: Graph) -> tuple[Change, ...]:
    """What is different, sinks first."""
    found: list[Change] = []
    old, new = before.sinks, after.sinks
    found += [Change(ChangeKind.SINK_ADDED, f"sink {name!r} is new", name) for name in new if name not in old]
    found += [Change(ChangeKind.SINK_REMOVED, f"sink {name!r} is gone", name) for name in old if name not in new]
    for name in new:
        parts = [
            f"{part} were {json.dumps(old[name].get(part))}, are {json.dumps(new[name].get(part))}"
            for part in ("columns", "keys", "folds")
            if name in old and old[name].get(part) != new[name].get(part)
        ]
        if parts:
            found.append(Change(ChangeKind.SINK_CHANGED, f"sink {name!r}: {'; '.join(parts)}", name))
    different = [
        name
        for name in {**before.components, **after.components}
        if before.components.get(name) != after.components.get(name)
    ]
    if different:
        found.append(Change(ChangeKind.COMPONENTS, f"other components: {', '.join(different)}"))
    return tuple(found)
