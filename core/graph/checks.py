"""Checks of what a topology is made of, as it is added."""

from __future__ import annotations

from typing import Final

from stormproof.core.calls import never_begins, refuse_unfit_call
from stormproof.core.errors import TopologyError
from stormproof.core.graph.aggregators import UserAggregation, UserKind

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
