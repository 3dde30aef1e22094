"""The attempts at one batch: from its opened slice to its outcome. A message that kills its worker is set aside here.

It knows no ledger and no store: an attempt log records each further attempt before its job runs, and the caller acts on the
outcome. No batch goes on for ever: each way in which an attempt can end leads to another attempt a bounded number of times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

import numpy as np

from stormproof.core.base.errors import BatchUnverified, JobFailed, MachineUnavailable
from stormproof.core.base.machine_faults import OUTSIDE
from stormproof.core.base.message import FailureReason, Guarantee, MessageFailure, MessageId, Token, storable_text
from stormproof.core.contract.source import Expectation, Slice, Source
from stormproof.core.tracking.partners import Meetings, Partners, by_key, touched_by
from stormproof.core.tracking.verdict import (
    Abandoned,
    AllFailed,
    AttemptEnd,
    Breaker,
    Breaks,
    Broken,
    Complete,
    Divided,
    FailedIn,
    GivenUp,
    JobReport,
    Outcome,
    Shortages,
    mismatches,
    misread,
)
from stormproof.core.user_code.functions import lacked_in

log = logging.getLogger("stormproof.attempts")

UNVERIFIED_MAX: Final = 3
"""After a wrong verdict the batch runs in per-message mode, after a second it is halved, and a third stops the run."""

RERUNS_MAX: Final = 3
"""How often a batch runs again without messages that failed late; then it is divided."""

FAILED_MAX: Final = 20_000
"""How many failed messages of a batch are dealt with at once, about. A batch in which more fail goes back in parts, so that
neither the driver's memory nor a transaction grows with the number of failures."""

PARTS_MAX: Final = 16
"""A batch in which too many messages fail goes back in this many parts at most; what is too large still is divided again.
To find where each part ends, some brokers' sources read all that is left of the slice: with this many parts 8 times as much
as it holds.
"""

_LOOK_UP_ROWS: Final = 10_000
_SHOWN_BYTES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a batch. `expected` holds for its seed, with the excluded messages left out."""

    number: int
    seed: int
    expected: Expectation
    excluded: frozenset[int] = frozenset()
    per_message: bool = False
    careful: bool = False


@dataclass(frozen=True, slots=True)
class JobDied:
    """A job that ended without a report. `suspects` are the ids of messages that were in hand when it died, where known.

    `timed_out`: it was cancelled since it made no progress. `outside` names the error outside user code that ended it, by
    class and place. It is empty where user code ended it, or where a worker was lost and nothing is known.
    """

    error: str
    timed_out: bool = False
    suspects: tuple[int, ...] = ()
    outside: str = ""

    @classmethod
    def of(cls, error: JobFailed, *, suspects: tuple[int, ...] = ()) -> JobDied:
        """From the engine's error."""
        return cls(storable_text(error), suspects=suspects, outside=str(error.details.get(OUTSIDE, "")))


class AttemptLog(Protocol):
    """Records each further attempt, before its job runs."""

    def next_attempt(self, ended: int, end: AttemptEnd, error: str, seed: int, excluded: frozenset[int]) -> Expectation:
        """Record how attempt number `ended` ended, and the next attempt; returns what the next one must find.

        The source counts that apart from any read.
        """
        ...


Attempts: TypeAlias = Generator[Attempt, JobReport | JobDied, Outcome]
"""The attempts at one batch, one after another: see `BatchRunner.attempts`."""


@dataclass(slots=True)
class _InHand:
    """A batch, its present attempt, its failed messages, and how often each kind of attempt has ended."""

    name: str
    slice: Slice
    attempt_log: AttemptLog
    attempt: Attempt
    failed: dict[int, FailedIn] = field(default_factory=dict[int, FailedIn])
    died: int = 0
    unverified: int = 0
    unverified_seen: int = 0
    """How many wrong verdicts in a row there were when the present attempt began."""

    reruns: int = 0
    mates: set[int] = field(default_factory=set[int])
    """Of the failed messages those that come again in one batch."""

    trial: list[int] | None = None
    """The part that runs by itself now, to find out whether it ends its job; see `_search`."""

    trials: list[list[int]] | None = None
    trial_deaths: int = 0

    @property
    def everything_failed(self) -> bool:
        """Whether every message failed."""
        return len(self.failed) >= self.slice.expected.messages

    @property
    def ended(self) -> tuple[FailedIn, ...]:
        """The failed messages, each with the number of those that come again in one batch with it."""
        mates = len(self.mates) if len(self.mates) > 1 else 0
        return tuple(
            replace(one, failure=replace(one.failure, mates=mates)) if id_ in self.mates else one
            for id_, one in self.failed.items()
        )

    def carry(self, failures: Iterable[MessageFailure]) -> None:
        """Keep these failures until the batch's end; a message keeps its first one."""
        for failure in failures:
            self.failed.setdefault(failure.id, FailedIn(failure, self.attempt.number))


class BatchRunner:
    """Takes one batch after another from its opened slice to its outcome.

    Guarantee:
        A batch is complete only if it adds up: the messages that were read are those that were opened, and every share
        was acked or ended in a failure that is named. A failed message never excuses a mismatch of others. Under
        exactly-once, what was written contains nothing of a named message, nor of one that shares a tuple with it.

    Not guaranteed:
        Under at-least-once a message that failed late may have left rows behind: they come again when it is replayed.

    A batch whose job fails is bisected, down to a message that is alone in its batch; that message has then failed.
    Messages that were in hand when the job died are set apart first. A failure is counted only of a message that is named
    or that was alone. Where messages fail alone with one error outside user code, `stormproof.core.tracking.verdict`
    decides whether their failures count.

    Where messages meet (`meetings`), partners stay together: see `stormproof.core.tracking.partners`. A batch is not divided
    then. A message that ends its job is searched for in attempts that commit nothing.
    """

    def __init__(
        self,
        source: Source,
        guarantee: Guarantee,
        *,
        component: str,
        new_seed: Callable[[], int],
        meetings: Meetings | None = None,
    ) -> None:
        self._source = source
        self._guarantee = guarantee
        self._component = component
        self._new_seed = new_seed
        self._whole = meetings is not None
        self._partners = Partners(meetings)
        self._unverified = 0
        self._breaker = Breaker()
        self._shortages = Shortages()
        self._lost_batches = 0

    def attempts(self, name: str, slice_: Slice, seed: int, attempt_log: AttemptLog) -> Attempts:
        """Yields each attempt whose job is to be run, is sent the job's result, and returns the batch's outcome.

        `name` names the batch in logs and errors. Attempt log and source are called in the thread that sends.

        Raises:
            BatchUnverified: a message that is alone in its batch cannot be read again.
            TransientError: the attempt log or the source does not answer; nothing was decided.
        """
        # A driver died while it ran this batch before, perhaps of one message: a careful attempt notes which.
        batch = _InHand(name, slice_, attempt_log, Attempt(1, seed, slice_.expected, careful=slice_.deaths > 0))
        while True:
            batch.unverified_seen = self._unverified
            result = yield batch.attempt
            outcome = self._died(batch, result) if isinstance(result, JobDied) else self._judge(batch, result)
            if outcome is not None:
                return outcome

    def failed_in_hand(
        self, name: str, slice_: Slice, seed: int, attempt_log: AttemptLog, error: str, ids: Collection[int] | None
    ) -> AllFailed:
        """The outcome of a batch of which these messages (None: its only one) are not to run again."""
        batch = _InHand(name, slice_, attempt_log, Attempt(1, seed, slice_.expected))
        found = [self._blamed(message, FailureReason.WORKER_LOST, error) for message in self._read(batch, 1, ids)]
        if not found:
            raise BatchUnverified(f"{name}: its one message cannot be read again")
        return self._all_back(batch, found)

    # -- a job that died ---------------------------------------------------------------------------------------------

    def _died(self, batch: _InHand, died: JobDied) -> Outcome | None:
        log.warning("%s attempt %d: %s: %s", batch.name, batch.attempt.number, AttemptEnd.JOB_FAILED, died.error)
        if self._guarantee is Guarantee.AT_MOST_ONCE:
            self._lost_batches += 1  # its messages do not come back, so the next batch that fails is unrelated
            if self._breaker.failed_alone(self._lost_batches, died.outside) is Breaks.STOP:
                return self._broken(batch, died)
            return Abandoned(AttemptEnd.JOB_FAILED, f"{AttemptEnd.JOB_FAILED}: {died.error}", batch.attempt.number)
        batch.died += 1
        if batch.died < 2:
            per_message = batch.attempt.per_message
            self._again(batch, AttemptEnd.JOB_FAILED, died.error, per_message=per_message, careful=True)
            return None
        if self._whole and batch.slice.expected.messages > len(batch.failed) + 1:
            return self._search(batch, died)
        if batch.attempt.expected.messages > 1:
            alone = tuple(sorted(set(died.suspects) - batch.attempt.excluded))
            return _divided(batch, AttemptEnd.JOB_FAILED, died.error, alone)
        return self._fail_alone(batch, died)

    def _broken(self, batch: _InHand, died: JobDied) -> Broken:
        return Broken(died.error, died.outside, self._breaker.messages, batch.attempt.number)

    def _fail_alone(self, batch: _InHand, died: JobDied) -> AllFailed | Broken:
        """Fail the one message that is left, or in hand, unless the breaker says otherwise."""
        for message in self._read(batch, 1, batch.trial):
            breaks = self._breaker.failed_alone(message[0], died.outside)
            if breaks is Breaks.STOP:
                return self._broken(batch, died)
            reason = FailureReason.TIMEOUT if died.timed_out else FailureReason.WORKER_LOST
            return self._all_back(batch, [self._blamed(message, reason, died.error, counted=breaks is Breaks.COUNT)])
        raise BatchUnverified(f"{batch.name}: its one message cannot be read again")

    def _blamed(
        self, message: tuple[int, int, Token, bytes], reason: FailureReason, error: str, *, counted: bool = True
    ) -> MessageFailure:
        id_, origin, token, payload = message
        return MessageFailure(
            id=MessageId(id_),
            origin=origin,
            token=token,
            reason=reason,
            component=self._component,
            error=storable_text(error),
            input=storable_text(repr(payload[:_SHOWN_BYTES])),
            counted=counted,
        )

    def _search(self, batch: _InHand, died: JobDied | None) -> Outcome | None:
        """Run parts of the batch by themselves until a message alone ends its job: suspects first, then halves.

        `died` None: the part in hand ran to its end. Where every part did, the whole runs once more.
        """
        part = batch.trial
        if part is None:
            assert died is not None
            if batch.trials is not None:
                text = "its job ends each time, though each part of it runs by itself"
                return GivenUp(f"{text}: {died.error}", batch.attempt.number, GivenUp.TOO_MUCH)
            everyone = sorted(self._ids(batch))
            suspects = [[id_] for id_ in sorted(set(died.suspects) & set(everyone))]
            batch.trials = [*suspects, *_halves(everyone)]
        elif died is not None:
            batch.trial_deaths += 1
            if len(part) > 1:
                batch.trials = _halves(part)
            elif batch.trial_deaths > 1:
                return self._fail_alone(batch, died)
            else:
                batch.trials = [part, *(batch.trials or ())]
        if died is None or len(part or ()) != 1:
            batch.trial_deaths = 0
        batch.trial = batch.trials.pop(0) if batch.trials else None
        error = died.error if died is not None else "a part of it runs by itself"
        self._again(batch, AttemptEnd.JOB_FAILED, error, careful=True)
        return None

    # -- a job that reported -----------------------------------------------------------------------------------------

    def _judge(self, batch: _InHand, report: JobReport) -> Outcome | None:
        self._breaker.reported()
        if batch.trial is not None:
            return self._search(batch, None)
        if self._guarantee.tracked:
            report = self._without_shortages(batch, report)
            if report.unnamed and self._whole:
                return self._all_back(batch, _once(report.named))
            if report.unnamed:
                return _too_many(batch, report.named, len(report.named) + report.unnamed)
        attempt, tracked = batch.attempt, self._guarantee.tracked
        wrong = mismatches(report, attempt.expected, tracked=tracked, per_message=attempt.per_message)
        match self._guarantee:
            case Guarantee.AT_MOST_ONCE:
                return self._judge_untracked(batch, report, wrong)
            case Guarantee.AT_LEAST_ONCE:
                return self._judge_at_least_once(batch, report, wrong)
            case Guarantee.EXACTLY_ONCE:
                return self._judge_exactly_once(batch, report, wrong)

    def _without_shortages(self, batch: _InHand, report: JobReport) -> JobReport:
        """The report, in which failures that may be the machine's fault are not counted.

        Raises:
            MachineUnavailable: the functions of unrelated messages met what the machine lacks.
        """
        lacking = {f.id: f for f in (*report.failures, *report.late) if lacked_in(f.error) is not None}
        held = self._shortages.met_by(lacking.keys())
        if held is None:
            first = next(iter(lacking.values()))
            raise MachineUnavailable(
                f"{batch.name}: {first.component}: unrelated messages met what a machine lacks: {first.error}. None of them "
                "is to blame, and none counts a failure. What to do: see that the machines which run tasks have it again",
                error=first.error,
                errno=lacked_in(first.error),
                component=first.component,
                messages=len(lacking),
            )
        if not held:
            return report

        def spared(failures: Sequence[MessageFailure]) -> tuple[MessageFailure, ...]:
            return tuple(replace(f, counted=False) if f.id in held else f for f in failures)

        return replace(report, failures=spared(report.failures), late=spared(report.late))

    def _judge_untracked(self, batch: _InHand, report: JobReport, wrong: tuple[str, ...]) -> Outcome:
        if wrong:
            error = "; ".join(wrong)
            return Abandoned(AttemptEnd.UNVERIFIED, f"{AttemptEnd.UNVERIFIED}: {error}", batch.attempt.number)
        batch.carry([*report.failures, *report.late])
        return _complete(batch, report)

    def _judge_at_least_once(self, batch: _InHand, report: JobReport, wrong: tuple[str, ...]) -> Outcome | None:
        """The verdict where what was written stays, and messages that failed late come again."""
        if not wrong:
            if self._all_lost(batch, report):
                return self._does_not_add_up(batch, (_NOBODY_COMPLETE,))
            batch.carry(self._with_partners(batch, report, wrong))
            self._unverified = 0
            return self._all_failed(batch) if batch.everything_failed else _complete(batch, report)
        if report.lost and not misread(report, batch.attempt.expected) and not self._all_lost(batch, report):
            # Rows between the stages do not add up either. A run without the lost messages tells whether they explain it.
            return self._without(batch, self._with_partners(batch, report, wrong), wrong)
        return self._does_not_add_up(batch, wrong)

    def _judge_exactly_once(self, batch: _InHand, report: JobReport, wrong: tuple[str, ...]) -> Outcome | None:
        """The verdict where a failed message, or one that shares a tuple with it, may leave nothing behind."""
        if misread(report, batch.attempt.expected):  # the report may name messages that this batch did not open
            return self._does_not_add_up(batch, wrong)
        named, touched = self._spread(batch, _once(report.named), report, wrong)
        if not (report.late or report.lost or touched):
            if wrong:
                return self._does_not_add_up(batch, wrong)
            batch.carry(named)
            self._unverified = 0
            return self._all_failed(batch) if batch.everything_failed else _complete(batch, report)
        if report.lost and self._all_lost(batch, report):
            return self._does_not_add_up(batch, wrong or (_NOBODY_COMPLETE,))
        if len(touched) > FAILED_MAX and not self._whole:
            return _too_many(batch, named, len(named) + len(touched))
        returned = self._returned(batch, named, touched)
        if len(returned) != len(touched):
            missing = sorted(touched.keys() - {failure.id for failure in returned})
            text = f"tuples are anchored to messages that the batch did not open: {missing[:5]}"
            return self._does_not_add_up(batch, (*wrong, text))
        return self._without(batch, [*named, *returned], wrong)

    def _all_lost(self, batch: _InHand, report: JobReport) -> bool:
        """Whether the batch has several messages and none of them was complete.

        Then something between the stages loses every message. That must stop the run, not turn all messages into dead
        letters. A batch of retries is exempt: its messages were lost before, in batches in which others were complete.
        """
        messages = batch.attempt.expected.messages
        return messages > 1 and not batch.slice.retry and len({failure.id for failure in report.lost}) >= messages

    def _does_not_add_up(self, batch: _InHand, wrong: Sequence[str]) -> Outcome | None:
        error = "; ".join(wrong)
        log.warning("%s attempt %d: %s: %s", batch.name, batch.attempt.number, AttemptEnd.UNVERIFIED, error)
        batch.unverified += 1
        if self._unverified <= batch.unverified_seen:
            # Else a batch that ran at the same time has counted already, for the same cause.
            self._unverified += 1
        if max(self._unverified, batch.unverified) >= UNVERIFIED_MAX:
            return GivenUp(error, batch.attempt.number)
        if batch.unverified >= 2 and batch.slice.expected.messages > 1 and not self._whole:
            return _divided(batch, AttemptEnd.UNVERIFIED, error)
        self._again(batch, AttemptEnd.UNVERIFIED, error, per_message=True)
        return None

    def _without(self, batch: _InHand, failures: Sequence[MessageFailure], wrong: Sequence[str]) -> Outcome | None:
        """Run again without these messages; their failures are kept until the batch's end."""
        batch.carry(failures)
        error = _summary(failures, wrong)
        log.info("%s attempt %d: %s: %s", batch.name, batch.attempt.number, AttemptEnd.MOOT, error)
        if batch.everything_failed:
            return self._all_failed(batch)
        if batch.reruns >= RERUNS_MAX and not self._whole:
            return _divided(batch, AttemptEnd.MOOT, error)
        batch.reruns += 1
        self._again(batch, AttemptEnd.MOOT, error)
        return None

    def _all_failed(self, batch: _InHand) -> AllFailed:
        self._unverified = 0
        return AllFailed(batch.ended, batch.attempt.number)

    def _all_back(self, batch: _InHand, failures: Sequence[MessageFailure]) -> AllFailed:
        """Fail these messages. The others of the batch, if there are any, are returned with them."""
        failed = {failure.id for failure in failures}
        others = dict.fromkeys(self._ids(batch) - failed, failures[0].id) if self._whole else {}
        batch.carry([*failures, *self._returned(batch, failures, others)])
        batch.mates |= batch.failed.keys() if self._whole else set()
        return self._all_failed(batch)

    def _with_partners(self, batch: _InHand, report: JobReport, wrong: Sequence[str]) -> list[MessageFailure]:
        """The failures of an attempt, and the returns of those that must not lack them at a join."""
        named, touched = self._spread(batch, _once(report.named), report, wrong)
        return [*named, *(self._returned(batch, named, touched) if self._whole else ())]

    def _spread(
        self, batch: _InHand, named: list[MessageFailure], report: JobReport, wrong: Sequence[str]
    ) -> tuple[list[MessageFailure], Mapping[int, int]]:
        """The failures of an attempt, and the messages that come again with them, each with one of the failed ones."""
        spread = self._partners.spread(named, report, adds_up=not (wrong or report.lost))
        failed, touched = {failure.id for failure in named}, dict(spread.touched)
        if spread.everyone is not None:
            touched = dict.fromkeys(self._ids(batch) - failed, spread.everyone)
        elif self._whole and named and batch.reruns >= RERUNS_MAX:
            # Some message fails in each attempt: half of the others come again later, with their partners.
            others = sorted(self._ids(batch) - failed - touched.keys())
            some = {MessageId(id_) for id_ in others[: math.ceil(len(others) / 2)]}
            linked = some | touched_by(some, np.concatenate([report.together, by_key(report.met)])).keys()
            touched |= dict.fromkeys(linked - failed - touched.keys(), named[0].id)
        batch.mates |= failed | touched.keys() if self._whole else touched.keys() | failed & set(report.together.flat)
        return list(spread.failures), touched

    # -- both --------------------------------------------------------------------------------------------------------

    def _again(
        self, batch: _InHand, end: AttemptEnd, error: str, *, per_message: bool = False, careful: bool = False
    ) -> None:
        before = batch.attempt
        seed, excluded = self._new_seed(), frozenset(batch.failed)
        if batch.trial is not None:
            excluded |= self._ids(batch) - set(batch.trial)
        expected = batch.attempt_log.next_attempt(before.number, end, storable_text(error), seed, excluded)
        batch.attempt = Attempt(
            before.number + 1, seed, expected, excluded, per_message=per_message, careful=careful or before.careful
        )

    def _returned(
        self, batch: _InHand, named: Sequence[MessageFailure], touched: Mapping[int, int]
    ) -> list[MessageFailure]:
        """The messages to return, uncounted, with failed ones. Their origins are read again: a report has only ids."""
        if not touched:
            return []
        culprits = {failure.id: failure for failure in named}
        tie = "a tuple or may share a join" if self._whole else "a tuple"
        found: list[MessageFailure] = []
        for id_, origin, token, _ in self._read(batch, _LOOK_UP_ROWS, touched):
            culprit = culprits[MessageId(touched[id_])]
            shown = self._source.shown_id(culprit.id, culprit.origin)
            found.append(
                MessageFailure(
                    id=MessageId(id_),
                    origin=origin,
                    token=token,
                    reason=culprit.reason,
                    component=culprit.component,
                    error=storable_text(f"returned with message {shown}, with which it shares {tie}: {culprit.error}"),
                    counted=False,
                )
            )
        return found

    def _ids(self, batch: _InHand) -> set[int]:
        """The messages of the batch that have not failed."""
        return {
            id_
            for reader in self._source.readers(batch.slice, 1)
            for rows in reader.read(batch.attempt.seed, frozenset(batch.failed), _LOOK_UP_ROWS)
            for id_ in rows.column("id").to_pylist()
        }

    def _read(
        self, batch: _InHand, batch_rows: int, wanted: Collection[int] | None = None
    ) -> Iterator[tuple[int, int, Token, bytes]]:
        """(id, origin, token, payload) of the wanted messages that have not failed, or of all."""
        left = -1 if wanted is None else len(wanted)
        numbers = None if wanted is None else np.fromiter(wanted, np.int64)
        for reader in self._source.readers(batch.slice, 1):
            for rows in reader.read(batch.attempt.seed, frozenset(batch.failed), batch_rows):
                ids = rows.column("id").to_numpy()
                for row in np.flatnonzero(np.isin(ids, numbers)) if numbers is not None else range(len(ids)):
                    id_, origin, token, payload = (rows.column(number)[int(row)].as_py() for number in range(4))
                    yield id_, origin, Token(token or 0), payload
                    left -= 1
                    if not left:
                        return


_NOBODY_COMPLETE: Final = "not one message of the batch was complete"


def _once(failures: Iterable[MessageFailure]) -> list[MessageFailure]:
    """The first failure of each message; several tasks may have named one."""
    found: dict[int, MessageFailure] = {}
    for failure in failures:
        found.setdefault(failure.id, failure)
    return list(found.values())


def _complete(batch: _InHand, report: JobReport) -> Complete:
    return Complete(report, batch.ended, batch.attempt.number)


def _halves(part: list[int]) -> list[list[int]]:
    middle = math.ceil(len(part) / 2)
    return [part[:middle], part[middle:]]


def _divided(batch: _InHand, end: AttemptEnd, error: str, alone: tuple[int, ...] = ()) -> Divided:
    how = f"{len(alone)} suspects set apart" if alone else "halved"
    return Divided(end, f"{how} after {end}: {error}", alone, batch.attempt.number)


def _too_many(batch: _InHand, failures: Sequence[MessageFailure], number: int) -> Divided:
    """Back in parts of which each has about half of the failures that are dealt with at once."""
    messages = batch.slice.expected.messages
    parts = min(max(math.ceil(2 * min(number, messages) / FAILED_MAX), 2), PARTS_MAX)
    first = failures[0]
    reason = (
        f"in {parts} parts, since some {number} messages failed or are returned, and {FAILED_MAX} are dealt with at once; "
        f"the first: {first.component}: {first.error}"
    )
    log.warning("%s attempt %d: it goes back %s", batch.name, batch.attempt.number, reason)
    return Divided(AttemptEnd.MOOT, reason, (), batch.attempt.number, parts)


def _summary(failures: Sequence[MessageFailure], wrong: Sequence[str]) -> str:
    counted = _once(failure for failure in failures if failure.counted)
    returned = len(_once(failures)) - len(counted)
    first = (*counted, *failures)[0]
    text = f"{len(counted)} messages failed, {returned} are returned with them; the first: {first.component}: {first.error}"
    return "; ".join([text, *wrong])
