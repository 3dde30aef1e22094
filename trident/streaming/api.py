"""Spark's own frames into Stormproof: what a streaming query's `foreachBatch` calls, and what a batch job calls.

`exactly_once(sinks..., name=...)` writes each micro-batch, or each job's rows, to its sinks; `feed(topology)` makes messages
of a micro-batch's rows and takes them through a topology. docs/foreach_batch.md says which is for what, and what each costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkSpec, require_tables_apart
from stormproof.core.graph.checks import as_guarantee, checked_name, require_sink
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.files.micro_batches import MicroBatches
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.streaming.base import ForeachBatch, StreamResult
from stormproof.trident.streaming.sinks import ExactlyOnce
from stormproof.trident.streaming.topology import TopologyStream

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames


def exactly_once(
    *sinks: SinkSpec,
    name: str,
    adopt: str | None = None,
    settings: Settings | None = None,
    on_batch: Callable[[StreamResult], None] | None = None,
    frames: Frames | None = None,
) -> ExactlyOnce:
    """For `df.writeStream.foreachBatch(...)`: each micro-batch's rows are appended to every sink, exactly once.

    For a batch job, `once` of what is returned appends a DataFrame's rows exactly once for a key of the caller's. A name is
    for streaming queries, or for jobs.

    A micro-batch is one message and one transaction: the first one that `name` gets is txid 1, the next txid 2. Its rows
    are computed and written once, by one job; from *prepare* on they are never computed again. A row that a sink cannot
    hold stops the query with an error that names the row: where rows may fail one by one, use `feed` with a topology.

    `adopt` names the place, as the error prints it, from which this query is to go on although the ledger expects another
    place or another name there. Several functions of different names may take each micro-batch of one query. `frames` is for
    tests: it hands out micro-batches in place of Spark.

    Raises (when a micro-batch is handed in):
        PositionMismatch: checkpoint and ledger do not belong together; or a sink holds another txid than the ledger.
        Fenced: another query, or another run of this one, took over.
        SinkRefused: a sink cannot hold a row, or refuses a commit for good.
        JobFailed: the query's own job failed.
    """
    if not sinks:
        raise TopologyError(f"exactly_once(name={name!r}) needs at least one sink")
    for sink in sinks:
        require_sink(sink, f"exactly_once(name={name!r})")
    require_tables_apart(name, sinks)
    return ExactlyOnce(
        checked_name(name, "stream"), sinks, adopt=adopt, settings=settings, on_batch=on_batch, frames=frames
    )


def feed(
    topology: TopologyGraph,
    guarantee: Guarantee | str | None = None,
    *,
    adopt: str | None = None,
    settings: Settings | None = None,
    options: RunOptions | None = None,
    on_batch: Callable[[StreamResult], None] | None = None,
    frames: Frames | None = None,
) -> ForeachBatch:
    """For `df.writeStream.foreachBatch(...)`: each row of a micro-batch is a message of the topology's `MicroBatches`.

    A call returns once every message of the micro-batch is committed, waits for its retry, or is a dead letter. The rows
    are written to staged files first (one job), then run through the topology (one job for each of its batches).

    Raises:
        TopologyError: the topology cannot run under this guarantee, or its one source is no `MicroBatches`.
        When a micro-batch is handed in: as `exactly_once`, and as a topology's run.
    """
    if not isinstance(topology, TopologyGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(f"feed: {shown(topology)} is no topology; give an object of Topology with its streams")
    spouts = topology.spouts
    source = spouts[0].source
    if len(spouts) != 1 or not isinstance(source, MicroBatches):
        raise TopologyError(
            f"topology {topology.name!r} is fed by a streaming query only where its one source is a MicroBatches; it has "
            f"{', '.join(f'{s.name!r} ({type(s.source).__name__})' for s in spouts)}"
        )
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    compile_topology(topology, chosen)  # so that a fault of the topology is reported before the query starts
    return TopologyStream(
        topology, source, chosen, adopt=adopt, settings=settings, options=options, on_batch=on_batch, frames=frames
    )
