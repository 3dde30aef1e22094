"""The task of an acker: it decides the messages whose notices came to it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.task.cut import StageJob
from stormproof.core.task.exchange import receive
from stormproof.core.task.report import TaskReport, summary
from stormproof.core.task.wire import INIT_SCHEMA, WireRow
from stormproof.core.tracking.acker import Acker
from stormproof.core.tracking.component_counts import ACKER
from stormproof.core.tracking.share import as_words


def judged(part: StageJob, task: int, incoming: Iterable[WireRow]) -> WireRow:
    """The task's summary: it names the messages that are not complete."""
    received = receive(incoming, part.stage, task, part.tasks[part.stage - 1], {}, tracked=part.tracked)
    inits = pa.Table.from_batches(received.inits, INIT_SCHEMA)
    ids, origins = inits.column("id").to_numpy(), inits.column("origin").to_numpy()
    report = TaskReport(part.stage, task, violations=received.violations, heard=received.heard)
    with report.counts.busy(ACKER):
        acker = Acker(ids)
        for notices in (*received.inits, *received.acks):
            acker.tell(notices.column("id").to_numpy(), as_words(notices.column("value").to_numpy()))
        bad = acker.incomplete()
    named = np.isin(ids, bad)
    known = dict(zip(ids[named].tolist(), origins[named].tolist(), strict=True))
    error = "its ack val is not zero: a tuple of it was lost or doubled on the way"
    named_max = len(bad) if part.named_max is None else part.named_max
    report.unnamed = max(len(bad) - named_max, 0)
    for id_ in bad[:named_max].tolist():
        report.lost.append(
            MessageFailure(MessageId(id_), known.get(id_, 0), Token(0), FailureReason.LOST, "acker", error)
        )
    return summary(part.stage, task, [*received.reports, report])
