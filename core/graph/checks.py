"""Checks of a topology's components as they are added: each error names the component and what to write instead."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import pyarrow as pa

from stormproof.core.base.arguments import error_prefix, instead_of, lacks, shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.bolt import DEFAULT_STREAM, Streams
from stormproof.core.contract.fold import AnyFold, Fold
from stormproof.core.contract.schema import SchemaLike, parse_schema
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.graph.aggregation import AggregationKind, AnyAggregation, UserAggregation, UserKind
from stormproof.core.graph.components import GroupingKind, OperationKind, Subscription, UserFunction
from stormproof.core.user_code.functions import never_begins, refuse_unfit_call

NAME_MAX_CHARACTERS: Final = 64
TASKS_MAX: Final = 1_024
CONCURRENCY_MAX: Final = 1_024
ASYNC_CONCURRENCY: Final = 16
"""How many calls of an `async` function a task makes at a time, where nothing else is said."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_.-]")
_HASH_DIGITS: Final = 8
_OF_FIELDS: Final = {UserKind.COMBINER: "init", UserKind.REDUCER: "reduce", UserKind.AGGREGATOR: "aggregate"}
"""Which call of a user's aggregate gets a tuple's fields."""


def refuse_unfit_aggregate(component: str, aggregation: UserAggregation) -> None:
    """Check that a user's aggregate can be called with its fields.

    Raises:
        TopologyError: one of its methods takes other arguments, or calling it would run nothing of it.
    """
    fields, code = aggregation.fields, aggregation.code
    calls: dict[str, tuple[str, ...]]
    match aggregation.kind:
        case UserKind.COMBINER:
            calls = {"init": fields, "combine": ("one", "other"), "zero": ()}
        case UserKind.REDUCER:
            calls = {"init": (), "reduce": ("value", *fields)}
        case UserKind.AGGREGATOR:
            calls = {"init": (), "aggregate": ("state", "emit", *fields), "complete": ("state", "emit")}
    of = type(code).__name__
    for called, given in calls.items():
        method = getattr(code, called)
        kind = never_begins(method)
        if kind is not None:
            raise TopologyError(
                f"component {component!r}: {of}.{called} is {kind}, and calling it runs nothing of it; "
                f"{'call emit for each row' if 'emit' in given else 'return the value'}",
                component=component,
            )
        instead = "change its parameters"
        if called == _OF_FIELDS[aggregation.kind]:
            instead = f"name the fields that it takes, as in {of}().over('field'), or {instead}"
        refuse_unfit_call(component, f"component {component!r}", method, given, instead)


def checked_name(name: str, what: str) -> str:
    """The name itself.

    Raises:
        TopologyError: it cannot be part of a file's name and of a transaction identifier.
    """
    if not isinstance(name, str) or len(name) > NAME_MAX_CHARACTERS or NAME.fullmatch(name) is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{what} name {name!r}: use letters, digits, '_', '.' and '-', beginning with a letter or digit, at most "
            f"{NAME_MAX_CHARACTERS} characters"
        )
    return name


def fitting_name(text: str) -> str:
    """The text as a name, of one that begins with a letter or digit; where it cannot be one, what can of it, and a hash of
    the whole, so that other texts have other names.
    """
    fit = _UNFIT.sub("-", text)
    if fit == text and len(text) <= NAME_MAX_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_DIGITS]
    return f"{fit[: NAME_MAX_CHARACTERS - _HASH_DIGITS - 1]}-{digest}"


def schema_for(where: str, component: str, schema: SchemaLike | None) -> pa.Schema:
    """The schema that a component was given, parsed.

    Raises:
        TopologyError: it is missing, or no schema; names the component.
    """
    if schema is None:
        raise TopologyError(
            f"{where} needs a schema, which says what it gives, like schema='word string, n long'", component=component
        )
    with error_prefix(where, component=component):
        return parse_schema(schema)


def checked_tasks(tasks: int, component: str) -> int:
    """The number itself, of the tasks that an exchange leads to.

    Raises:
        TopologyError: it is not between 1 and `TASKS_MAX`.
    """
    if isinstance(tasks, bool) or not isinstance(tasks, int) or not 1 <= tasks <= TASKS_MAX:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"component {component!r}: parallelism is {tasks!r}; use 1 to {TASKS_MAX}: every task tells every task of the "
            "next stage what it sent there",
            component=component,
        )
    return tasks


def checked_concurrency(component: str, concurrency: int | None, *, is_async: bool) -> int | None:
    """How many calls of a function a task makes at a time; None: one after the other, in its own thread.

    Raises:
        TopologyError: it is not between 1 and `CONCURRENCY_MAX`.
    """
    if concurrency is None:
        return ASYNC_CONCURRENCY if is_async else None
    if not is_number(concurrency, int) or not 1 <= concurrency <= CONCURRENCY_MAX:
        raise TopologyError(
            f"component {component!r}: concurrency is {shown(concurrency)}; it must be a whole number, 1 to "
            f"{CONCURRENCY_MAX}: how many calls of the function each task makes at a time",
            component=component,
        )
    return concurrency


def is_number(value: object, *kinds: type) -> bool:
    """Whether a value is of one of these kinds of numbers; a bool is no number."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def require_sink(sink: SinkSpec, where: str) -> None:
    """Raise TopologyError unless this is a sink."""
    if not lacks(sink, "name", "target", "check", "open", "placed"):
        if not lacks(sink, "modes", "table_key", "check_sources", "description"):
            return
        instead = "let its class inherit stormproof.sinks.contract.protocol.Sink, which has the methods that it lacks"
        raise TopologyError(f"{where}: {shown(sink)} is no sink; {instead}", argument="sinks")
    if isinstance(sink, (list, tuple)):
        instead = "give them one by one: .into(one, other)"
    elif not lacks(sink, "kind", "target", "make"):
        instead = "it is a state: give it a name among the sinks, as in StateSink('totals', ...)"
    else:
        instead = instead_of(sink, "give one like DeltaSink('lake/table') or PostgresSink('table')")
    raise TopologyError(f"{where}: {shown(sink)} is no sink; {instead}", argument="sinks")


def require_fold(component: str, aggregation: AnyAggregation) -> None:
    """Raise TopologyError unless the results of two batches can be merged: others cannot be kept across batches."""
    if isinstance(aggregation, UserAggregation):
        if aggregation.combines:
            return
        why = f"a {aggregation.kind}'s values of two batches do not make one; write a CombinerAggregator"
    elif aggregation.kind is AggregationKind.MEAN:
        why = (
            f"two means do not make one; write total=sum_({aggregation.field!r}), n=count() and divide when you read "
            "(count() also counts NULLs: filter them out before)"
        )
    elif aggregation.kind is AggregationKind.DISTINCT:
        why = (
            f"two distinct counts do not make one; add {aggregation.field!r} to the fields of group_by, write n=count(), "
            "and count the rows when you read; or, for few values, keep them in a table: "
            f"collect_set({aggregation.field!r}, at_most=100)"
        )
    elif aggregation.kind is AggregationKind.SET and aggregation.at_most is None:
        why = f"a set without a bound may outgrow its row; write collect_set({aggregation.field!r}, at_most=100)"
    else:
        return
    raise TopologyError(
        f"component {component!r}: {aggregation.output} = {aggregation.name} can't be persisted across batches: {why}",
        component=component,
        field=aggregation.output,
    )


def fold_of(aggregation: AnyAggregation) -> AnyFold:
    """How a batch's result is folded into what a sink holds."""
    if isinstance(aggregation, UserAggregation):
        return Fold.OWN
    if aggregation.fold is not None:
        return aggregation.fold
    return {AggregationKind.MIN: Fold.MIN, AggregationKind.MAX: Fold.MAX}.get(aggregation.kind, Fold.SUM)


def alike(one: pa.Schema, other: pa.Schema) -> bool:
    """Whether two streams have the same fields; which of them may be NULL does not count."""
    return bool(one.names == other.names and one.types == other.types)


def streams_of_bolt(
    bolt: str, declared: Streams, schema: SchemaLike | None, streams: Mapping[str, SchemaLike] | None
) -> dict[str, pa.Schema]:
    """A bolt's output streams: those given as `schema` and `streams`, else those that its class declares."""
    if schema is None and streams is None:
        if isinstance(declared, Mapping):
            streams = declared
        else:
            schema = declared
    if streams is not None and not isinstance(streams, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"bolt {bolt!r}: streams is {shown(streams)}; it must be a mapping, like {{'late': 'word string'}}",
            component=bolt,
        )
    found = {} if schema is None else {DEFAULT_STREAM: schema_for(f"bolt {bolt!r}", bolt, schema)}
    for name, given in (streams or {}).items():
        if name in found:
            raise TopologyError(
                f"bolt {bolt!r}: schema= and streams= both say what stream {name!r} gives; leave one of them out",
                component=bolt,
                stream=name,
            )
        checked_name(name, f"bolt {bolt!r}: stream")
        found[name] = schema_for(f"bolt {bolt!r}, stream {name!r}", bolt, given)
    return found


def require_call(name: str, kind: OperationKind, function: UserFunction, fields: Sequence[str], *, named: bool) -> None:
    """Check that an operation's function can be called with its fields; `named`: the user named them.

    Raises:
        TopologyError: it takes other arguments.
    """
    given = fields
    if kind is OperationKind.ARROW:
        given, instead = ["rows"], "write one that takes a record batch"
    elif named:
        instead = "change its parameters, or the fields that are named behind it"
    else:
        call = "each" if kind is OperationKind.FLAT_EACH else kind
        instead = (
            f"it gets all fields, since none is named: name those that it takes, as in {call}(f, {fields[0]!r}), or "
            "change its parameters"
        )
    refuse_unfit_call(name, f"component {name!r}", function, given, instead)


def require_agreed_keys(name: str, inputs: Sequence[tuple[Subscription, pa.Schema]]) -> None:
    """Raise TopologyError where inputs are grouped by fields whose types differ: equal values of two would not meet."""
    by_key = [(i, schema) for i, schema in inputs if i.grouping.kind in (GroupingKind.FIELDS, GroupingKind.PARTIAL_KEY)]
    for (one, left), (other, right) in pairwise(by_key):
        for mine, theirs in zip(one.grouping.fields, other.grouping.fields, strict=False):
            types = left.field(mine).type, right.field(theirs).type
            if types[0] != types[1] and not all(pa.types.is_integer(type_) for type_ in types):
                raise TopologyError(
                    f"component {name!r}: it is grouped by {mine!r} of {one.component!r}, which is {types[0]}, and by "
                    f"{theirs!r} of {other.component!r}, which is {types[1]}: equal values would go to different tasks; "
                    "make them one type with map() before it",
                    component=name,
                    field=theirs,
                )


def require_agreed_tasks(name: str, inputs: Sequence[Subscription]) -> None:
    """Raise TopologyError where inputs ask for different numbers of tasks: equal keys of two would not meet in one task."""
    asked = {i.tasks for i in inputs if not i.grouping.fused}
    if len(asked) > 1:
        numbers = " and ".join(sorted("the engine's number" if n is None else str(n) for n in asked))
        raise TopologyError(
            f"component {name!r}: its inputs ask for different numbers of tasks: {numbers}; give them one parallelism",
            component=name,
        )
