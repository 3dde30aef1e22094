"""A job: one attempt at one batch, in the form that an engine runs; and its part for each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from stormproof.core.contract.sink import SinkWriter, TaskContext
from stormproof.core.contract.source import Decoder, ShownIds, SliceReader
from stormproof.core.graph.plan import CombineNode, Plan, SendNode, StagePlan, WriteNode
from stormproof.core.heartbeat.wire import Place

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
    heartbeat: Place | None = None
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
    heartbeat: Place | None = None
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
