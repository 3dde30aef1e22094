"""Broken variants of the tracking, for negative controls: each takes one promise away, and a simulation must show it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.contract.source import Expectation
from stormproof.core.pending import batches, rows
from stormproof.core.task import job
from stormproof.core.task import task as task_module
from stormproof.core.task.exchange import ReceivedChunks, Way, receive
from stormproof.core.task.job import TaskReport
from stormproof.core.tracking import attempts
from stormproof.core.tracking.acker import Acker
from stormproof.core.tracking.share import Anchors, mix64, unsigned
from stormproof.core.tracking.verdict import Complete, JobReport, mismatches, misread

Break = Callable[[pytest.MonkeyPatch], None]


def tokens_reused(patch: pytest.MonkeyPatch) -> None:
    """All messages have the same token."""

    def tokens(ids: Rows, seed: int) -> Words:
        return mix64(np.full(len(ids), unsigned(seed), np.uint64))

    for module in (batches, rows):
        patch.setattr(module, "tokens", tokens)


def tokens_counted_by_the_reader(patch: pytest.MonkeyPatch) -> None:
    """The verdict expects what was read, not what was opened."""

    def read(report: JobReport) -> Expectation:
        return Expectation(report.read_messages, report.read_xor)

    def of_read(report: JobReport, _: Expectation, *, tracked: bool, per_message: bool = False) -> tuple[str, ...]:
        return mismatches(report, read(report), tracked=tracked, per_message=per_message)

    patch.setattr(attempts, "mismatches", of_read)
    patch.setattr(attempts, "misread", lambda report, _: misread(report, read(report)))


def one_share_for_two_subscribers(patch: pytest.MonkeyPatch) -> None:
    """Each subscriber gets the same share of a tuple."""
    deliveries = Anchors.deliveries

    def same(anchors: Anchors, counts: Rows | None, subscribers: int) -> list[Anchors]:
        return deliveries(anchors, counts, 1) * subscribers

    patch.setattr(Anchors, "deliveries", same)


def ack_dropped(patch: pytest.MonkeyPatch) -> None:
    """Every third ack of each worker goes nowhere."""
    ack, number = TaskReport.ack, itertools.count(1)

    def sometimes(report: TaskReport, xor: int) -> None:
        if next(number) % 3:
            ack(report, xor)

    patch.setattr(TaskReport, "ack", sometimes)


def rows_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Nobody counts the rows between stages, and an XOR is blind to a row that comes three times."""

    def uncounted(
        batches: Iterable[pa.RecordBatch],
        stage: int,
        task: int,
        sources: int,
        ways: Mapping[int, Way],
        *,
        tracked: bool,
    ) -> ReceivedChunks:
        received = receive(batches, stage, task, sources, ways, tracked=tracked)
        received.violations.clear()
        return received

    patch.setattr(task_module, "receive", uncounted)


def verdict_before_init(patch: pytest.MonkeyPatch) -> None:
    """The ackers are content with acks of a message that was never initialised."""

    incomplete = Acker.incomplete

    def content(acker: Acker) -> Rows:
        bad = incomplete(acker)
        return bad[np.isin(bad, acker.ids)]

    patch.setattr(Acker, "incomplete", content)


def failure_explains_a_loss(patch: pytest.MonkeyPatch) -> None:
    """Where a message failed, nobody asks why the rest does not add up."""

    def explained(
        report: JobReport, expected: Expectation, *, tracked: bool, per_message: bool = False
    ) -> tuple[str, ...]:
        if report.failures or report.late:
            return ()
        return mismatches(report, expected, tracked=tracked, per_message=per_message)

    patch.setattr(attempts, "mismatches", explained)


def failed_message_confirmed(patch: pytest.MonkeyPatch) -> None:
    """A complete batch is confirmed with the messages that failed in it."""
    complete: Callable[..., Complete] = attempts._complete  # pyright: ignore[reportPrivateUsage]
    patch.setattr(attempts, "_complete", lambda *given: replace(complete(*given), failed=()))


def runs_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether all readers of a repeated task read the same run of it."""
    patch.setattr(job, "require_one_run", lambda _: None)
