"""The report of a task, and the report of a job, which is made of those of its tasks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from stormproof.core.base.errors import JobFailed, Json
from stormproof.core.base.machine_faults import OUTSIDE
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.sink import PreparedFile, files_to_json
from stormproof.core.task.wire import SUMMARY, WireRow
from stormproof.core.tracking.share import signed, xor_signed
from stormproof.core.tracking.verdict import Counts, JobReport, total


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
    counts: Counts = field(default_factory=Counts)
    heard: str = ""
    """A digest of the marks that it was sent, by all tasks of the stage before."""

    def ack(self, xor: int) -> None:
        """Add acked shares, by their XOR."""
        self.ack_xor = signed(self.ack_xor ^ xor)

    def to_json(self) -> dict[str, Json]:
        """The report as it travels; `from_json` reads it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {
            "failures": _failures_to_json(self.failures),
            "late": _failures_to_json(self.late),
            "lost": _failures_to_json(self.lost),
            "files": files_to_json(self.files),
            "counts": self.counts.to_json(),
            "together": _pairs_to_json(self.together),
            "met": _pairs_to_json(self.met),
        }

    @classmethod
    def from_json(cls, parts: dict[str, Any]) -> TaskReport:
        """The report that was sent."""
        read: dict[str, Any] = {
            "failures": _failures_from_json(parts["failures"]),
            "late": _failures_from_json(parts["late"]),
            "lost": _failures_from_json(parts["lost"]),
            "files": [PreparedFile(**file) for file in parts["files"]],
            "counts": Counts.from_json(parts["counts"]),
            "together": _pairs_from_json(parts["together"]),
            "met": _pairs_from_json(parts["met"]),
        }
        return cls(**(parts | read))


def _pairs_to_json(pairs: npt.NDArray[np.int64]) -> str:
    return base64.b64encode(np.ascontiguousarray(pairs).tobytes()).decode()


def _pairs_from_json(text: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(base64.b64decode(text), np.int64).reshape(-1, 2)


def _failures_to_json(failures: Sequence[MessageFailure]) -> list[Json]:
    return [[f.id, f.origin, f.token, f.reason.value, f.component, f.error, f.input] for f in failures]


def _failures_from_json(parts: Any) -> list[MessageFailure]:
    return [
        MessageFailure(MessageId(id_), origin, Token(token), FailureReason(reason), component, error, input_)
        for id_, origin, token, reason, component, error, input_ in parts
    ]


def summary(stage: int, task: int, reports: Sequence[TaskReport]) -> WireRow:
    """The one row that a task of the last stage sends to the driver."""
    return WireRow(0, task, SUMMARY, stage, json.dumps([r.to_json() for r in reports]).encode())


def job_report(summaries: Iterable[WireRow], tasks: Sequence[int], steps_ms: dict[str, float]) -> JobReport:
    """All summaries as one report. `tasks` is the number of tasks of each stage; each must have reported once.

    Raises:
        JobFailed: see `require_one_run`.
    """
    heard: dict[tuple[int, int], TaskReport] = {}
    violations: list[str] = []
    for row in summaries:
        for parts in json.loads(bytes(row.payload)):
            report = TaskReport.from_json(parts)
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
