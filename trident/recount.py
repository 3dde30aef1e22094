"""What a batch writes to a sink whose table refuses a group's row: the same once more, without that group's messages.

A group's row stands for messages that are not known one by one, and each of them may have a part in other groups. So the
batch's job runs again for that sink alone, in per-message mode: its rows name their messages. It runs again without the
messages of each row that the table refuses, until the table takes every row. The sink holds nothing of the batch meanwhile.
What it is to write is recorded in the ledger before it is asked again, with what was left out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.errors import Json, SinkRefused
from stormproof.core.failpoint import failpoint
from stormproof.core.message import MessageId, storable_text
from stormproof.core.source.protocol import Expectation, Slice, Source
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.together import touched_by
from stormproof.core.tracking.verdict import JobReport, mismatches
from stormproof.sinks.protocol import PROBLEM, RefusedRow, SinkProblem
from stormproof.sinks.rejects import GroupsRefused
from stormproof.trident.ledger import txns
from stormproof.trident.steps import Prepared, SinkAnswers, Steps

log = logging.getLogger("stormproof.txn")

RECOUNTS_MAX: Final = 8
"""How often a batch's job runs again for its refused groups. Each time leaves out the groups that are refused by then."""
UNVERIFIED_MAX: Final = 2
"""How many of these jobs may not add up."""
TEXT_MAX: Final = 1_000
"""Characters of a refused row, and of its error, that are recorded."""

Pairs: TypeAlias = npt.NDArray[np.int64]
_NO_PAIRS: Final[Pairs] = np.empty((0, 2), np.int64)
_ROWS: Final = 10_000


class JobAgain(Protocol):
    """Runs a batch's job again for one sink, in per-message mode; for the others it writes nothing."""

    def __call__(self, batch: Prepared, sink: str, seed: int, excluded: frozenset[int]) -> JobReport | JobDied:
        """The job's result. Its lease is held: it does not lapse."""
        ...


class Recount:
    """Takes batches on which a table refuses a group's row, of one driver."""

    def __init__(self, steps: Steps, job: JobAgain, new_seed: Callable[[], int]) -> None:
        self._steps = steps
        self._job = job
        self._new_seed = new_seed

    def settle(self, batch: Prepared, answers: SinkAnswers) -> tuple[Prepared, SinkAnswers]:
        """The batch with what it writes in the end, and the sinks' answers to that.

        Where a group's messages cannot be named, or are more than may be rejected, the answers have the refusal as before.

        Raises:
            Fenced: another driver took over.
            TransientError: a store does not answer; recovery asks the sink again.
        """
        unverified = 0
        together = _NO_PAIRS
        for _ in range(RECOUNTS_MAX):
            error, sink = answers.error, answers.refused
            if not isinstance(error, SinkRefused) or not _may_recount(batch, error):
                break
            left_out = self._left_out(batch, batch.work[sink].left_out or (), error, together)
            if len(_messages(left_out)) > (batch.rejects_max or 0):
                return batch, replace(answers, error=too_many(error, batch.rejects_max))
            report = None
            while report is None:
                found = self._run(batch, sink, left_out)
                if isinstance(found, JobReport):
                    report = found
                    continue
                unverified += 1
                log.warning("txid %d: run again for sink %r alone: %s", batch.txid, sink, found)
                if unverified >= UNVERIFIED_MAX:
                    return batch, replace(answers, error=_explained(error, found))
            together = report.together
            # In recovery no sink was asked yet for what it holds last: only the batch's own record tells what it follows.
            follows = batch.work[sink].previous
            fixed = replace(self._steps.work_of(sink, report.files), previous=follows, left_out=left_out)
            with self._steps.ledger.transaction(self._steps.run) as tx:
                txns.replace_content(tx, batch.txid, batch.state, fixed)
            failpoint("recount.after")
            batch = replace(batch, work={**batch.work, sink: fixed})
            rest = {name: item for name, item in batch.work.items() if name not in answers.results}
            further = self._steps.adopt(replace(batch, work=rest))
            answers = SinkAnswers({**answers.results, **further.results}, further.refused, further.error)
        return batch, answers

    def _run(self, batch: Prepared, sink: str, left_out: Sequence[RefusedRow]) -> JobReport | str:
        """The report of the batch's job for one sink, without these messages; or why there is none that adds up."""
        excluded = frozenset({int(failure.id) for failure in batch.failed} | _messages(left_out).keys())
        seed = self._new_seed()
        with self._steps.ledger.transaction(self._steps.run) as tx:
            expected: Expectation = self._steps.source.expect(batch.slice, seed, excluded, self._steps.joined(tx))
        report = self._job(batch, sink, seed, excluded)
        if isinstance(report, JobDied):
            return report.error
        wrong = list(mismatches(report, expected, tracked=True, per_message=True))
        for failure in (*report.failures, *report.late, *report.lost)[:1]:
            shown = self._steps.source.shown_id(failure.id, failure.origin)
            wrong.append(f"message {shown} failed, and had not before: {failure.component}: {failure.error}")
        return "; ".join(wrong) if wrong else report

    def _left_out(
        self, batch: Prepared, before: tuple[RefusedRow, ...], error: SinkRefused, together: Pairs
    ) -> tuple[RefusedRow, ...]:
        """What is left out by now: the messages of refused groups, and those that share a tuple with one of them."""
        if not isinstance(error, GroupsRefused):
            return before
        found = before + tuple(_of_group(row) for row in error.rows)
        named = _messages(found)
        touched = touched_by({MessageId(number) for number in named}, together)
        return found + tuple(
            replace(named[touched[number]], messages=((number, origin),), goes_with_others=True)
            for number, origin in (messages_of(self._steps.source, batch.slice, among=touched) if touched else ())
        )


def messages_of(
    source: Source, slice_: Slice, *, excluded: frozenset[int] = frozenset(), among: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """A slice's messages with their origins, read again: all but the `excluded` ones, or those `among` some."""
    wanted = None if among is None else np.fromiter(sorted(among), np.int64)
    for reader in source.readers(slice_, 1):
        for rows in reader.read(0, excluded, _ROWS):
            ids, origins = rows.column("id").to_numpy(), rows.column("origin")
            for row in range(len(ids)) if wanted is None else np.flatnonzero(np.isin(ids, wanted)).tolist():
                yield int(ids[row]), int(origins[row].as_py())


def _may_recount(batch: Prepared, error: SinkRefused) -> bool:
    """Whether a refusal is of rows whose messages can be named, and rejected."""
    unnamed = error.details.get(PROBLEM) == SinkProblem.MESSAGES_UNKNOWN
    return batch.guarantee.tracked and bool(batch.rejects_max) and (unnamed or isinstance(error, GroupsRefused))


def _of_group(row: RefusedRow) -> RefusedRow:
    """The record of a refused row of a group: it is in no file of what is committed."""
    return replace(row, file="", row=-1, text=row.text[:TEXT_MAX], error=row.error[:TEXT_MAX])


def _messages(left_out: Sequence[RefusedRow]) -> dict[int, RefusedRow]:
    """The messages of these rows, each with the first row that it is left out for."""
    found: dict[int, RefusedRow] = {}
    for row in left_out:
        for number, _ in row.messages:
            found.setdefault(number, row)
    return found


def too_many(error: SinkRefused, most: int | None) -> SinkRefused:
    """The error for refused groups with more messages than a sink may reject."""
    return SinkRefused(
        f"{error.message}. These rows have more than {most} messages, which is more than may be rejected "
        "(rejects_max_share)",
        **{**error.details, PROBLEM: SinkProblem.TOO_MANY_REJECTS.value, "rejects_max": most},
    )


def _explained(error: SinkRefused, why: str) -> SinkRefused:
    details: dict[str, Json] = dict(error.details)
    return SinkRefused(
        f"{error.message}. The batch was run again to name the messages of these rows, and that failed: "
        f"{storable_text(why)}",
        **details,
    )
