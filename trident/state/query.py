"""Bolts that read a state while a batch runs: queries, and the new values of a persistent aggregate.

The executors open the state from its factory. A batch sees what all batches before it committed, and nothing of its own, so
a topology with such a bolt runs its batches one at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import BoltUnavailable, TopologyError, TransientError
from stormproof.core.bolt import ArrowBolt, BoltContext
from stormproof.core.bolt.api import ArrowRows
from stormproof.core.contract.schema import SchemaLike, require_fields
from stormproof.core.graph.checks import schema_for
from stormproof.core.graph.components import Aggregate, BoltComponent, SinkComponent
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.user_code.functions import refuse_unfit_call
from stormproof.trident.state.protocol import MapState, State
from stormproof.trident.state.sink import StateReader, StateSink

Query: TypeAlias = Callable[[State, pa.RecordBatch], pa.RecordBatch]
"""From a state and a record batch of keys: a record batch with one row for each key."""


def map_get(state: State, keys: pa.RecordBatch) -> pa.RecordBatch:
    """What a map holds for each key; NULLs where it holds nothing."""
    return cast("MapState", state).multi_get(keys)


class ReadsState(ArrowBolt):
    """A bolt that reads the state of one of its topology's sinks."""

    def __init__(self, state: str, fields: tuple[str, ...]) -> None:
        self.state = state
        self.fields = fields
        self._open: State | None = None

    def prepare(self, context: BoltContext, /) -> None:
        """Open the state for reading."""
        reader = context.params.get(f"state:{self.state}")
        if not isinstance(reader, StateReader):
            raise LookupError(f"there is no state {self.state!r} to be read here")
        self._open = reader.open()

    @abstractmethod
    def answer(self, state: State, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The state's answer: one row for each row of `rows`."""

    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows:
        """One row for each row of `rows`.

        Raises:
            BoltUnavailable: the state did not answer; no message is to blame.
        """
        assert self._open is not None
        try:
            return self.answer(self._open, rows), np.arange(rows.num_rows)
        except TransientError as error:
            raise BoltUnavailable(
                f"state {self.state!r} did not answer a query: {error.message}", component=self.state
            ) from error

    def cleanup(self) -> None:
        """Close the state."""
        if self._open is not None:
            self._open.close()

    def keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The fields that are looked up, under the names of the state's keys."""
        context = cast("MapState", self._open).context
        return pa.RecordBatch.from_arrays([rows.column(f) for f in self.fields], schema=context.key_schema)


class StateQuery(ReadsState):
    """Each tuple with what a query finds for it."""

    def __init__(self, state: str, fields: tuple[str, ...], query: Query, found: pa.Schema) -> None:
        super().__init__(state, fields)
        self.found = found
        """The fields that the query gives."""
        self._query = query

    @property
    def own_query(self) -> Query | None:
        """The user's query; None where the values of a map are read."""
        return None if self._query is map_get else self._query

    def check_values(self, component: str, held: pa.Schema) -> None:
        """Check that the values that a map holds (`held`) fit the fields that the tuples get; a user's query is not checked.

        The values come in the map's order and may get new names, but not the name of another value.

        Raises:
            TopologyError: their number, their types or their order differs.
        """
        if self.own_query is not None:
            return
        pairs = zip(self.found, held, strict=False)
        fits = len(self.found) == len(held) and all(f.type == h.type for f, h in pairs)
        moved = [f.name for i, f in enumerate(self.found) if f.name in held.names and held.names.index(f.name) != i]
        if not fits or moved:
            wanted = ", ".join(f"{f.name} {f.type}" for f in self.found)
            raise TopologyError(
                f"component {component!r} wants {wanted} of state {self.state!r}, which gives "
                f"{', '.join(f'{f.name} {f.type}' for f in held)}: name all of these in `schema`, in this order, or give a "
                "`query` of your own",
                component=component,
                state=self.state,
            )

    def answer(self, state: State, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The tuples with the columns that the query gave, in their order."""
        found = self._query(state, self.keys(rows))
        if found.num_rows != rows.num_rows or found.num_columns != len(self.found):
            raise ValueError(
                f"the query gave {found.num_rows} rows of {found.num_columns} columns for {rows.num_rows} keys; one row for "
                f"each is wanted, with {', '.join(self.found.names)}"
            )
        return pa.RecordBatch.from_arrays(
            [*rows.columns, *found.columns], names=[*rows.schema.names, *self.found.names]
        )


class NewValues(ReadsState):
    """Each result of a batch, folded into what the state holds: what it will hold once the batch is committed."""

    def answer(self, state: State, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The keys with their new values."""
        context = cast("MapState", state).context
        held = cast("MapState", state).multi_get(self.keys(rows))
        columns = {name: rows.column(name) for name in rows.schema.names}
        for name in context.value_schema.names:
            columns[name] = context.merges[name](held.column(name), columns[name])
        return pa.RecordBatch.from_arrays(list(columns.values()), names=rows.schema.names)


def state_query(
    component: str,
    given: pa.Schema,
    state: object,
    fields: tuple[str, ...],
    schema: SchemaLike,
    query: Query | None,
) -> StateQuery:
    """The bolt of a `state_query` behind `component`, which gives the fields `given`.

    Raises:
        TopologyError: an argument is not what `Stream.state_query` asks for.
    """
    where = f"state_query after {component!r}"
    if not isinstance(state, str):
        raise TopologyError(
            f"{where}: state is {shown(state)}; give the name that the state has among the topology's sinks, as in "
            "state_query('totals', ...)",
            component=component,
        )
    if not fields:
        raise TopologyError(
            f"{where}: it names no fields; name those that are looked up in state {state!r}, one for each of its keys, "
            f"as in state_query({state!r}, {given.names[0]!r}, ...); known: {', '.join(given.names)}",
            component=component,
        )
    require_fields(where, component, fields, given)
    found = schema_for(where, component, schema)
    if query is not None:
        if not callable(query):
            raise TopologyError(
                f"{where}: query is {shown(query)}; it must be a function query(state, keys)", component=component
            )
        instead = "write one like query(state, keys), which gives a row for each of the keys"
        refuse_unfit_call(component, where, query, ("state", "keys"), instead)
    return StateQuery(state, fields, query or map_get, found)


def new_values(topology: TopologyGraph, component: str, stream: str) -> NewValues:
    """The bolt of a `new_values_stream` behind `component`.

    Raises:
        TopologyError: this is no persistent aggregate with a state.
    """
    followers = [c for c, _ in topology.subscribers(component, stream)]
    states = [c for c in followers if isinstance(c, SinkComponent) and isinstance(c.spec, StateSink)]
    (own,) = (c for c in topology.components if c.name == component)
    if not isinstance(own, Aggregate) or not own.persistent or not states:
        raise TopologyError(
            f"component {component!r} has no new values: it is no persistent_aggregate(..., state=...)",
            component=component,
        )
    return NewValues(states[0].name, own.keys)


def check_queries(topology: TopologyGraph) -> None:
    """Check each query against its state, once the topology is complete.

    Raises:
        TopologyError: the topology has no such state, its keys have other types than the fields, or its values are not the
            ones that are asked for.
    """
    states = {
        c.name: (c.spec, c.input)
        for c in topology.components
        if isinstance(c, SinkComponent) and isinstance(c.spec, StateSink)
    }
    for component in topology.components:
        if not isinstance(component, BoltComponent) or not isinstance(component.bolt, ReadsState):
            continue
        bolt = component.bolt
        if bolt.state not in states:
            known = ", ".join(states) or "none"
            raise TopologyError(
                f"component {component.name!r} reads the state {bolt.state!r}, which is none of topology "
                f"{topology.name!r}; known: {known}; name one with persistent_aggregate(..., state=, state_name=)",
                component=component.name,
            )
        sink, input_ = states[bolt.state]
        keys = [input_.schema.field(k) for k in sink.keys_of(input_)]
        given = topology.schema_of(component.inputs[0].component, component.inputs[0].stream)
        fields = [given.field(f) for f in bolt.fields]
        if [k.type for k in keys] != [f.type for f in fields]:
            raise TopologyError(
                f"component {component.name!r} looks up {', '.join(f'{f.name} {f.type}' for f in fields)}; the keys of "
                f"state {bolt.state!r} are {', '.join(f'{k.name} {k.type}' for k in keys)}; name "
                "a field of that type for each of them, in their order",
                component=component.name,
            )
        if isinstance(bolt, StateQuery) and sink.is_map:
            bolt.check_values(
                component.name, pa.schema([f for f in input_.schema if f.name not in sink.keys_of(input_)])
            )
