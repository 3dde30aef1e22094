"""What operators ask of running drivers, and the drivers' signs of life.

An operator's command writes one row a topology; the driver reads it about once a second, and notes that it has heard. In the
same round trip it leaves its sign of life, with how far the job of its lowest batch is. Times are the database's, so that no
two hosts' clocks are compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.heartbeat.task import (
    BEFORE,
    DONE,
    PASSAGE,
    PASSED,
    STAGE,
    STATE,
    STEP,
    TOTAL,
    ProgressMark,
    Record,
)
from stormproof.core.postgres.columns import may, must
from stormproof.core.task.job import Job
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.tables import SCHEMA, incarnation, known, metadata, record_of
from stormproof.trident.terms.transaction_states import OperatorAction
from stormproof.trident.terms.wording import counted

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

    def seen(self, progress: ProgressMark, now_s: float) -> JobProgress:
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
            txid=job.txid,
            attempt=job.attempt,
            component=self._names.get(self._step),
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


SILENT_S: Final = 15.0
"""A driver whose last sign of life is older does not answer."""

_time: Final = sa.DateTime(timezone=True)


class Ending(StrEnum):
    """How a driver is asked to end; append-only."""

    DRAIN = "drain"
    """Open no new messages; end once none is pending and none waits for a retry."""
    STOP = "stop"
    """End after the batches in flight."""


class Doing(StrEnum):
    """What a driver does, as its sign of life says; append-only."""

    RUNNING = "running"
    PAUSING = "pausing"
    """It opens no batch; those in flight go on to their end."""
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPING = "stopping"


control: Final = sa.Table(
    "control",
    metadata,
    incarnation(refers=True),
    must("request", sa.BigInteger, "number of the newest request"),
    must("paused", sa.Boolean, "no driver opens a batch, until resume"),
    may("ending", sa.Text, "how the driver of ending_epoch is to end"),
    may("ending_epoch", sa.BigInteger, "the one driver that is to end"),
    must("by", sa.Text, "who asked last"),
    must("why", sa.Text, "why, in that person's words"),
    must("asked_at", _time, "by the database's clock"),
    may("heard_at", _time, "when a driver took note of the newest request"),
    may("heard_epoch", sa.BigInteger, "of that driver"),
    known("ending", Ending),
    sa.CheckConstraint("(ending is null) = (ending_epoch is null)", name="ending"),
    comment="one row a topology: what an operator asked of its driver last",
)

heartbeat: Final = sa.Table(
    "heartbeat",
    metadata,
    incarnation(refers=True),
    must("epoch", sa.BigInteger, "of that driver"),
    must("at", _time, "by the database's clock"),
    must("doing", sa.Text, "running, pausing, paused, draining or stopping"),
    must("in_flight", sa.Integer, "batches that are open or prepared"),
    may("job", sa.JSON, "how far the job of the lowest of them is; null: none runs, or it began just now"),
    known("doing", Doing),
    comment="one row a topology: its driver's newest sign of life",
)


@dataclass(frozen=True, slots=True)
class Control:
    """What a topology's drivers are asked to do."""

    request: int
    paused: bool
    ending: Ending | None
    ending_epoch: int | None
    by: str
    why: str
    asked_at: datetime
    heard_at: datetime | None
    heard_epoch: int | None

    def ends(self, epoch: int) -> Ending | None:
        """How the driver of this epoch is to end; None: it is not asked to."""
        return self.ending if self.ending_epoch == epoch else None


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """A driver's newest sign of life, `age_s` seconds old by the database's clock."""

    epoch: int
    doing: str
    in_flight: int
    age_s: float
    at: datetime
    job: JobProgress | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the driver answers."""
        return self.age_s <= SILENT_S


_COLUMNS: Final = "request, paused, ending, ending_epoch, by, why, asked_at, heard_at, heard_epoch"


def control_of(connection: sa.Connection, incarnation: str) -> Control | None:
    """What was asked last; None: nothing, ever."""
    if connection.dialect.name != "postgresql":
        return None
    query = sa.text(f"select {_COLUMNS} from {SCHEMA}.control where incarnation = :incarnation")
    return _control(connection.execute(query, {"incarnation": incarnation}).one_or_none())


def _control(row: sa.Row[Any] | None) -> Control | None:
    return None if row is None else record_of(Control, row, ending=None if row.ending is None else Ending(row.ending))


_PAUSES: Final = {OperatorAction.PAUSE: True, OperatorAction.RESUME: False}
_ASK: Final = sa.text(
    f"""
    insert into {SCHEMA}.control as c (incarnation, request, paused, ending, ending_epoch, by, why, asked_at)
    values (:incarnation, 1, coalesce(:pauses, false), :ending, :epoch, :by, :why, clock_timestamp())
    on conflict (incarnation) do update
      set request = c.request + 1, paused = coalesce(:pauses, c.paused), ending = coalesce(excluded.ending, c.ending),
        ending_epoch = coalesce(excluded.ending_epoch, c.ending_epoch), by = excluded.by, why = excluded.why,
        asked_at = excluded.asked_at, heard_at = null, heard_epoch = null
    returning c.request
    """
).bindparams(sa.bindparam("pauses", type_=sa.Boolean), sa.bindparam("epoch", type_=sa.BigInteger))


def ask(tx: Tx, action: OperatorAction, *, by: str, why: str) -> int:
    """Ask for a pause, a resume, a drain or a stop, on record; returns the request's number.

    A drain and a stop concern the driver of the transaction's epoch alone. A pause holds until it is resumed, for later
    drivers, too; and it does not take back that a driver is to end.
    """
    pauses = _PAUSES.get(action)
    asked = {
        "incarnation": tx.run.incarnation,
        "pauses": pauses,
        "ending": Ending(action.value).value if pauses is None else None,
        "epoch": tx.run.epoch if pauses is None else None,
        "by": by,
        "why": why,
    }
    request = int(tx.connection.execute(_ASK, asked).scalar_one())
    tx.decided(action, by=by, why=why)
    return request


_SIGN: Final = sa.text(
    f"""
    with sign as (
      insert into {SCHEMA}.heartbeat as h (incarnation, epoch, at, doing, in_flight, job)
      values (:incarnation, :epoch, clock_timestamp(), :doing, :in_flight, :job)
      on conflict (incarnation) do update
        set epoch = excluded.epoch, at = excluded.at, doing = excluded.doing, in_flight = excluded.in_flight,
          job = excluded.job
        where h.epoch <= excluded.epoch
    ), heard as (
      update {SCHEMA}.control set heard_at = clock_timestamp(), heard_epoch = :epoch
      where incarnation = :incarnation and request = :request and heard_at is null
    )
    select {_COLUMNS} from {SCHEMA}.control where incarnation = :incarnation
    """
).bindparams(sa.bindparam("job", type_=sa.JSON(none_as_null=True)))


def exchange(
    connection: sa.Connection,
    incarnation: str,
    epoch: int,
    doing: Doing,
    in_flight: int,
    heard: int,
    job: JobProgress | None = None,
) -> Control | None:
    """Leave a sign of life, note that request `heard` was heard, and read what is asked now: one round trip.

    A lost sign costs nothing: it does not wait for the disk.
    """
    connection.execute(sa.text("set local synchronous_commit = off"))
    row = connection.execute(
        _SIGN,
        {
            "incarnation": incarnation,
            "epoch": epoch,
            "doing": doing.value,
            "in_flight": in_flight,
            "request": heard,
            "job": None if job is None else asdict(job),
        },
    ).one_or_none()
    return _control(row)


def signs_of_life(connection: sa.Connection) -> dict[str, SignOfLife]:
    """The newest sign of each topology's driver, by incarnation."""
    if connection.dialect.name != "postgresql":
        return {}
    c = heartbeat.c
    age_s = sa.extract("epoch", sa.func.clock_timestamp() - c.at)
    rows = connection.execute(
        sa.select(c.incarnation, c.epoch, c.doing, c.in_flight, age_s.label("age_s"), c.at, c.job)
    )
    return {
        row.incarnation: record_of(
            SignOfLife,
            row,
            age_s=float(row.age_s),
            at=row.at.astimezone(UTC),
            job=None if row.job is None else JobProgress(**row.job),
        )
        for row in rows
    }
