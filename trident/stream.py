"""Topologies as streams: what users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stormproof.core.arguments import shown
from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.errors import TopologyError
from stormproof.core.graph.checks import as_guarantee, checked_tasks, require_fields, schema_for
from stormproof.core.graph.components import OperationKind, OutputStream, Subscription, UserFunction
from stormproof.core.graph.grouping import Grouping, GroupingKind
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.schema import SchemaLike
from stormproof.core.sink import SinkSpec
from stormproof.core.source.protocol import Source
from stormproof.trident.aggregate import OneResult, SeveralResults, named
from stormproof.trident.persistent import EVERYTHING, everything, over, own_merges, require_state, with_key
from stormproof.trident.stream_arguments import join_keys, merge, project, repartition

if TYPE_CHECKING:
    import pyarrow as pa

    from stormproof.core.settings import Settings
    from stormproof.trident.coordinator import Coordinator
    from stormproof.trident.explain import Explanation
    from stormproof.trident.options import RunOptions
    from stormproof.trident.query import Query
    from stormproof.trident.run import EngineChoice
    from stormproof.trident.state.protocol import StateFactory, StateUpdater
    from stormproof.trident.statistics import BatchResult, RunStatistics
    from stormproof.trident.streaming.base import ForeachBatch
    from stormproof.trident.streaming.result import StreamResult


class Topology(TopologyGraph):
    """A topology, built stream by stream; the same object runs under every guarantee.

    Everything is checked as it is added, and once more as a whole before it runs.

    Threads: built by one thread at a time; once it is built, any number may run it or read it. Two runs of one topology
    fence each other, in one process, too: the later one goes on, the earlier one stops with `Fenced`.
    Forks: one may run it. A fork that a user's function makes never goes on with its parent's run: it ends where it
    comes back from that function.
    """

    def stream(self, name: str, source: Source) -> Stream:
        """Begin with a source's messages, decoded by its schema.

        Raises:
            TopologyError: there is a source already, or the name cannot be one.
        """
        return Stream(self, self.add_spout(name, source))

    def following(self, output: OutputStream) -> Stream:
        """Go on from a bolt's output stream with the operations of a stream.

        Raises:
            TopologyError: it is none, or one of another topology.
        """
        if not isinstance(output, OutputStream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"topology {self.name!r}: following() goes on from a bolt's output stream, got {shown(output)}; give what "
                "t.bolt(...) or t.spout(...) returned"
            )
        self._require_own(output.graph, output.component, "following()")
        return Stream(self, output.component, output.stream)

    def merge(self, *streams: Stream, name: str | None = None) -> Stream:
        """The tuples of all of them as one stream, in no order. They must have the same fields.

        Raises:
            TopologyError: fewer than two are given, or their fields differ.
        """
        if len(streams) < 2:
            raise TopologyError(f"topology {self.name!r}: merge needs at least two streams, got {len(streams)}")
        for stream in streams:
            _require_of(self, stream, "merge")
        inputs = [stream.subscription for stream in streams]
        return Stream(self, self.add_operation(name, inputs, OperationKind.PROJECT, merge, fields=(), schema=None))

    def join(
        self,
        left: Stream,
        right: Stream,
        on: str | Sequence[str] | Mapping[str, str],
        *,
        how: str = "inner",
        name: str | None = None,
    ) -> Stream:
        """The tuples of both streams whose keys are equal, joined within a batch.

        `on` names the keys; a mapping where the right side calls them otherwise. `how` is inner, left, right or full:
        whose tuples go on without a partner, with NULLs for the other side's fields. Duplicates multiply. A NULL key
        matches nothing. The result has the keys, then the other fields of the left, then those of the right side; it is
        anchored to the messages of both sides, so that a failure behind it is a failure of both.

        *Not guaranteed*: tuples that come in different batches never meet; keep one side in a State for that.

        Raises:
            TopologyError: a key is unknown or has different types, or another field stands on both sides.
        """
        for stream in (left, right):
            _require_of(self, stream, "join")
        keys = join_keys(on, f"topology {self.name!r}: join of {left.name!r} and {right.name!r}")
        one, other = left.settled(), right.settled()
        hints = {s.hint for s in (one, other) if s.hint is not None}
        if len(hints) > 1:
            raise TopologyError(
                f"topology {self.name!r}: join of {left.name!r} and {right.name!r}: the sides ask for different numbers "
                f"of tasks: {' and '.join(map(str, sorted(hints)))}; give both one parallelism"
            )
        tasks = next(iter(hints), None)
        sides = [
            replace(side.subscription, grouping=Grouping(GroupingKind.FIELDS, tuple(names)), tasks=tasks)
            for side, names in ((one, keys.keys()), (other, keys.values()))
        ]
        return Stream(self, self.add_join(name, sides[0], sides[1], keys, how))

    def validate(self) -> None:
        """Check what can only be seen at the end.

        Raises:
            TopologyError: see `TopologyGraph.validate`; or a state query names no state of this topology.
        """
        super().validate()
        from stormproof.trident.query import check_queries

        check_queries(self)

    def explain(self, guarantee: Guarantee | str | None = None) -> Explanation:
        """What it compiles to: stages, tasks, exchanges, what was fused, sinks; `str` of it is for people.

        Raises:
            TopologyError: it cannot run under this guarantee (default: its own).
        """
        from stormproof.trident.explain import explain

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
        """What `df.writeStream.foreachBatch(...)` is given, so that a streaming query feeds this topology: see `feed`.

        Raises:
            TopologyError: it cannot be run so, or its one source is no `MicroBatches`.
        """
        from stormproof.trident.streaming.api import feed

        chosen = self._chosen(guarantee)
        return feed(self, chosen, adopt=adopt, settings=settings, options=options, on_batch=on_batch)

    def run(
        self,
        guarantee: Guarantee | str | None = None,
        *,
        settings: Settings | None = None,
        engine: EngineChoice = "spark",
        options: RunOptions | None = None,
        until_idle: bool = False,
        max_batches: int | None = None,
        on_batch: Callable[[BatchResult], None] | None = None,
        on_ready: Callable[[Coordinator], None] | None = None,
    ) -> RunStatistics:
        """Run it until nothing is left to read (`until_idle`), or for `max_batches`, or until it is stopped: see `run`.

        Raises:
            TopologyError: it cannot be run so, or a function of it cannot be sent to a worker.
            SettingsError: a setting is missing or wrong.
            Fenced: another driver took over.
            FatalError: going on could lose or double a message; what to inspect is named.
            TransientError: a store or a machine stayed away for `outage_s`.
        """
        from stormproof.trident.run import run  # the driver is not needed to build a topology

        return run(
            self,
            self._chosen(guarantee),
            settings=settings,
            engine=engine,
            options=options,
            until_idle=until_idle,
            max_batches=max_batches,
            on_batch=on_batch,
            on_ready=on_ready,
        )

    def _chosen(self, guarantee: Guarantee | str | None) -> Guarantee | None:
        return None if guarantee is None else as_guarantee(guarantee, f"topology {self.name!r}")


class Stream:
    """The tuples that a component gives. Each operation makes a new stream; several may follow the same one.

    Functions get the named fields as arguments, or all fields in order where none is named. With one field in the schema
    a result is that field's value itself; with several it is a tuple or list in the schema's order, or a dict with exactly
    its keys. A function that raises fails the message, not the batch. Operations run in the task that has the tuple;
    `shuffle` and its like, groups and joins are what moves tuples to other tasks.
    """

    def __init__(
        self, topology: Topology, component: str, stream: str = DEFAULT_STREAM, *, hint: int | None = None
    ) -> None:
        self._topology = topology
        self._component = component
        self._input = Subscription(component, stream)
        self._hint = hint

    @property
    def name(self) -> str:
        """The component that gives these tuples."""
        return self._component

    @property
    def schema(self) -> pa.Schema:
        """The fields of these tuples."""
        return self._topology.schema_of(self._component, self._input.stream)

    @property
    def topology(self) -> Topology:
        """The topology that it is part of."""
        return self._topology

    @property
    def output(self) -> OutputStream:
        """The same tuples as a bolt subscribes to them: `t.bolt(name, bolt, words.output.fields("word"))`."""
        settled = self.settled()
        return OutputStream(self._topology, settled.subscription.component, settled.subscription.stream)

    @property
    def subscription(self) -> Subscription:
        """How the next operation takes these tuples."""
        return self._input

    @property
    def hint(self) -> int | None:
        """How many tasks the next exchange is to lead to."""
        return self._hint

    # -- operations on each tuple --------------------------------------------------------------------------------------

    def map(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """One tuple for each; what the function gives replaces it."""
        return self._operation(name, OperationKind.MAP, function, fields, schema)

    def flat_map(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """Any number of tuples for each: the function gives an iterable of results, or yields them."""
        return self._operation(name, OperationKind.FLAT_MAP, function, fields, schema)

    def each(
        self,
        function: UserFunction,
        *fields: str,
        schema: SchemaLike,
        many: bool = False,
        name: str | None = None,
    ) -> Stream:
        """The tuple with what the function gives as further fields, which `schema` names.

        `many`: the function gives an iterable of results, and the tuple is repeated for each of them; for none it ends.

        Raises:
            TopologyError: a new field has the name of one that is there.
        """
        kind = OperationKind.FLAT_EACH if many else OperationKind.EACH
        return self._operation(name, kind, function, fields, schema)

    def filter(self, function: UserFunction, *fields: str, name: str | None = None) -> Stream:
        """Only the tuples for which the function gives something true; their fields stay."""
        return self._operation(name, OperationKind.FILTER, function, fields, None)

    def project(self, *fields: str, name: str | None = None, **renamed: str) -> Stream:
        """Only these fields, in this order, then others under new names: `project("id", total="amount")`.

        Raises:
            TopologyError: a field is unknown, none is named, or a name stands twice.
        """
        import pyarrow as pa

        given, where = self.schema, f"project after {self._component!r}"
        names = [*((f, f) for f in fields), *renamed.items()]
        if not names:
            raise TopologyError(
                f"component {self._component!r}: project needs at least one field; known: {', '.join(given.names)}",
                component=self._component,
            )
        taken = [old for _, old in names]
        require_fields(where, self._component, taken, given)
        renamed_fields = pa.schema([given.field(old).with_name(new) for new, old in names])
        schema = schema_for(where, self._component, renamed_fields)
        return self._operation(name, OperationKind.PROJECT, project, tuple(taken), schema)

    def peek(self, function: UserFunction, *fields: str, name: str | None = None) -> Stream:
        """Show each tuple to a function; what it gives is ignored, and the tuple goes on as it is.

        *Not guaranteed*: that it is called once. Spark may run a task again, and a batch is tried again after a failure:
        it is for looking, not for effects that matter; those belong into a sink.
        """
        return self._operation(name, OperationKind.PEEK, function, fields, None)

    def arrow(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """Whole record batches: the function gets one, and gives another and, for each row of that, the number of the
        row that it was made of.

        Columns are taken by name. A function that raises is called again with halves of the batch, until the tuples
        that make it raise stand alone and only their messages fail: a row's results must not depend on other rows.
        """
        return self._operation(name, OperationKind.ARROW, function, fields, schema)

    # -- where tuples go -----------------------------------------------------------------------------------------------

    def shuffle(self) -> Stream:
        """Evenly over the tasks of what follows."""
        return self._repartition(Grouping(GroupingKind.SHUFFLE))

    def partition_by(self, *fields: str) -> Stream:
        """Tuples of a batch with equal values in these fields go to one task.

        Raises:
            TopologyError: a field is unknown or cannot be a key.
        """
        return self._repartition(Grouping(GroupingKind.FIELDS, fields))

    def broadcast(self) -> Stream:
        """Every task of what follows gets a copy of every tuple; the tracking counts each."""
        return self._repartition(Grouping(GroupingKind.ALL))

    def global_(self) -> Stream:
        """All tuples go to one task, the first."""
        return self._repartition(Grouping(GroupingKind.GLOBAL))

    def batch_global(self) -> Stream:
        """All tuples of a batch go to one task.

        In Trident that may be another task for another batch. Here the tasks of a batch end with it and no two batches
        share any, so it is the same as `global_`.
        """
        return self.global_()

    def partition(self, function: Callable[[pa.RecordBatch, int], object]) -> Stream:
        """The task that `function(rows, tasks)` gives for each row, as an array of task numbers."""
        return self._repartition(Grouping(GroupingKind.CUSTOM, (), function))

    def parallelism(self, tasks: int) -> Stream:
        """Ask for a number of tasks behind an exchange: the one just named (`shuffle().parallelism(8)`), else the next.

        It holds for what follows up to the exchange after that. A stage has as many tasks as the largest number that is
        asked for in it; the tasks that read the source are as many as the engine gives it.

        Raises:
            TopologyError: it is no number of tasks; and later, at `into`, if no exchange came.
        """
        checked_tasks(tasks, self._component)
        if self._input.grouping.fused:
            return self._like(self._input, tasks)
        return self._like(replace(self._input, tasks=tasks), None)

    # -- groups --------------------------------------------------------------------------------------------------------

    def group_by(self, *fields: str) -> GroupedStream:
        """Groups by equal values. A NULL key fails its message.

        Raises:
            TopologyError: no field is named, or one is unknown.
        """
        if not fields:
            raise TopologyError(
                f"component {self._component!r}: group_by needs at least one field; known: "
                f"{', '.join(self.schema.names)}; for all tuples together use aggregate(...)",
                component=self._component,
            )
        require_fields(f"group_by after {self._component!r}", self._component, fields, self.schema)
        return GroupedStream(self, fields)

    def partition_aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One result for what each task has of a batch, without an exchange. A task without tuples gives none."""
        return self._grouped((), several, results, name=name, local=True)

    def aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One result for all tuples of a batch; also where there are none: counts and sums are 0 then.

        What combines (ready aggregates, combiners) is combined in each task before everything goes to one.
        """
        return self._grouped((), several, results, name=name)

    def persistent_aggregate(
        self,
        *several: SeveralResults,
        name: str | None = None,
        state: StateFactory | None = None,
        state_name: str | None = None,
        **results: OneResult,
    ) -> Stream:
        """One result for all tuples, folded across batches; see `GroupedStream.persistent_aggregate`.

        What is held is held by key, so the result has one more column, the key `everything`, which is always true.
        """
        require_state(self._component, state, state_name)
        fields = tuple(self.schema.names)  # what an aggregate of all fields is of; not the key
        given = {output: over(one, fields) for output, one in results.items()}
        keyed = self.arrow(everything, schema=with_key(self.schema))
        return keyed.group_by(EVERYTHING).persistent_aggregate(
            *(over(one, fields) for one in several), name=name, state=state, state_name=state_name, **given
        )

    # -- several streams -----------------------------------------------------------------------------------------------

    def merge(self, *others: Stream, name: str | None = None) -> Stream:
        """See `Topology.merge`."""
        return self._topology.merge(self, *others, name=name)

    def join(
        self,
        right: Stream,
        on: str | Sequence[str] | Mapping[str, str],
        *,
        how: str = "inner",
        name: str | None = None,
    ) -> Stream:
        """See `Topology.join`."""
        return self._topology.join(self, right, on, how=how, name=name)

    def into(self, *sinks: SinkSpec) -> Stream:
        """End in sinks: each gets every tuple. Returns the same stream, which may have other followers.

        Raises:
            TopologyError: no sink is given, two have one name, or one cannot take these tuples.
        """
        if not sinks:
            raise TopologyError(
                f"component {self._component!r}: into() needs at least one sink", component=self._component
            )
        if self._hint is not None:
            raise TopologyError(
                f"component {self._component!r}: parallelism({self._hint}) has no exchange behind it, and the tasks "
                "before it are as many as they are; put shuffle(), partition_by(...), a group or a join between it and "
                "the sink",
                component=self._component,
            )
        settled = self.settled()
        for sink in sinks:
            self._topology.add_sink(settled.subscription, sink)
        return settled

    def state_query(
        self,
        state: str,
        *fields: str,
        schema: SchemaLike,
        query: Query | None = None,
        name: str | None = None,
    ) -> Stream:
        """The tuple with what a state of this topology holds for it, as further fields, which `schema` names.

        `state` is its name among the sinks; `fields` are looked up, in the order of its keys. `query(state, keys)` gives a
        record batch with one row for each of a record batch's keys; by default they are all values that a map holds, in
        its order, NULLs where that is nothing; `schema` may name them anew. A batch sees what all batches before it
        committed, and nothing of its own: the topology's batches run one at a time then.

        Raises:
            TopologyError: no field is named, or one is unknown; the schema is none; the query does not take a state and
                keys; and when it is compiled, if there is no such state, or its keys or values differ.
        """
        import pyarrow as pa

        from stormproof.trident.query import state_query

        bolt = state_query(self._component, self.schema, state, fields, schema, query)
        made = self._topology.add_reader(name, self._input, bolt, pa.schema([*self.schema, *bolt.found]))
        return Stream(self._topology, made, hint=self._hint)

    def new_values_stream(self, *, name: str | None = None) -> Stream:
        """The keys of a persistent aggregate that a batch touched, with what its state will hold once it is committed.

        It is computed from what the state holds before the batch, so the topology's batches run one at a time.

        Raises:
            TopologyError: this is no persistent aggregate with a state.
        """
        from stormproof.trident.query import new_values

        bolt = new_values(self._topology, self._component, self._input.stream)
        return Stream(self._topology, self._topology.add_reader(name, self._input, bolt, self.schema))

    def partition_persist(
        self, name: str, state: StateFactory, updater: StateUpdater, *, keys: Sequence[str] = ()
    ) -> Stream:
        """End in a state of one's own, by an updater of one's own. Returns the same stream.

        Each batch's rows reach the updater between `begin_commit` and `commit` of its txid, in the driver, one record batch
        after the other, in the same order whenever the txid comes again.

        Raises:
            TopologyError: the state cannot hold such rows, or serve the guarantee; or one of the arguments is of the wrong
                kind.
        """
        from stormproof.trident.state.checks import require_keys, require_updater
        from stormproof.trident.state.sink import StateSink

        require_updater(updater, f"state {name!r}", name)
        require_keys(keys, f"state {name!r}", name)
        return self.into(StateSink(name, state, updater=updater, keys=tuple(keys)))

    def settled(self) -> Stream:
        """The same tuples where a repartition has brought them."""
        if self._input.grouping.fused:
            return self
        return self._operation(None, OperationKind.PROJECT, repartition, (), None)

    def _like(self, input_: Subscription, hint: int | None) -> Stream:
        made = Stream(self._topology, self._component, self._input.stream, hint=hint)
        made._input = input_
        return made

    def _repartition(self, grouping: Grouping) -> Stream:
        settled = self.settled()
        grouping.check(settled.schema, settled.name)
        return settled._like(replace(settled._input, grouping=grouping, tasks=self._hint), None)

    def _operation(
        self,
        name: str | None,
        kind: OperationKind,
        function: UserFunction,
        fields: tuple[str, ...],
        schema: SchemaLike | None,
    ) -> Stream:
        made = self._topology.add_operation(name, [self._input], kind, function, fields=fields, schema=schema)
        return Stream(self._topology, made, hint=self._hint)

    def _grouped(
        self,
        keys: tuple[str, ...],
        several: tuple[SeveralResults, ...],
        results: Mapping[str, OneResult],
        *,
        name: str | None,
        persistent: bool = False,
        local: bool = False,
    ) -> Stream:
        aggregations = named(self._component, self.schema, several, dict(results))
        settled = self.settled()
        input_ = settled._input if local else replace(settled._input, tasks=settled._hint)
        made = self._topology.add_aggregate(name, input_, keys, aggregations, persistent=persistent, local=local)
        return Stream(self._topology, made, hint=settled._hint if local else None)


class GroupedStream:
    """Tuples grouped by key, waiting for what is to be computed of each group.

    Each result stands under its keyword: a ready aggregate (`n=count()`), or a `CombinerAggregator` or
    `ReducerAggregator` of one's own. An `Aggregator` stands without a keyword and names its columns itself; where several
    give several rows, there is a row for each combination of them.
    """

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._stream = stream
        self._keys = keys

    def parallelism(self, tasks: int) -> GroupedStream:
        """Ask for a number of tasks that the groups are divided among.

        Raises:
            TopologyError: it is no number of tasks.
        """
        return GroupedStream(self._stream.settled().parallelism(tasks), self._keys)

    def agg(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One tuple a key and batch: the keys, then each result."""
        return self._aggregate(several, results, name=name)

    def aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """The same as `agg`, by Trident's name."""
        return self.agg(*several, name=name, **results)

    def partition_aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One tuple a key and task: each task groups what it has, without an exchange."""
        return self._aggregate(several, results, name=name, local=True)

    def persistent_aggregate(
        self,
        *several: SeveralResults,
        name: str | None = None,
        state: StateFactory | None = None,
        state_name: str | None = None,
        **results: OneResult,
    ) -> Stream:
        """The same as `agg`, folded across batches: into what `state` holds for the key, or the sinks of `into`. Only
        `into` can follow.

        Sinks fold count(), sum_(), min_() and max_(), a state also combiners. Others are refused: of two batches' means,
        say, nobody could make one. `state_name` is the state's name among the sinks (default: the component's
        with `-state` behind it).

        Raises:
            TopologyError: a result cannot be folded, or the state cannot hold it or serve the guarantee.
        """
        require_state(self._stream.name, state, state_name)
        made = self._aggregate(several, results, name=name, persistent=True)
        if state is not None:
            from stormproof.trident.state.sink import StateSink

            made.into(
                StateSink(
                    state_name or f"{made.name}-state", state, merges=own_merges(self._stream.topology, made.name)
                )
            )
        return made

    def _aggregate(
        self,
        several: tuple[SeveralResults, ...],
        results: Mapping[str, OneResult],
        *,
        name: str | None,
        persistent: bool = False,
        local: bool = False,
    ) -> Stream:
        return self._stream._grouped(  # pyright: ignore[reportPrivateUsage] - the other half of one class
            self._keys, several, results, name=name, persistent=persistent, local=local
        )


def _require_of(topology: Topology, stream: object, operation: str) -> None:
    if not isinstance(stream, Stream):
        instead = "finish its groups with .agg(...)" if isinstance(stream, GroupedStream) else "give a Stream"
        if isinstance(stream, OutputStream):
            instead = "make it one with t.following(...)"
        raise TopologyError(
            f"topology {topology.name!r}: {operation} of {shown(stream)}, which is no stream; {instead}"
        )
    if stream.topology is not topology:
        raise TopologyError(
            f"stream {stream.name!r} belongs to topology {stream.topology.name!r}, not to {topology.name!r}: begin both in "
            "one object",
            component=stream.name,
        )
