"""Aggregates for groups: how often, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from stormproof.core.aggregation import Aggregation, AggregationKind


@dataclass(frozen=True, slots=True)
class Aggregator:
    """An aggregate before it has a name: what `agg(n=count())` is given."""

    kind: AggregationKind
    field: str | None = None

    def named(self, output: str) -> Aggregation:
        """The aggregate with its result's name."""
        return Aggregation(output, self.kind, self.field)


def count() -> Aggregator:
    """The number of a group's tuples, as a long."""
    return Aggregator(AggregationKind.COUNT)


def sum_(field: str) -> Aggregator:
    """The sum of a field over a group: a long of integers, a double of floats, a decimal(38,s) of decimals.

    NULLs add nothing; the sum of NULLs alone is 0. A sum that does not fit ends the batch's job with an error that
    names the column; it never wraps.
    """
    return Aggregator(AggregationKind.SUM, field)
