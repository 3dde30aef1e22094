"""Builds a topology stream by stream: `Topology`, `Stream` and `GroupedStream`, which users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.contract.schema import SchemaLike, require_fields
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.contract.source import Source
from stormproof.core.graph.checks import checked_tasks, schema_for
from stormproof.core.graph.components import (
    Grouping,
    GroupingKind,
    OperationKind,
    OutputStream,
    Subscription,
    UserFunction,
)
from stormproof.trident.topology.aggregate import (
    EVERYTHING,
    OneResult,
    SeveralResults,
    everything,
    kept_across_batches,
    named,
    over,
    own_merges,
    require_state,
    with_key,
    with_marks,
)
from stormproof.trident.topology.runnable_topology import RunnableTopology

if TYPE_CHECKING:
    import pyarrow as pa

    from stormproof.trident.state.protocol import StateFactory, StateUpdater
    from stormproof.trident.state.query import Query


class Topology(RunnableTopology):
    """A topology, built stream by stream; the same object runs under every guarantee.

    Each component is checked as it is added, and the whole topology before it runs.

    Threads: one thread at a time builds it; once it is built, any number may run or read it. Two runs of one topology fence
    each other, also within one process: the later one goes on, the earlier one stops with `Fenced`.
    Forks: a forked process may run it. A fork that a user's function makes never goes on with its parent's run: it ends
    where it returns from that function.
    """

    def stream(self, name: str, source: Source) -> Stream:
        """The messages of a source, decoded by its schema: a stream to begin with.

        Raises:
            TopologyError: the name is taken or cannot be one, or the same source is there already.
        """
        return Stream(self, self.add_spout(name, source))

    def following(self, output: OutputStream) -> Stream:
        """A bolt's output stream as a `Stream`, with its operations.

        Raises:
            TopologyError: it is no output stream, or one of another topology.
        """
        if not isinstance(output, OutputStream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"topology {self.name!r}: following() goes on from a bolt's output stream, got {shown(output)}; give what "
                "t.bolt(...) or t.spout(...) returned"
            )
        self._require_own(output.graph, output.component, "following()")
        return Stream(self, output.component, output.stream)

    def merge(self, *streams: Stream, name: str | None = None) -> Stream:
        """The tuples of all these streams as one, in no particular order. They must have the same fields.

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

        `on` names the keys: as a mapping from the left side's names to the right side's where they differ. `how` is inner,
        left, right or full: the sides whose tuples go on without a partner, with NULLs for the other side's fields.
        Duplicates multiply. A NULL key matches nothing. The result has the keys, then the other fields of the left side,
        then those of the right side. It is anchored to the messages of both sides, so a failure behind it fails both.

        *Not guaranteed*: tuples of different batches are never joined; keep one side in a State for that.

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


class Stream:
    """The tuples that a component gives. Each operation makes a new stream; several may follow the same one.

    A function gets the named fields as arguments, or all fields in order where none is named. With one field in the schema
    its result is that field's value itself; with several it is a tuple or list in the schema's order, or a dict with
    exactly its keys. A function that raises fails the message, not the batch. An operation runs in the task that has the
    tuple; only `shuffle` and the other repartitions, groups and joins move tuples to other tasks.

    `concurrency` is for functions that wait, for a service or a disk: how many calls a task makes at a time, in threads. A
    function may be `async`; 16 calls at a time are then the default. Results keep the order of the tuples. A call that is
    not over within `message_timeout_s` of its start fails its message, and no other. See docs/slow_service.md.
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
        """The topology that the stream is part of."""
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

    def map(
        self,
        function: UserFunction,
        *fields: str,
        schema: SchemaLike,
        concurrency: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """One tuple for each tuple: the function's result replaces it."""
        return self._operation(name, OperationKind.MAP, function, fields, schema, concurrency)

    def flat_map(
        self,
        function: UserFunction,
        *fields: str,
        schema: SchemaLike,
        concurrency: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """Any number of tuples for each tuple: the function returns an iterable of results, or yields them."""
        return self._operation(name, OperationKind.FLAT_MAP, function, fields, schema, concurrency)

    def each(
        self,
        function: UserFunction,
        *fields: str,
        schema: SchemaLike,
        many: bool = False,
        concurrency: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """The tuple with the function's result as further fields, which `schema` names.

        `many`: the function gives an iterable of results, and the tuple is repeated for each; without a result it ends.

        Raises:
            TopologyError: a new field has the name of a field that is there already.
        """
        kind = OperationKind.FLAT_EACH if many else OperationKind.EACH
        return self._operation(name, kind, function, fields, schema, concurrency)

    def filter(
        self, function: UserFunction, *fields: str, concurrency: int | None = None, name: str | None = None
    ) -> Stream:
        """Only the tuples for which the function returns something true; their fields stay."""
        return self._operation(name, OperationKind.FILTER, function, fields, None, concurrency)

    def project(self, *fields: str, name: str | None = None, **renamed: str) -> Stream:
        """Only these fields, in this order, then others under new names: `project("id", total="amount")`.

        Raises:
            TopologyError: a field is unknown, no field is named, or two results have one name.
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

    def peek(
        self, function: UserFunction, *fields: str, concurrency: int | None = None, name: str | None = None
    ) -> Stream:
        """Call a function with each tuple and ignore its result; the tuple goes on unchanged.

        *Not guaranteed*: that it is called once a tuple. Spark may run a task again, and a batch is tried again after a
        failure. It is for debugging; effects that matter belong in a sink.
        """
        return self._operation(name, OperationKind.PEEK, function, fields, None, concurrency)

    def arrow(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """Whole record batches: the function gets one, and returns another with, for each of its rows, the number of the
        row that it was made from.

        Columns are taken by name. A function that raises is called again with halves of the batch, until the tuples that
        make it raise stand alone and only their messages fail: a row's results must not depend on other rows.
        """
        return self._operation(name, OperationKind.ARROW, function, fields, schema)

    # -- where tuples go -----------------------------------------------------------------------------------------------

    def shuffle(self) -> Stream:
        """Distribute the tuples evenly over the tasks that follow."""
        return self._repartition(Grouping(GroupingKind.SHUFFLE))

    def partition_by(self, *fields: str) -> Stream:
        """Send the tuples of a batch with equal values in these fields to one task.

        Raises:
            TopologyError: a field is unknown or cannot be a key.
        """
        return self._repartition(Grouping(GroupingKind.FIELDS, fields))

    def broadcast(self) -> Stream:
        """Send a copy of every tuple to every task that follows; the tracking counts each copy."""
        return self._repartition(Grouping(GroupingKind.ALL))

    def global_(self) -> Stream:
        """Send all tuples to one task, the first."""
        return self._repartition(Grouping(GroupingKind.GLOBAL))

    def batch_global(self) -> Stream:
        """Send all tuples of a batch to one task: the same as `global_`.

        In Trident, batches may go to different tasks. Here each batch has tasks of its own, so there is no difference.
        """
        return self.global_()

    def partition(self, function: Callable[[pa.RecordBatch, int], object]) -> Stream:
        """Send each row to the task that `function(rows, tasks)` gives for it: an array of task numbers, one a row."""
        return self._repartition(Grouping(GroupingKind.CUSTOM, (), function))

    def parallelism(self, tasks: int) -> Stream:
        """Ask for a number of tasks behind an exchange: the one just named (`shuffle().parallelism(8)`), else the next.

        It holds up to the exchange after that. A stage has as many tasks as the largest number that is asked for in it. The
        engine chooses the number of tasks that read the source.

        Raises:
            TopologyError: it is no number of tasks; and later, at `into`, if no exchange followed.
        """
        checked_tasks(tasks, self._component)
        if self._input.grouping.fused:
            return self._like(self._input, tasks)
        return self._like(replace(self._input, tasks=tasks), None)

    # -- groups --------------------------------------------------------------------------------------------------------

    def group_by(self, *fields: str) -> GroupedStream:
        """Group the tuples by equal values of these fields. A NULL key fails its message.

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
        """One result a task for its tuples of a batch, without an exchange. A task without tuples gives no result."""
        return self._grouped((), several, results, name=name, local=True)

    def aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One result for all tuples of a batch, also for a batch without tuples: counts and sums are 0 then.

        Ready aggregates and combiners are combined in each task before the exchange to one task.
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

        A state holds its results by key, so the result has one more column: the key `everything`, which is always true.
        """
        require_state(self._component, state, state_name)
        fields = tuple(self.schema.names)  # an aggregate that names no field is of these; the key is not among them
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
        """Write to sinks: each gets every tuple. Returns the same stream, which may have other followers.

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

        `state` is the state's name among the sinks; `fields` are looked up, in the order of its keys. `query(state, keys)`
        returns a record batch with one row for each row of `keys`. Without a query the fields are all values that a map
        holds, in its order, under the names of `schema`, with NULLs where it holds nothing. A batch sees what all batches
        before it committed, and nothing of its own, so the topology's batches run one at a time.

        Raises:
            TopologyError: no field is named, or one is unknown; the schema is not valid; the query does not take a state
                and keys; and when it is compiled, if there is no such state, or its keys or values differ.
        """
        import pyarrow as pa

        from stormproof.trident.state.query import state_query

        bolt = state_query(self._component, self.schema, state, fields, schema, query)
        made = self._topology.add_reader(name, self._input, bolt, pa.schema([*self.schema, *bolt.found]))
        return Stream(self._topology, made, hint=self._hint)

    def new_values_stream(self, *, name: str | None = None) -> Stream:
        """The keys of a persistent aggregate that a batch touches, with what its state will hold once it is committed.

        The values are computed from what the state holds before the batch, so the topology's batches run one at a time.

        Raises:
            TopologyError: this is no persistent aggregate with a state.
        """
        from stormproof.trident.state.query import new_values

        bolt = new_values(self._topology, self._component, self._input.stream)
        return Stream(self._topology, self._topology.add_reader(name, self._input, bolt, self.schema))

    def partition_persist(
        self, name: str, state: StateFactory, updater: StateUpdater, *, keys: Sequence[str] = ()
    ) -> Stream:
        """Write to a state through an updater of your own. Returns the same stream.

        The updater gets each batch's rows in the driver, between `begin_commit` and `commit` of its txid, one record batch
        after the other, in the same order whenever the txid is repeated.

        Raises:
            TopologyError: the state cannot hold such rows, or serve the guarantee; or one of the arguments is of the wrong
                kind.
        """
        from stormproof.trident.state.matrix import require_keys, require_updater
        from stormproof.trident.state.sink import StateSink

        require_updater(updater, f"state {name!r}", name)
        require_keys(keys, f"state {name!r}", name)
        return self.into(StateSink(name, state, updater=updater, keys=tuple(keys)))

    def settled(self) -> Stream:
        """The same tuples behind the repartition that was asked for last; the stream itself where none was."""
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
        concurrency: int | None = None,
    ) -> Stream:
        made = self._topology.add_operation(
            name, [self._input], kind, function, fields=fields, schema=schema, concurrency=concurrency
        )
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
        aggregations = kept_across_batches(aggregations) if persistent else with_marks(aggregations)
        settled = self.settled()
        input_ = settled._input if local else replace(settled._input, tasks=settled._hint)
        made = self._topology.add_aggregate(name, input_, keys, aggregations, persistent=persistent, local=local)
        return Stream(self._topology, made, hint=settled._hint if local else None)


class GroupedStream:
    """Tuples grouped by key, before it is said what is computed of each group.

    A keyword names each result: a ready aggregate (`n=count()`), or a `CombinerAggregator` or `ReducerAggregator` of your
    own. An `Aggregator` is given without a keyword and names its columns itself; where several of them give several rows,
    there is a row for each combination.
    """

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._stream = stream
        self._keys = keys

    def parallelism(self, tasks: int) -> GroupedStream:
        """Ask for a number of tasks among which the groups are divided.

        Raises:
            TopologyError: it is no number of tasks.
        """
        return GroupedStream(self._stream.settled().parallelism(tasks), self._keys)

    def agg(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One tuple a key and batch: the keys, then each result."""
        return self._aggregate(several, results, name=name)

    def aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """The same as `agg`, under Trident's name."""
        return self.agg(*several, name=name, **results)

    def partition_aggregate(self, *several: SeveralResults, name: str | None = None, **results: OneResult) -> Stream:
        """One tuple a key and task: each task groups its own tuples, without an exchange."""
        return self._aggregate(several, results, name=name, local=True)

    def persistent_aggregate(
        self,
        *several: SeveralResults,
        name: str | None = None,
        state: StateFactory | None = None,
        state_name: str | None = None,
        **results: OneResult,
    ) -> Stream:
        """The same as `agg`, folded across batches: into what `state` holds for the key, or into the sinks of `into`, which
        is all that can follow.

        Sinks fold count(), sum_(), min_() and max_(), a state also combiners. A mean is kept as its sum and its count, in
        the columns ``NAME_sum`` and ``NAME_count``; a Postgres table that is made here shows it as the generated column
        ``NAME``. Sinks alone keep a first() or last(), as ``NAME`` and ``NAME_FIELD`` for each field of its order, and a
        collect_set() with a bound, as ``NAME`` and ``NAME_truncated``. Others are refused: two batches' distinct counts, for
        example, do not make one. `state_name` is the state's name among the sinks (default: the component's name followed by
        `-state`).

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
    """Gives a projection's component its name; never called."""
    return values


def merge(*values: object) -> object:
    """Gives a merge's component its name; never called."""
    return values


def repartition(*values: object) -> object:
    """Gives its name to the component between a repartition and a follower that cannot take one itself; never called."""
    return values
