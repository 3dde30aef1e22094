"""What each grouping promises, as checks that run on any router, a broken one included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.graph.components import Grouping, GroupingKind
from stormproof.core.task.router import Router, Tasks


class MakesRouter(Protocol):
    """A router's class, or a broken one's."""

    def __call__(self, grouping: Grouping, tasks: int, task: int) -> Router: ...


def words(values: Iterable[object]) -> pa.RecordBatch:
    """Values of a field `word`."""
    return pa.record_batch({"word": pa.array(list(values), pa.string())})


def sent_by(router: Router, batches: Iterable[pa.RecordBatch], tasks: int) -> Rows:
    """How many rows each task gets."""
    total = np.zeros(tasks, np.int64)
    for rows in batches:
        total += np.bincount(router.route(rows), minlength=tasks)
    return total


def routed(router: Router, batches: Sequence[pa.RecordBatch]) -> list[tuple[object, int]]:
    """Each value of `word` with its task."""
    found: list[tuple[object, int]] = []
    for rows in batches:
        found += zip(rows.column("word").to_pylist(), router.route(rows).tolist(), strict=True)
    return found


def check_even(make: MakesRouter, kind: GroupingKind, sizes: Sequence[int], tasks: int, task: int) -> None:
    """Shuffle: after every batch, any two tasks' numbers differ by at most 1."""
    router, total = make(Grouping(kind), tasks, task), np.zeros(tasks, np.int64)
    for size in sizes:
        total += np.bincount(router.route(words("x" * size)), minlength=tasks)
        assert int(total.sum()) >= size
        assert total.max() - total.min() <= 1, f"one emitting task sent {total.tolist()}"


def check_one_task_a_key(make: MakesRouter, emitters: Sequence[Sequence[pa.RecordBatch]], tasks: int) -> None:
    """Fields: a key has one task, whichever emitting task sends it, in whatever batch."""
    found: dict[object, int] = {}
    for task, batches in enumerate(emitters):
        for word, its in routed(make(Grouping(GroupingKind.FIELDS, ("word",)), tasks, task), batches):
            assert 0 <= its < tasks
            assert found.setdefault(word, its) == its, f"{word!r} went to the tasks {found[word]} and {its}"


def check_two_tasks_a_key(make: MakesRouter, emitters: Sequence[Sequence[pa.RecordBatch]], tasks: int) -> None:
    """Partial key: a key has at most two tasks, the same ones for every emitting task."""
    found: dict[object, set[int]] = {}
    for task, batches in enumerate(emitters):
        for word, its in routed(make(Grouping(GroupingKind.PARTIAL_KEY, ("word",)), tasks, task), batches):
            assert 0 <= its < tasks
            found.setdefault(word, set()).add(its)
    assert all(len(its) <= 2 for its in found.values()), f"more than two tasks: {found}"


def zipf(keys: int, exponent: float, rows: int, seed: int) -> tuple[float, Rows]:
    """The heaviest key's probability, and a draw of keys 0 to `keys` - 1."""
    weights = 1.0 / np.arange(1, keys + 1) ** exponent
    weights /= weights.sum()
    return float(weights[0]), np.random.default_rng(seed).choice(keys, rows, p=weights)


def check_levelled(
    make: MakesRouter, emitters: int, tasks: int, drawn: Rows, seed: int, *, bound: float, batch_rows: int = 2_000
) -> None:
    """Partial key: no task gets more than `bound` times the mean, though each emitting task sees only its own."""
    names = np.array([f"{seed}-{key}" for key in range(int(drawn.max()) + 1)])
    total = np.zeros(tasks, np.int64)
    for task in range(emitters):
        mine = drawn[task::emitters]
        batches = [words(names[mine[i : i + batch_rows]].tolist()) for i in range(0, len(mine), batch_rows)]
        total += sent_by(make(Grouping(GroupingKind.PARTIAL_KEY, ("word",)), tasks, task), batches, tasks)
    assert int(total.sum()) == len(drawn)
    ratio = float(total.max() / total.mean())
    assert ratio <= bound, f"the fullest of {tasks} tasks has {ratio:.3f} times the mean"


class ForgetsBetweenBatches(Router):
    """Broken: begins anew with each batch."""

    def route(self, rows: pa.RecordBatch, direct: Rows | None = None) -> Tasks:
        """From task 0, every time."""
        tasks: Tasks = (np.arange(rows.num_rows) % self._tasks).astype(np.int32)
        return tasks


class MixesPositionIn(Router):
    """Broken: a key's task depends on where its row stands."""

    def route(self, rows: pa.RecordBatch, direct: Rows | None = None) -> Tasks:
        """Right for the even rows."""
        tasks: Tasks = ((super().route(rows, direct) + np.arange(rows.num_rows) % 2) % self._tasks).astype(np.int32)
        return tasks


class MixesEmitterIn(Router):
    """Broken: a key's task depends on who sends it."""

    def route(self, rows: pa.RecordBatch, direct: Rows | None = None) -> Tasks:
        """Right for emitting task 0."""
        tasks: Tasks = ((super().route(rows, direct) + self._task) % self._tasks).astype(np.int32)
        return tasks


class HasOneCandidate(Router):
    """Broken: partial_key that is but a fields grouping."""

    def __init__(self, grouping: Grouping, tasks: int, task: int) -> None:
        super().__init__(Grouping(GroupingKind.FIELDS, grouping.fields), tasks, task)


class IgnoresKeys(Router):
    """Broken: partial_key that levels perfectly, as it is but a shuffle."""

    def __init__(self, grouping: Grouping, tasks: int, task: int) -> None:
        super().__init__(Grouping(GroupingKind.SHUFFLE), tasks, task)
