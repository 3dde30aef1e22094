"""What each component of a topology did in one attempt at a batch, and how many tuples went over each edge.

Tasks count by record batch, where the work is done; their counts are added up, so that they do not depend on how a batch was
divided among tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any, Final, TypeAlias

from stormproof.core.base.errors import Json

ACKER: Final = "__acker"
"""The name under which the tracking is counted. No component can have it: names begin with a letter or a digit."""

Edge: TypeAlias = tuple[str, str, str]
"""The component that emits, its stream, and the component or sink that takes the tuples."""


@dataclass(slots=True)
class ComponentCounts:
    """The counts of one component.

    `executed` are the tuples that it took in, which are those of the edges to it; of a spout, the messages that were read;
    of the acker, the acks that it was told. `emitted` are the tuples that it made, whoever subscribes to them. `acked` are
    the tuples that it took in and did not fail; of a spout, the messages that did not fail early. `busy_ns` is the time that
    its code took, over all tasks.
    """

    executed: int = 0
    emitted: int = 0
    acked: int = 0
    busy_ns: int = 0


@dataclass(slots=True)
class Counts:
    """The counts of a task or, added up, of an attempt. Tuples of messages that failed on the way are among them.

    `now_ns` tells the time of `busy`; it does not travel.
    """

    components: dict[str, ComponentCounts] = field(default_factory=dict[str, ComponentCounts])
    edges: dict[Edge, int] = field(default_factory=dict[Edge, int])
    now_ns: Callable[[], int] = field(default=time.perf_counter_ns, compare=False)

    def of(self, component: str) -> ComponentCounts:
        """A component's counts, to add to."""
        found = self.components.get(component)
        if found is None:
            found = self.components[component] = ComponentCounts()
        return found

    def took(self, component: str, stream: str, to: str, tuples: int) -> None:
        """Count tuples that a component or a sink took from an edge."""
        edge = component, stream, to
        self.edges[edge] = self.edges.get(edge, 0) + tuples
        self.of(to).executed += tuples

    @contextmanager
    def busy(self, component: str) -> Generator[None]:
        """Count the time within this context as a component's. Contexts do not nest."""
        started_ns = self.now_ns()
        try:
            yield
        finally:
            self.of(component).busy_ns += self.now_ns() - started_ns

    def add(self, other: Counts) -> None:
        """Add the counts of another task."""
        for name, more in other.components.items():
            mine = self.of(name)
            mine.executed += more.executed
            mine.emitted += more.emitted
            mine.acked += more.acked
            mine.busy_ns += more.busy_ns
        for edge, tuples in other.edges.items():
            self.edges[edge] = self.edges.get(edge, 0) + tuples

    def to_json(self) -> dict[str, Json]:
        """The counts as they travel; `from_json` reads them."""
        return {
            "components": {name: [*astuple(counts)] for name, counts in self.components.items()},
            "edges": [[*edge, tuples] for edge, tuples in self.edges.items()],
        }

    @classmethod
    def from_json(cls, parts: dict[str, Any]) -> Counts:
        """The counts that were sent."""
        return cls(
            {name: ComponentCounts(*numbers) for name, numbers in parts["components"].items()},
            {(origin, stream, to): tuples for origin, stream, to, tuples in parts["edges"]},
        )


def total(parts: Iterable[Counts]) -> Counts:
    """The counts of all tasks."""
    made = Counts()
    for part in parts:
        made.add(part)
    return made
