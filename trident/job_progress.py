"""How far the job of a batch is, while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stormproof.core.job import Job
from stormproof.core.pulse.record import BEFORE, DONE, PASSAGE, PASSED, STAGE, STATE, STEP, TOTAL, Progress, Record
from stormproof.trident.wording import counted

BAR_CHARACTERS = 10


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a batch's job is.

    `component` is the slowest of those that tasks are in now: the one that they were most often found in; None: they are
    before the first. `through` of `total` messages are through it, where the total is known; behind an exchange they are
    rows (`unit`). A component takes all messages that were read together before the next one begins, so `through` begins
    anew with another component. `elapsed_s` is the time since this attempt began; another one counts from 0.
    """

    txid: int
    attempt: int
    component: str | None
    through: int
    total: int | None
    unit: str
    elapsed_s: float

    def __str__(self) -> str:
        """As ``txid 5: 214 of 600 messages through lookup, 21/s, 10 s``."""
        attempt = f" (attempt {self.attempt})" if self.attempt > 1 else ""
        of = self.through if self.total is None else self.total
        number = f"{counted(of, self.unit.removesuffix('s'))}"
        done = number if self.total is None else f"{self.through} of {number}"
        where = "" if self.component is None else f" through {self.component}"
        pace = f", {self.through / self.elapsed_s:,.0f}/s" if self.elapsed_s >= 1 and self.through else ""
        return f"txid {self.txid}{attempt}: {done}{where}{pace}, {self.elapsed_s:.0f} s"

    @property
    def share(self) -> float:
        """From 0 to 1; 0 where the total is not known."""
        return self.through / self.total if self.total else 0.0

    @property
    def bar(self) -> str:
        """As ``[####------] 35%``; empty where the total is not known."""
        done = int(self.share * BAR_CHARACTERS)
        return f"[{'#' * done}{'-' * (BAR_CHARACTERS - done)}] {int(self.share * 100)}%" if self.total else ""


class JobWatch:
    """Makes a job's progress of what its tasks report; keeps in mind where they were found."""

    def __init__(self, job: Job, began_s: float) -> None:
        self._job, self._began_s = job, began_s
        stages = enumerate(job.plan.stages)
        self._names = {(stage, number): name for stage, plan in stages for name, number in plan.steps.items()}
        self._found = Counter[tuple[int, int]]()
        self._step = (0, 0)

    def seen(self, progress: Progress, now_s: float) -> JobProgress:
        """What the job's tasks report now."""
        steps = [_step(task) for task in progress.tasks if task[STATE] != DONE]
        self._found.update(steps)
        if steps:
            self._step = max(steps, key=lambda step: (step in self._names, self._found[step], step))
        (stage, _), job = self._step, self._job
        tasks = [task for task in progress.tasks if task[STAGE] == stage]
        through = sum(map(self._through, tasks))
        total = job.messages if stage == 0 else sum(task[TOTAL] for task in tasks)
        return JobProgress(
            *(job.txid, job.attempt, self._names.get(self._step)),
            through=through if total is None else min(through, total),
            total=total,
            unit="rows" if stage else "messages",
            elapsed_s=now_s - self._began_s,
        )

    def _through(self, task: Record) -> int:
        if task[STATE] == DONE or _step(task) > self._step:
            return task[BEFORE] + task[PASSAGE]
        return task[BEFORE] + (task[PASSED] if _step(task) == self._step else 0)


def _step(task: Record) -> tuple[int, int]:
    return task[STAGE], task[STEP]
