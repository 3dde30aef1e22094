"""Topologies as streams: what users write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.errors import TopologyError
from stormproof.core.guarantee import Guarantee
from stormproof.core.schema import SchemaLike, parse_schema
from stormproof.core.sink import SinkSpec
from stormproof.core.source.protocol import Source
from stormproof.core.topology import (
    OperationKind,
    OutputStream,
    Subscription,
    TopologyGraph,
    UserFunction,
)
from stormproof.trident.aggregate import Aggregator

if TYPE_CHECKING:
    import pyarrow as pa


class Topology(TopologyGraph):
    """A topology, built stream by stream; the same object runs under every guarantee.

    Everything is checked as it is added, and once more as a whole before it runs.
    """

    def stream(self, name: str, source: Source) -> Stream:
        """Begin with a source's messages, decoded by its schema.

        Raises:
            TopologyError: there is a source already, or the name cannot be one.
        """
        return Stream(self, self.add_spout(name, source))

    def following(self, output: OutputStream) -> Stream:
        """Go on from a bolt's output stream with the operations of a stream."""
        return Stream(self, output.component, output.stream)

    def run(self, guarantee: Guarantee | str | None = None, **options: Any) -> Any:
        """Run it; `stormproof.trident.run` says how, and takes the options."""
        from stormproof.trident.run import run  # the driver is not needed to build a topology

        return run(self, guarantee, **options)


class Stream:
    """The tuples that a component gives. Each operation makes a new stream; several may follow the same one.

    Functions get the named fields as arguments, or all fields in order where none is named. What they give replaces
    their input. With one field in the schema a result is that field's value itself; with several it is a tuple or list
    in the schema's order, or a dict with exactly its keys. A function that raises fails the message, not the batch.
    """

    def __init__(self, topology: Topology, component: str, stream: str = DEFAULT_STREAM) -> None:
        self._topology = topology
        self._component = component
        self._input = Subscription(component, stream)

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
        return OutputStream(self._topology, self._component, self._input.stream)

    def map(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """One tuple for each."""
        return self._operation(name, OperationKind.MAP, function, fields, schema)

    def flat_map(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """Any number of tuples for each: the function gives an iterable of results, or yields them."""
        return self._operation(name, OperationKind.FLAT_MAP, function, fields, schema)

    def filter(self, function: UserFunction, *fields: str, name: str | None = None) -> Stream:
        """Only the tuples for which the function gives something true; their fields stay."""
        return self._operation(name, OperationKind.FILTER, function, fields, None)

    def arrow(self, function: UserFunction, *fields: str, schema: SchemaLike, name: str | None = None) -> Stream:
        """Whole record batches: the function gets one, and gives another and, for each row of that, the number of the
        row that it was made of.

        Columns are taken by name. A function that raises is called again with halves of the batch, until the tuples
        that make it raise stand alone and only their messages fail: a row's results must not depend on other rows.
        """
        return self._operation(name, OperationKind.ARROW, function, fields, schema)

    def group_by(self, *fields: str) -> GroupedStream:
        """Groups by equal values. A NULL key fails its message."""
        return GroupedStream(self._topology, self._input, fields)

    def into(self, *sinks: SinkSpec) -> Stream:
        """End in sinks: each gets every tuple. Returns the same stream, which may have other followers.

        Raises:
            TopologyError: no sink is given, two have one name, or one cannot take these tuples.
        """
        if not sinks:
            raise TopologyError(
                f"component {self._component!r}: into() needs at least one sink", component=self._component
            )
        for sink in sinks:
            self._topology.add_sink(self._input, sink)
        return self

    def _operation(
        self,
        name: str | None,
        kind: OperationKind,
        function: UserFunction,
        fields: tuple[str, ...],
        schema: SchemaLike | None,
    ) -> Stream:
        parsed = None if schema is None else parse_schema(schema)
        return Stream(
            self._topology,
            self._topology.add_operation(name, [self._input], kind, function, fields=fields, schema=parsed),
        )


class GroupedStream:
    """Tuples grouped by key, waiting for what is to be computed of each group."""

    def __init__(self, topology: Topology, input_: Subscription, keys: tuple[str, ...]) -> None:
        self._topology = topology
        self._input = input_
        self._keys = keys

    def agg(self, *, name: str | None = None, **results: Aggregator) -> Stream:
        """One tuple a key and batch: the keys, then each result under its name."""
        return self._aggregate(name, results, persistent=False)

    def persistent_aggregate(self, *, name: str | None = None, **results: Aggregator) -> Stream:
        """The same, folded across batches: added to what the sinks hold for the key. Only `into` can follow."""
        return self._aggregate(name, results, persistent=True)

    def _aggregate(self, name: str | None, results: dict[str, Aggregator], *, persistent: bool) -> Stream:
        for output, aggregator in results.items():
            if not isinstance(aggregator, Aggregator):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TopologyError(f"{output}={aggregator!r} is no aggregate; write count() or sum_('field')")
        named = [aggregator.named(output) for output, aggregator in results.items()]
        return Stream(
            self._topology,
            self._topology.add_aggregate(name, self._input, self._keys, named, persistent=persistent),
        )
