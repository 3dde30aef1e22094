"""The groupings' promises for any keys, any cut into batches, any number of tasks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groupings import check_even, check_one_task_a_key, check_two_tasks_a_key, words

from stormproof.core.base.errors import RoutingError
from stormproof.core.graph.components import Grouping, GroupingKind
from stormproof.core.task.router import Router

KEYS = st.lists(st.one_of(st.none(), st.text(max_size=6), st.sampled_from(["a", "b", "c"])), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=5)
TASKS = st.integers(1, 300)


def sliced(keys: list[str | None], cuts: list[int]) -> list[pa.RecordBatch]:
    """The keys as slices of one batch, so that their arrays have offsets."""
    rows = words(keys)
    bounds = [0, *sorted(min(cut, len(keys)) for cut in cuts), len(keys)]
    return [rows.slice(start, stop - start) for start, stop in pairwise(bounds)]


@given(KEYS, CUTS, CUTS, TASKS)
def test_a_key_has_one_task_however_the_rows_are_cut(
    keys: list[str | None], cuts: list[int], others: list[int], tasks: int
) -> None:
    check_one_task_a_key(Router, [sliced(keys, cuts), sliced(keys[::-1], others)], tasks)


@given(KEYS, CUTS, CUTS, TASKS)
def test_a_key_has_at_most_two_tasks_however_the_rows_are_cut(
    keys: list[str | None], cuts: list[int], others: list[int], tasks: int
) -> None:
    check_two_tasks_a_key(Router, [sliced(keys, cuts), sliced(keys[::-1], others)], tasks)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), TASKS, st.integers(0, 1_000))
def test_shuffle_is_even_after_every_batch(sizes: list[int], tasks: int, task: int) -> None:
    check_even(Router, GroupingKind.SHUFFLE, sizes, tasks, task)


@given(st.lists(st.integers(-3, 8), min_size=1, max_size=20), st.integers(1, 6))
def test_custom_gives_the_functions_numbers_or_names_the_rows_out_of_range(numbers: list[int], tasks: int) -> None:
    router = Router(Grouping(GroupingKind.CUSTOM, function=lambda rows, tasks: numbers), tasks, 0)
    wrong = tuple(row for row, number in enumerate(numbers) if not 0 <= number < tasks)
    if not wrong:
        assert router.route(words("x" * len(numbers))).tolist() == numbers
        return
    with pytest.raises(RoutingError) as caught:
        router.route(words("x" * len(numbers)))
    assert caught.value.rows == wrong


@given(st.integers(0, 2**32 - 1), st.integers(1, 3_000), st.integers(1, 3_000), st.integers(40, 300))
def test_partial_key_has_a_task_of_two_for_each_row_of_very_many_keys(
    seed: int, keys: int, rows: int, tasks: int
) -> None:
    """There are so many pairs of candidates that they are divided in blocks."""
    drawn = np.random.default_rng(seed).integers(0, keys, rows)
    batch = words(map(str, drawn))
    check_two_tasks_a_key(Router, [[batch, batch]], tasks)
