"""The task of an acker: the verdicts over all messages whose notices came to it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.task.cut import StageJob
from stormproof.core.task.exchange import receive
from stormproof.core.task.report import TaskReport, summary
from stormproof.core.task.wire import ACK_SCHEMA, INIT_SCHEMA
from stormproof.core.tracking.acker import incomplete


def judged(part: StageJob, task: int, incoming: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """The task's summary: it names the messages that are not complete."""
    received = receive(incoming, part.stage, task, part.tasks[part.stage - 1], {}, tracked=part.tracked)
    inits = pa.Table.from_batches(received.inits, INIT_SCHEMA)
    acks = pa.Table.from_batches(received.acks, ACK_SCHEMA)
    ids, origins, tokens = (inits.column(i).to_numpy() for i in range(3))
    bad = incomplete(ids, tokens, acks.column(0).to_numpy(), acks.column(1).to_numpy())
    report = TaskReport(part.stage, task, violations=received.violations, heard=received.heard)
    known = dict(zip(ids[np.isin(ids, bad)].tolist(), origins[np.isin(ids, bad)].tolist(), strict=True))
    for id_ in bad.tolist():
        error = "its ack val is not zero: a tuple of it was lost or doubled on the way"
        report.lost.append(
            MessageFailure(MessageId(id_), known.get(id_, 0), Token(0), FailureReason.LOST, "acker", error)
        )
    return summary(part.stage, task, [*received.reports, report])
