"""When a sink was not part of its topology, held against a list of what each txid was committed to."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stormproof.trident.ledger.missing import Absence, Missing, Shape, absences

SINKS = ("a", "b", "c")


def shapes(*changes: tuple[int, str]) -> list[Shape]:
    return [Shape(epoch, after, frozenset(sinks)) for epoch, (after, sinks) in enumerate(changes, 1)]


def test_the_ways_of_a_sink() -> None:
    assert absences([]) == {}
    assert absences(shapes((0, "a"))) == {"a": ()}
    assert absences(shapes((0, "a"), (4, "ab"))) == {"a": (), "b": (Absence(0, 4, 2),)}
    assert absences(shapes((0, "ab"), (4, "a")))["b"] == ()  # it has left: that is another matter
    assert absences(shapes((0, "ab"), (4, "a"), (7, "ab")))["b"] == (Absence(4, 7, 3),)
    assert absences(shapes((0, "ab"), (4, "a"), (4, "ab")))["b"] == ()
    # It came without staying for a batch: one absence, not two.
    assert absences(shapes((0, "a"), (4, "ab"), (4, "a"), (7, "ab")))["b"] == (Absence(0, 7, 4),)


@given(
    st.lists(st.tuples(st.frozensets(st.sampled_from(SINKS), min_size=1), st.integers(0, 3)), min_size=1, max_size=8)
)
def test_absences_are_exactly_the_txids_that_a_sink_was_not_given_before_it_was_last_there(
    runs: list[tuple[frozenset[str], int]],
) -> None:
    given_to: list[frozenset[str]] = []
    found: list[Shape] = []
    for epoch, (sinks, batches) in enumerate(runs, 1):
        if not found or found[-1].sinks != sinks:
            found.append(Shape(epoch, len(given_to), sinks))
        given_to += [sinks] * batches
    for sink, mine in absences(found).items():
        joined = max((shape.after_txid for shape in found if sink in shape.sinks), default=0)
        lacks = [txid for txid, sinks in enumerate(given_to, 1) if sink not in sinks and txid <= joined]
        assert [txid for one in mine for txid in range(one.after + 1, one.upto + 1)] == lacks
        assert all(earlier.upto < later.after for earlier, later in itertools.pairwise(mine))


def test_how_it_is_said() -> None:
    assert str(Missing(2, 2, 1, 1)) == "txid 2 (1 message)"
    assert str(Missing(2, 5, 3, 70)) == "3 txids from 2 to 5 (70 messages)"
    assert str(Missing(1, 9, 0, 0, 9)) == "txids 1 to 9 (up to 9 pruned and not counted)"
    assert str(Missing(1, 9, 2, 5, 7)) == "txids 1 to 9 (up to 7 pruned and not counted, later ones: 2 of 5 messages)"
