"""Handles of deliveries, and ranges of their messages' numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.pending.journal import _ranges  # pyright: ignore[reportPrivateUsage]
from stormproof.core.pending.redelivering import Handles

NUMBERS = st.lists(st.integers(0, 40), max_size=30)


@given(st.lists(NUMBERS, max_size=5), st.sets(st.integers(0, 40)))
def test_every_handle_of_a_message_is_given_once(batches: list[list[int]], wanted: set[int]) -> None:
    handles, told = Handles(), defaultdict[int, list[int]](list)
    for numbers in batches:
        given_now = [1_000 * len(told[number]) + number for number in numbers]
        given_now = [handle + 100_000 * place for place, handle in enumerate(given_now)]
        handles.add(numbers, given_now)
        for number, handle in zip(numbers, given_now, strict=True):
            told[number].append(handle)
    there = {number for number, known in told.items() if known}
    assert (len(handles), set(handles.numbers())) == (len(there), there)
    asked = sorted(wanted & there)
    assert handles.pop(asked) == [handle for number in asked for handle in told[number]]
    assert set(handles.numbers()) == there - wanted
    handles.clear()
    assert (len(handles), handles.numbers()) == (0, [])


@given(NUMBERS)
def test_ranges_hold_these_numbers_and_no_others(numbers: list[int]) -> None:
    lows, highs = _ranges(numbers)
    ranges = [range(low, high) for low, high in zip(lows, highs, strict=True)]
    assert [number for one in ranges for number in one] == sorted(set(numbers))
    assert all(first.stop < second.start for first, second in itertools.pairwise(ranges)), "as few as can be"
