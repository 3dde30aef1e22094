"""Messages that were in one batch, in a group of sources and in a topology whose source does not keep them together."""

from __future__ import annotations

from random import Random

import pytest
from support.source_harness import messages_of

from stormproof import MemorySink, MemorySource, Topology
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import Fenced, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.graph.plan import compile_topology
from stormproof.core.source.group import SourceGroup

WHOLE = Limit(100, whole=True)


def opened(group: SourceGroup, owner: str) -> set[bytes]:
    slice_ = group.open(Lease(owner, 1), WHOLE, 7)
    assert slice_ is not None
    return {message.payload for message in messages_of(group, slice_)}


@pytest.mark.parametrize("longer", ["orders", "payments"])
def test_partners_whose_leases_run_out_apart_are_opened_together(longer: str) -> None:
    clock = ManualClock()
    group = SourceGroup(
        {name: MemorySource(name, [name.encode()], clock=clock, rng=Random(1)) for name in ("orders", "payments")}
    )
    group.subscribe("s", 1)
    assert opened(group, "a") == {b"orders", b"payments"}
    clock.advance(0.002)
    group.sources[longer].extend(Lease("a", 1))
    clock.advance(29.999)
    assert opened(group, "b") == {b"orders", b"payments"}
    with pytest.raises(Fenced):
        group.pin(Lease("a", 1))


class Apart(MemorySource):
    """A source that says nothing of mates, as one that derives from `Source` itself."""

    @property
    def keeps_mates(self) -> bool:
        return False


def paid(orders: MemorySource) -> Topology:
    t = Topology("paid")
    left = t.stream("orders", orders)
    right = t.stream("payments", MemorySource("payments", [], schema="id long, p long"))
    left.join(right, "id").into(MemorySink("paid"))
    return t


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_join_behind_a_source_that_does_not_keep_mates_is_refused(guarantee: Guarantee) -> None:
    with pytest.raises(TopologyError, match=r"spout 'orders'.*Apart.*keeps_mates"):
        compile_topology(paid(Apart("orders", [], schema="id long, o long")), guarantee)


def test_where_nothing_comes_again_or_nothing_meets_such_a_source_is_served() -> None:
    source = Apart("orders", [], schema="id long, o long")
    compile_topology(paid(source), Guarantee.AT_MOST_ONCE)
    t = Topology("alone")
    t.stream("orders", source).into(MemorySink("kept"))
    compile_topology(t, Guarantee.EXACTLY_ONCE)
