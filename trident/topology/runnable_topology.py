"""A topology that can be explained, run, and fed by a streaming query; `stream` adds how it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.graph.components import BoltComponent
from stormproof.core.graph.topology import TopologyGraph

if TYPE_CHECKING:
    from stormproof.core.start.settings import Settings
    from stormproof.trident.driver.dry_run import TopologyDryRun
    from stormproof.trident.driver.options import RunOptions
    from stormproof.trident.driver.run import RunArguments
    from stormproof.trident.streaming.foreach_batch import ForeachBatch, StreamResult
    from stormproof.trident.terms.observers import RunStatistics
    from stormproof.trident.topology.explain import Explanation


class RunnableTopology(TopologyGraph):
    """A topology graph with what is done with it once it is built.

    What runs it is imported when it is called: who only builds a topology, as a worker does, needs none of it.
    """

    def validate(self) -> None:
        """Check what can only be checked once the whole topology is there.

        Raises:
            TopologyError: see `TopologyGraph.validate`; or a state query names no state of this topology.
        """
        super().validate()
        if any(isinstance(c, BoltComponent) and c.reads_state for c in self.components):
            from stormproof.trident.state.query import check_queries

            check_queries(self)

    def explain(self, guarantee: Guarantee | str | None = None) -> Explanation:
        """What it compiles to: stages, tasks, exchanges, fused components, sinks; `str` of it is for people.

        Raises:
            TopologyError: it cannot run under this guarantee (default: its own).
        """
        from stormproof.trident.topology.explain import explain

        return explain(self, self._chosen(guarantee))

    def foreach_batch(
        self,
        guarantee: Guarantee | str | None = None,
        *,
        adopt: str | None = None,
        settings: Settings | None = None,
        options: RunOptions | None = None,
        on_batch: Callable[[StreamResult], None] | None = None,
    ) -> ForeachBatch:
        """The function for `df.writeStream.foreachBatch(...)` with which a streaming query feeds this topology: see `feed`.

        Raises:
            TopologyError: it cannot run under this guarantee, or its one source is no `MicroBatches`.
        """
        from stormproof.trident.streaming.api import feed

        chosen = self._chosen(guarantee)
        return feed(self, chosen, adopt=adopt, settings=settings, options=options, on_batch=on_batch)

    def run(self, guarantee: Guarantee | str | None = None, **arguments: Unpack[RunArguments]) -> RunStatistics:
        """Run it until it is stopped, idle (`until_idle=True`) or at `max_batches`.

        The other arguments are `settings`, `engine` ("spark" or "inline"), `options`, `on_batch`, `on_ready`, `on_progress`,
        `stop` (a `threading.Event`) and `accept_change`: `RunArguments` describes each. `guarantee` beats the topology's
        own, which beats exactly-once.

        In the main thread SIGINT (Ctrl-C, a notebook's stop button) and SIGTERM end it after the batches in flight, and its
        statistics are returned, with `stopped="signal"`; a second one ends it at once. Afterwards the handlers from before
        are put back.

        Raises:
            TopologyError: it cannot run under this guarantee, or a function of it cannot be sent to a worker.
            SettingsError: a setting is missing or wrong.
            Fenced: another driver took over.
            FatalError: going on could lose or double a message; what to inspect is named.
            TransientError: a store or a machine stayed away for `outage_s`.
        """
        from stormproof.trident.driver.run import run

        return run(self, self._chosen(guarantee), **arguments)

    def dry_run(self, guarantee: Guarantee | str | None = None, *, settings: Settings | None = None) -> TopologyDryRun:
        """What a start and its first batch would do now. Nothing is done: `str` of the result is for people, `to_json` for
        programs.

        At most one batch of messages that were never opened is read, and not taken; all operators run in this process, and
        rows are checked as the sinks' writers check them, counted, and dropped. A source whose messages cannot be read
        without being taken is named (`unread`), and so is a sink without a preview.

        Guarantee:
            No message, lease, row, file, folder, table, claim or entry of the ledger is taken, made or changed, and no
            running driver is fenced, whatever the answer, and wherever the call is killed. It needs no right to write.

        Not guaranteed:
            That the next batch is this one: messages that were returned or are due for a retry come first, the tables' own
            rules (`TablePreview.can_refuse`) are named and not tried, and others may write meanwhile. One task reads: a
            run with more of them writes the same rows in more files. Messages that share tuples with failed ones are not
            told apart. Operators that read a state are not run. The user's own functions
            run, with what they do by themselves. An embedded Postgres that stands is started.

        Raises:
            TopologyError: it cannot run under this guarantee, or a function of it cannot be sent to a worker.
            JobFailed: the job failed.
            StoreUnavailable: a store does not answer.
        """
        from stormproof.trident.driver.dry_run import rehearsed_topology

        return rehearsed_topology(self, self._chosen(guarantee), settings=settings)

    def _chosen(self, guarantee: Guarantee | str | None) -> Guarantee | None:
        return None if guarantee is None else as_guarantee(guarantee, f"topology {self.name!r}")
