"""`explain`: what a topology compiles to, as text, JSON or a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.graph.components import SinkComponent
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.start.settings import Settings
from stormproof.sinks.contract.protocol import Sink, warning_of
from stormproof.trident.cli.loading import load_topology
from stormproof.trident.cli.output import emit, note, say
from stormproof.trident.topology.explain import explain


def _of_tables(topology: TopologyGraph) -> Iterator[str]:
    """Who commits to the tables that exist, and what of them can refuse rows. Starts no server for that."""
    settings = Settings()
    database = None if settings.uses_embedded else settings.resolve_database()
    for component in topology.components:
        if not isinstance(component, SinkComponent):
            continue
        sink = cast("Sink", component.spec)
        by = sink.committed_by(component.input)
        if by is not None:
            yield f"sink {sink.name}: committed by {by}"
        try:
            found = sink.refusals(component.input, database)
        except StormproofError as error:
            yield f"sink {sink.name}: what its table can refuse is not known: {error}"
        else:
            if found:
                yield f"sink {sink.name}: {warning_of(found)}"


def explain_topology(
    target: str, *, param: Sequence[str] | None, guarantee: str | None, plot: str | None, as_json: bool
) -> None:
    """Print what a topology compiles to, and draw it to the file `plot`.

    Raises:
        UsageError: `plot` is no .dot file, or cannot be written.
        TopologyError: the topology cannot run under this guarantee.
    """
    if plot is not None and Path(plot).suffix != ".dot":
        raise UsageError(f"--plot {plot}: name a file that ends in .dot; of it dot -Tsvg makes a picture", file=plot)
    topology, _ = load_topology(target, param or ())
    found = explain(topology, guarantee)
    if plot is not None:
        try:
            Path(plot).write_text(found.to_dot(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--plot {plot}: it cannot be written: {error.strerror}", file=plot) from error
        note(f"drew {plot}")
    for text in _of_tables(topology):
        note(text)
    emit(found, as_json=as_json, text=lambda: say(str(found)))
