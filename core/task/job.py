"""A job: one attempt at one batch, in the form that an engine runs; its part for each stage; what its tasks send and report.

Wire rows travel between stages, and from the last stage to the driver. A wire row is one of these: a chunk of one edge's
rows for one task, notices for an acker, a control row (`exchange`), or a task's summary for the driver. Arrow serialises
the rows of a chunk, and an engine carries each wire row as one string of bytes: nothing below converts any of their
types.

The report of a job is made of those of its tasks.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.errors import JobFailed
from stormproof.core.base.machine_faults import OUTSIDE
from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.sink import PreparedFile, SinkWriter, TaskContext
from stormproof.core.contract.source import Decoder, ShownIds, SliceReader
from stormproof.core.graph.plan import CombineNode, Plan, SendNode, StagePlan, WriteNode
from stormproof.core.heartbeat.task import ReportAddress
from stormproof.core.tracking.share import signed, xor_signed
from stormproof.core.tracking.verdict import JobReport, TaskCounts, total

JobKey: TypeAlias = tuple[str, int, int]
"""Incarnation, txid and attempt."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one batch; everything in it is picklable.

    `readers` has one entry a source task, `writers` one a sink, by the sink's name. `tracked` is off under at-most-once:
    there are no tokens and no shares, but rows between stages are counted all the same. `excluded` are messages that are
    left out, since they failed in an earlier attempt. `per_message` routes shares to ackers, which take a verdict for each
    message. `heartbeat` is where tasks report their progress (see `stormproof.core.heartbeat`); None: they do not.
    `careful` makes row-wise functions also note the message in hand there, for a batch whose job died before. `messages`
    is how many messages the readers give; None: nobody knows. `named_max` is how many failed messages the tasks of a stage
    name together, about; None: all. They count those beyond it. `message_timeout_s` is how long one call may take where
    several are made at a time.
    """

    plan: Plan
    readers: tuple[SliceReader, ...]
    writers: Mapping[str, SinkWriter]
    incarnation: str
    txid: int
    attempt: int
    seed: int
    tracked: bool
    excluded: frozenset[int] = frozenset()
    per_message: bool = False
    heartbeat: ReportAddress | None = None
    careful: bool = False
    messages: int | None = None
    named_max: int | None = None
    message_timeout_s: float = math.inf

    @property
    def key(self) -> JobKey:
        """The attempt's identity: incarnation, txid and attempt number."""
        return self.incarnation, self.txid, self.attempt


# ---- a job's parts, one for each stage


NAMED_IN_TASK_MIN: Final = 200
"""So many failed messages are named by a task at least, however many tasks there are."""


@dataclass(frozen=True, slots=True)
class StageJob:
    """A job's part for one stage, which each task of the stage is given. Picklable where the plan is.

    `plan` None is the stage of the ackers, which exists in per-message mode only; `ackers` is its number of tasks, else 0.
    `tasks` has the number of tasks of every stage. `parallelism` is the number of tasks behind an exchange for which none
    was asked. `named_max` is how many failed messages a task names; None: all.
    """

    stage: int
    plan: StagePlan | None
    tasks: tuple[int, ...]
    writers: Mapping[str, SinkWriter]
    context: TaskContext
    tracked: bool
    ackers: int = 0
    seed: int = 0
    decoders: Mapping[str, Decoder] = field(default_factory=dict[str, Decoder])
    readers: tuple[SliceReader, ...] = ()
    excluded: frozenset[int] = frozenset()
    heartbeat: ReportAddress | None = None
    careful: bool = False
    parallelism: int = 1
    resources: Mapping[str, object] = field(default_factory=dict[str, object])
    shown_ids: ShownIds | None = None
    named_max: int | None = None
    message_timeout_s: float = math.inf


def stage_jobs(job: Job, parallelism: int) -> tuple[StageJob, ...]:
    """The parts of a job, one a stage. The first stage has one task a reader, the others `parallelism` tasks unless the
    topology asks for another number.
    """
    stages = job.plan.stages
    ackers = (job.plan.ackers or parallelism) if job.per_message and job.tracked else 0
    tasks = (len(job.readers), *(s.tasks(parallelism) for s in stages[1:]), *([ackers] if ackers else []))
    offered = ((name, writer.resource()) for name, writer in job.writers.items())
    resources = {f"state:{name}": resource for name, resource in offered if resource is not None}
    made: list[StageJob] = []
    for number, plan in enumerate((*stages, None) if ackers else stages):
        part = StageJob(
            stage=number,
            plan=plan,
            tasks=tasks,
            writers={} if plan is None else {name: job.writers[name] for name in sorted(_sinks_of(plan))},
            context=TaskContext(job.incarnation, job.txid, job.attempt, 0),
            tracked=job.tracked,
            ackers=ackers,
            seed=job.seed,
            heartbeat=job.heartbeat,
            careful=job.careful,
            parallelism=parallelism,
            resources={} if plan is None or not plan.reads_state else resources,
            shown_ids=job.plan.shown_ids,
            message_timeout_s=job.message_timeout_s,
            named_max=None if job.named_max is None else max(job.named_max // tasks[number], NAMED_IN_TASK_MIN),
        )
        if number == 0:
            part = replace(part, decoders=job.plan.decoders, readers=job.readers, excluded=job.excluded)
        made.append(part)
    return tuple(made)


def _sinks_of(plan: StagePlan) -> set[str]:
    found: set[str] = set()
    for node in plan.nodes.values():
        if isinstance(node, WriteNode):
            found.add(node.sink)
        elif isinstance(node, (CombineNode, SendNode)):
            found.update(node.sinks)
    return found


# ---- the rows that travel between stages, and to the driver

CONTROL: Final = -1
SUMMARY: Final = -2
INIT: Final = -3
ACK: Final = -4

INIT_SCHEMA: Final = pa.schema([("id", pa.int64()), ("origin", pa.int64()), ("value", pa.int64())])
"""Notices that begin messages: `value` is the token."""
ACK_SCHEMA: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
"""Notices of acked shares, at most one a message and task: `value` is their XOR."""

BYTES_MAX: Final = 2**31 - 16
"""The JVM has no longer array."""

_HEAD: Final = struct.Struct("!iiii")


@dataclass(frozen=True, slots=True)
class WireRow:
    """A row for the task `dest`, the `seq`-th of an edge, from the task `source` of the stage before."""

    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer

    def to_bytes(self) -> bytes:
        """The row as it travels; copies the payload once.

        Raises:
            OverflowError: it is 2 GiB long.
        """
        if len(self.payload) > BYTES_MAX - _HEAD.size:
            raise OverflowError(
                f"a chunk of {len(self.payload)} bytes does not go through an exchange: 2 GiB is too long"
            )
        return b"".join((_HEAD.pack(self.dest, self.source, self.edge, self.seq), self.payload))

    @classmethod
    def from_bytes(cls, sent: bytes) -> WireRow:
        """The row that was sent; its payload is not copied."""
        dest, source, edge, seq = _HEAD.unpack_from(sent)
        return cls(dest, source, edge, seq, pa.py_buffer(sent).slice(_HEAD.size))


# ---- the report of a task, and that of a job


@dataclass(slots=True)
class TaskReport:
    """The report of one task; it counts only where the task succeeded. `JobReport` explains the fields."""

    stage: int
    task: int
    read_messages: int = 0
    read_xor: int = 0
    ack_xor: int = 0
    tuples: int = 0
    failures: list[MessageFailure] = field(default_factory=list[MessageFailure])
    files: list[PreparedFile] = field(default_factory=list[PreparedFile])
    violations: list[str] = field(default_factory=list[str])
    late: list[MessageFailure] = field(default_factory=list[MessageFailure])
    late_xor: int = 0
    lost: list[MessageFailure] = field(default_factory=list[MessageFailure])
    together: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    met: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    unnamed: int = 0
    unanchored: int = 0
    counts: TaskCounts = field(default_factory=TaskCounts)
    heard: str = ""
    """A digest of the marks that it was sent, by all tasks of the stage before."""

    def ack(self, xor: int) -> None:
        """Add acked shares, by their XOR."""
        self.ack_xor = signed(self.ack_xor ^ xor)


def summary(stage: int, task: int, reports: Sequence[TaskReport]) -> WireRow:
    """The one row that a task of the last stage sends to the driver."""
    return WireRow(0, task, SUMMARY, stage, pickle.dumps([*reports]))


def job_report(summaries: Iterable[WireRow], tasks: Sequence[int], steps_ms: dict[str, float]) -> JobReport:
    """All summaries as one report. `tasks` is the number of tasks of each stage; each must have reported once.

    Raises:
        JobFailed: see `require_one_run`.
    """
    heard: dict[tuple[int, int], TaskReport] = {}
    violations: list[str] = []
    for row in summaries:
        for report in pickle.loads(row.payload):  # noqa: S301 - what a task of ours packed, as Spark does with its results
            if (report.stage, report.task) in heard:
                violations.append(f"task {report.task} of stage {report.stage} reported twice")
            heard[report.stage, report.task] = report
    for stage, number in enumerate(tasks):
        missing = [task for task in range(number) if (stage, task) not in heard]
        violations += [f"task {task} of stage {stage} did not report" for task in missing]
    reports = [heard[key] for key in sorted(heard)]
    require_one_run(reports)
    return JobReport(
        read_messages=sum(r.read_messages for r in reports),
        read_xor=xor_signed(r.read_xor for r in reports),
        ack_xor=xor_signed(r.ack_xor for r in reports),
        failures=tuple(f for r in reports for f in r.failures),
        files=tuple(sorted((f for r in reports for f in r.files), key=lambda f: (f.sink, f.path))),
        violations=(*violations, *(v for r in reports for v in r.violations)),
        tuples=sum(r.tuples for r in reports),
        steps_ms=steps_ms,
        late=tuple(f for r in reports for f in r.late),
        late_xor=xor_signed(r.late_xor for r in reports),
        together=np.concatenate([r.together for r in reports]) if reports else np.empty((0, 2), np.int64),
        met=np.concatenate([r.met for r in reports]) if reports else np.empty((0, 2), np.int64),
        lost=tuple(f for r in reports for f in r.lost),
        unnamed=sum(r.unnamed for r in reports),
        unanchored=sum(r.unanchored for r in reports),
        counts=total(r.counts for r in reports),
    )


def require_one_run(reports: Sequence[TaskReport]) -> None:
    """Refuse a job in which tasks of a stage read different runs of a task that ran again.

    By induction from the last stage, whose tasks report to the driver once, a job's result then rests on one run of each
    task: all that read it read the same run, and its report came with what that run sent. Nothing of Spark's scheduler is
    relied on. Two runs are taken for one with probability 2^-64.

    Raises:
        JobFailed: names the stage.
    """
    for stage in sorted({report.stage for report in reports}):
        if len({report.heard for report in reports if report.stage == stage and report.heard}) > 1:
            raise JobFailed(
                f"the tasks of stage {stage} did not all read the same run of a task of stage {stage - 1}, which ran again "
                "meanwhile, as after the loss of an executor. No message is to blame; the job runs again",
                **{OUTSIDE: "two runs of one task"},
            )


def rows_for(rows: Sequence[WireRow], task: int) -> list[WireRow]:
    """Those wire rows that are for this task of the next stage."""
    return [row for row in rows if row.dest == task]
