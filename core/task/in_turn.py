"""All tasks of a job in one process, stage after stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stormproof.core.task.cut import StageJob
from stormproof.core.task.task import run_task
from stormproof.core.task.wire import WireRow


def run_in_turn(parts: Sequence[StageJob]) -> Iterator[WireRow]:
    """Run every task of every stage; yields the wire rows of the last stage. Each task gets and sends what it would
    where the stages are apart, so the report is the same.

    Raises:
        As `run_task`.
    """
    rows: list[WireRow] = []
    for part in parts:
        tasks = range(part.tasks[part.stage])
        rows = [row for task in tasks for row in run_task(part, task, rows_for(rows, task))]
    yield from rows


def rows_for(rows: Sequence[WireRow], task: int) -> list[WireRow]:
    """Those wire rows that are for this task of the next stage."""
    return [row for row in rows if row.dest == task]
