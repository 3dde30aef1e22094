"""The shape of a topology's graph as the ledger keeps it, and which changes of it go on from where the old one stood."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from stormproof.core.errors import Json
from stormproof.core.graph.plan import Plan
from stormproof.trident.ledger.missing import Missing

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
    SINK_RETURNED = "sink_returned"
    """It was part of the topology before, and holds what it was given then."""
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
    missing: Missing | None = None
    """What a sink that joins does not have."""

    @property
    def needs_acceptance(self) -> bool:
        """Whether a person must say that it is meant: a table would hold what no row of batches makes."""
        return self.kind is ChangeKind.SINK_CHANGED or (self.kind is ChangeKind.SINK_RETURNED and bool(self.missing))

    @property
    def harm(self) -> str:
        """Why it needs that."""
        if self.kind is ChangeKind.SINK_RETURNED:
            return "what it does not have would never come to it"
        return "what the table holds was made of the old ones"

    @property
    def remedy(self) -> str:
        """When it may be accepted."""
        if self.kind is ChangeKind.SINK_RETURNED:
            return "once its table was completed by hand, or to go on without that"
        return "once the table can hold both"

    @property
    def is_loud(self) -> bool:
        """Whether the log warns of it."""
        return self.missing is not None or self.kind in (ChangeKind.SINK_CHANGED, ChangeKind.SINK_REMOVED)

    def joining(self, missing: Missing | None, held: int | None, newest: int) -> Change:
        """The same of a sink that joins, with what it does not have; `held` is the last txid that it was given before."""
        if held is None:
            lacks = "" if missing is None else f", and does not have {missing}, committed before it joined"
            return replace(self, text=f"{self.text}{lacks}", missing=missing)
        lacks = (
            ""
            if missing is None
            else f": it holds txid {held}, the topology is at txid {newest}, and it does not have {missing}, committed "
            f"while it was not part of the topology"
        )
        text = f"sink {self.sink!r} is back{lacks}"
        return replace(self, kind=ChangeKind.SINK_RETURNED, text=text, missing=missing)


def changes(before: Graph, after: Graph) -> tuple[Change, ...]:
    """What is different, sinks first."""
    found: list[Change] = []
    old, new = before.sinks, after.sinks
    found += [Change(ChangeKind.SINK_ADDED, f"sink {name!r} is new", name) for name in new if name not in old]
    found += [Change(ChangeKind.SINK_REMOVED, f"sink {name!r} is gone", name) for name in old if name not in new]
    found += [change for name in new if name in old and (change := sink_change(name, before, after)) is not None]
    different = [
        name
        for name in {**before.components, **after.components}
        if before.components.get(name) != after.components.get(name)
    ]
    if different:
        found.append(Change(ChangeKind.COMPONENTS, f"other components: {', '.join(different)}"))
    return tuple(found)


def sink_change(name: str, before: Graph, after: Graph) -> Change | None:
    """How a sink that both graphs have is given other rows; None where it is not."""
    old, new = before.sinks[name], after.sinks[name]
    parts = [
        f"{part} were {json.dumps(old.get(part))}, are {json.dumps(new.get(part))}"
        for part in ("columns", "keys", "folds")
        if old.get(part) != new.get(part)
    ]
    return Change(ChangeKind.SINK_CHANGED, f"sink {name!r}: {'; '.join(parts)}", name) if parts else None
