"""All tasks of a job in one process, stage after stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from stormproof.core.task.cut import StageJob
from stormproof.core.task.task import run_task


def run_in_turn(parts: Sequence[StageJob]) -> Iterator[pa.RecordBatch]:
    """Run every task of every stage; yields the wire rows of the last stage. Each task gets and sends what it would
    where the stages are apart, so the report is the same.

    Raises:
        As `run_task`.
    """
    rows: list[pa.RecordBatch] = []
    for part in parts:
        tasks = range(part.tasks[part.stage])
        rows = [batch for task in tasks for batch in run_task(part, task, rows_for(rows, task) if part.stage else ())]
    yield from rows


def rows_for(rows: Sequence[pa.RecordBatch], task: int) -> list[pa.RecordBatch]:
    """Those wire rows that are for this task of the next stage."""
    found: list[pa.RecordBatch] = []
    for batch in rows:
        mine = batch.column(0).to_numpy() == task
        if mine.all():
            found.append(batch)
        elif mine.any():
            found.append(batch.filter(pa.array(mine)))
    return found
