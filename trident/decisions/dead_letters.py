"""Decisions about dead letters: requeue, drop, and hand out again with another payload.

By a canary the first few messages are handed out again, then, while few enough of them fail, the rest in growing waves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.source.files.rows import editable
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.decisions.letter_choice import ChosenLetters, Letter, Letters, letters_of, not_dead
from stormproof.trident.ledger import control, sink_records
from stormproof.trident.ledger.tables import Reject
from stormproof.trident.terms.transaction_states import OperatorAction, RejectState
from stormproof.trident.terms.wording import counted, local_time

if TYPE_CHECKING:
    from stormproof.trident.decisions.letter_choice import LetterFilter
    from stormproof.trident.decisions.stores import Stores
    from stormproof.trident.ledger.database import Tx


@dataclass(frozen=True, slots=True)
class Disposed:
    """Dead letters that were requeued or dropped, and ids that were no undecided dead letters (any more)."""

    topology: str
    requeued: bool
    ids: tuple[str, ...]
    """Messages that had failed too often."""
    rejects: tuple[Reject, ...]
    """What sinks had rejected."""
    not_dead: tuple[str, ...]
    refused: Mapping[str, str]
    """Why others of the rejected messages cannot be opened again."""
    by: str

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages, each once."""
        return ChosenLetters(self.ids, self.rejects, ()).messages

    def lines(self) -> list[str]:
        """What was done, for people."""
        done = "requeued" if self.requeued else "dropped"
        number = len(self.ids) + len(self.rejects)
        found = [f"{self.topology}: {counted(number, 'dead letter')} {done} by {self.by}"]
        if self.rejects and self.requeued:
            found.append(
                f"{len(self.rejects)} of them for the sinks that rejected them alone: the other sinks hold them"
            )
        return found


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter that is handed out again with another payload; the hashes are SHA-256 of what is stored."""

    topology: str
    edited: str
    by: str
    why: str
    payload_sha256: str
    new_payload_sha256: str
    bytes: int
    new_bytes: int

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [
            f"{self.topology}: {self.edited} is handed out again with its new payload ({counted(self.new_bytes, 'byte')}, "
            f"was {self.bytes}); the old one stays on record"
        ]


def require_choice(ids: Sequence[str], where: LetterFilter, *, every: bool) -> None:
    """Raise UsageError unless ids, a filter that restricts something, or all of them is chosen, and only one of these.

    With ids, a sink restricts them further.
    """
    if sum((bool(ids), not (where.without_sink if ids else where).is_empty, every)) != 1:
        raise UsageError(
            "name the messages' ids, or --all, or a filter such as --reason or --sink, and only one of these; with ids, "
            "--sink restricts them to one sink"
        )


def dispose(
    stores: Stores,
    letters: Letters,
    chosen: ChosenLetters,
    *,
    requeue: bool,
    by: str,
    why: str,
    ids: Sequence[str] = (),
) -> Disposed:
    """Requeue or drop these dead letters, in one transaction; those that are decided already are left out.

    What a sink rejected is opened again for that sink alone, or given up there. `ids` are the messages that a person named.

    Raises:
        UsageError: a payload is not the one that was set aside, or a rejected message is to be opened again and its source
            keeps nothing in the ledger's database; nothing was done.
    """
    refused: dict[str, str] = {}
    if chosen.rejects and requeue:
        letters.require_sources()
    with stores.transaction(letters.row) as tx:
        tx.confirm()
        done = letters.dispose(chosen.ids, requeue=requeue, by=by, why=why, tx=tx.raw)
        mine = sink_records.undecided_rejects(tx, [one.id for one in chosen.rejects])
        if requeue:
            mine, refused = _opened_again(stores, letters, tx, mine, by=by, why=why)
        else:
            sink_records.drop_retrying(tx, done, by=by, why=why)
        sink_records.decide_rejects(
            tx, [one.id for one in mine], RejectState.RETRYING if requeue else RejectState.DROPPED, by=by, why=why
        )
        _record(tx, OperatorAction.RETRY_REJECT if requeue else OperatorAction.DROP_REJECT, mine, by=by, why=why)
    known = {*done, *(one.message for one in mine), *refused}
    missed = tuple(one for one in ids if one not in known)
    return Disposed(letters.topology, requeue, tuple(done), tuple(mine), missed, refused, by)


def _opened_again(
    stores: Stores, letters: Letters, tx: Tx, mine: Sequence[Reject], *, by: str, why: str
) -> tuple[list[Reject], dict[str, str]]:
    """Open rejected messages again; gives those that were opened, and why others cannot be, by message."""
    with stores.audit.snapshot() as snapshot:
        graphs = snapshot.graphs(letters.row.incarnation)
    present = graphs[-1].sinks
    refused: dict[str, str] = {}
    busy = sink_records.retrying(tx, {one.message for one in mine if one.message is not None})
    payloads: dict[str, bytes] = {}
    altered = sink_records.altered_rejects(tx, [one.id for one in mine])
    for one in mine:
        name = one.message or f"a row of txid {one.txid} at sink {one.sink}"
        if letters.row.guarantee == Guarantee.AT_MOST_ONCE.value:
            refused[name] = "under at-most-once no message is opened again; put it to the source anew, and drop it here"
        elif one.message is None:
            refused[name] = "it belongs to no single message, and cannot be opened again"
        elif one.id in altered:
            refused[name] = (
                "its payload or its row is not what was rejected: somebody changed it in the ledger. Drop it"
            )
        elif one.payload is None:
            refused[name] = "its source gave no payload, and it cannot be opened again"
        elif one.message in busy:
            refused[name] = "it is being retried for another sink; requeue it for this one after that"
        elif one.sink not in present:
            refused[name] = f"the topology has no sink {one.sink!r} any more"
        else:
            payloads[one.message] = one.payload
    opened_again = set(letters.open_again(payloads, by=by, why=why, tx=tx.raw))
    for message in sorted(payloads.keys() - opened_again):
        refused[message] = "it waits for a retry already"
    return [one for one in mine if one.message in opened_again and one.message not in refused], refused


def _record(tx: Tx, action: OperatorAction, done: Sequence[Reject], *, by: str, why: str) -> None:
    """One event for each txid and sink: who decided, and about how many messages."""
    for (txid, sink), number in Counter((one.txid, one.sink) for one in done).items():
        detail: dict[str, Json] = {"sink": sink, "rejects": number}
        tx.decided(action, by=by, why=why, txid=txid, sink=sink, detail=detail)


@dataclass(frozen=True, slots=True)
class RetriedNow:
    """How many messages waited for a retry and are handed out now."""

    topology: str
    retried: int
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology}: {counted(self.retried, 'waiting message')} handed out now by {self.by}"]


def retry_waiting(
    stores: Stores, topology: str, *, by: str, why: str, told: Callable[[str], None] = lambda _: None
) -> RetriedNow:
    """Hand out now what waits for a retry; the running driver sees it when it looks for messages next.

    `told` gets whose messages are out of reach.

    Raises:
        UsageError: there is no such topology, or no message of it is within reach.
    """
    with letters_of(stores, topology) as letters:
        if letters.elsewhere:
            told(letters.out_of_reach)
        letters.require_sources()
        with stores.transaction(letters.row) as tx:
            tx.confirm()
            retried = letters.retry_now(by=by, why=why, tx=tx.raw)
    return RetriedNow(topology, retried, by, why)


def undecided_letter(letters: Letters, message: str) -> Letter:
    """The newest dead letter of a message at all sinks, about which nobody has decided.

    Raises:
        UsageError: there is none.
    """
    letters.require_sources()
    found = letters.of_message(message)
    if not found:
        raise not_dead(letters, message)
    of_source = [one for one in found if one.sink is None]
    if not of_source:
        sinks = ", ".join(sorted({one.component for one in found}))
        raise UsageError(
            f"message {message} of topology {letters.topology!r} was rejected by {sinks} alone: the other sinks hold it as "
            "it is, so its payload stays. Requeue it once the table takes it, or drop it",
            message=message,
        )
    require_undecided(of_source[-1])
    return of_source[-1]


def require_undecided(one: Letter) -> None:
    """Raise UsageError if somebody has decided about a dead letter."""
    if one.disposal is not None:
        at = "" if one.disposed_at is None else f" {local_time(one.disposed_at)}"
        raise UsageError(
            f"message {one.id} of topology {one.topology!r} was {one.state}{at} by {one.by}, and is no dead letter any "
            f"more. What became of it: stormproof audit message {one.topology} {one.id}",
            message=one.id,
        )


def edit(stores: Stores, letters: Letters, one: Letter, given: bytes, *, exact: bool, by: str, why: str) -> Edited:
    """Requeue an undecided dead letter with another payload.

    A newline at the end that the old payload did not have is taken off, unless `exact`: editors add it.

    Raises:
        UsageError: the payload is the old one, or the source cannot store it, or somebody has decided meanwhile; nothing was
            done.
    """
    assert one.id is not None
    assert one.payload is not None
    message, before = one.id, editable(one.payload)
    if not exact and given.endswith(b"\n") and not before.endswith(b"\n"):
        given = given.removesuffix(b"\n").removesuffix(b"\r")
    if given == before:
        raise UsageError(
            f"message {message} of topology {letters.topology!r}: the payload is the old one, and nothing was done. To try "
            f"it again: stormproof dead-letters requeue {letters.topology} {message}",
            message=message,
        )
    with stores.transaction(letters.row) as tx:
        tx.confirm()
        was_dead = letters.edit(message, given, by=by, why=why, tx=tx.raw)
    if not was_dead:
        undecided_letter(letters, message)
        raise not_dead(letters, message)
    failpoint("dead_letter.after")
    after = [found for found in letters.of_message(message) if found.new_payload is not None][-1]
    assert after.payload is not None
    assert after.new_payload is not None
    old, new = (sha256(payload).hexdigest() for payload in (after.payload, after.new_payload))
    return Edited(letters.topology, message, by, why, old, new, len(before), len(given))


WAIT_S: Final = 300.0
"""How long a wave may take unless another bound is given."""
LOOK_EVERY_S: Final = 0.5
GROWTH: Final = 2
"""Each wave may be so many times as large as the one before."""


class Fate(StrEnum):
    """What became of a message that was handed out again."""

    WAITING = "waiting"
    PASSED = "passed"
    """It is confirmed, and no sink rejected it since."""
    FAILED = "failed"
    """It failed again at least once, is a dead letter again, or a sink rejected it (again)."""


class CanaryEnd(StrEnum):
    """How a canary ended; append-only."""

    DONE = "done"
    """Everything was handed out, and few enough failed."""
    FAILURES = "failures"
    """More failed than may: the rest was not handed out."""
    UNDECIDED = "undecided"
    """A wave was not decided in time: the rest was not handed out."""
    STOPPED = "stopped"
    """Whoever ran it ended it: the rest was not handed out."""


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """How careful to be.

    `first`: messages of the first wave. `max_failures`: share of a wave, from 0 up to 1, that may fail. `wait_s`: seconds
    in which each wave must be decided.
    """

    first: int
    max_failures: float = 0.0
    wait_s: float = WAIT_S

    @staticmethod
    def of(first: int | None, max_failures: float | None, wait_s: float | None) -> CanaryRules | None:
        """The rules that a person gave; None: no canary is wanted.

        Raises:
            UsageError: the other two without a first wave, or a value out of range.
        """
        if first is not None:
            return CanaryRules(first, max_failures or 0.0, WAIT_S if wait_s is None else wait_s)
        if max_failures is not None or wait_s is not None:
            raise UsageError(
                "a share of failures (--max-failures) and a time (--wait) belong to a canary: say how many messages it "
                "begins with (--canary N)"
            )
        return None

    def __post_init__(self) -> None:
        if self.first < 1:
            raise UsageError(f"a canary of {self.first} messages: it needs at least 1")
        if not 0 <= self.max_failures < 1:
            raise UsageError(f"a canary's share of failures is {self.max_failures}: give a number from 0 up to 1")
        if not 0 < self.wait_s < math.inf:
            raise UsageError(f"a canary waits {self.wait_s} seconds for each wave: give a number above 0")


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave: `released` messages were handed out again; `left_alone` were decided by others, or cannot be."""

    released: int
    passed: int
    failed: int
    waiting: int
    left_alone: int

    @property
    def failures(self) -> float:
        """The share that failed."""
        return self.failed / self.released if self.released else 0.0


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How far a canary came. `left` are the messages that were not handed out, in their order."""

    topology: str
    end: CanaryEnd
    why_ended: str
    waves: tuple[Wave, ...]
    left: tuple[str, ...]
    failed: tuple[str, ...]
    by: str

    @property
    def released(self) -> int:
        """How many messages were handed out again."""
        return sum(wave.released for wave in self.waves)

    def lines(self) -> list[str]:
        """What was done, for people."""
        found = [
            f"wave {number}: {counted(wave.released, 'message')} handed out again; {wave.passed} passed, "
            f"{wave.failed} failed"
            + (f", {wave.waiting} not decided" if wave.waiting else "")
            + (f"; {wave.left_alone} left alone" if wave.left_alone else "")
            for number, wave in enumerate(self.waves, 1)
        ]
        left = "nothing is left" if not self.left else f"{counted(len(self.left), 'message')} not handed out"
        return [*found, f"{self.topology}: {self.why_ended}; {self.released} handed out again by {self.by}, {left}"]


def run_canary(
    topology: str,
    todo: Sequence[str],
    rules: CanaryRules,
    *,
    by: str,
    release: Callable[[Sequence[str], int], Sequence[str]],
    fates: Callable[[Sequence[str]], Mapping[str, Fate]],
    trouble: Callable[[], str | None],
    clock: Clock,
    told: Callable[[CanaryReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CanaryReport:
    """Hand messages out again, wave by wave; the driver that processes them runs elsewhere.

    The first wave has `rules.first` messages, and each later one at most twice as many as the one before. A wave begins only
    once each message of the one before has passed or failed, and at most `rules.max_failures` of them failed. `release` gets
    messages and the wave's number, and gives those that it handed out; `fates` says what became of them; `trouble` says why
    nothing may be happening. `told` gets the state at each look. Guarantee: it returns within `rules.wait_s` after the last
    wave was released, and a wave that was stopped at has no successor.
    """
    waves: list[Wave] = []
    failed: list[str] = []
    left, size = tuple(todo), rules.first

    def report(end: CanaryEnd, why: str, *now: Wave, new: Sequence[str] = ()) -> CanaryReport:
        return CanaryReport(topology, end, why, (*waves, *now), left, (*failed, *new), by)

    while left:
        if stopped():
            return report(CanaryEnd.STOPPED, "stopped before the next wave")
        some, left = left[:size], left[size:]
        mine = release(some, len(waves) + 1)
        end_s = clock.monotonic_s() + rules.wait_s
        while True:
            found = fates(mine)
            new = [one for one in mine if found[one] is Fate.FAILED]
            passed = sum(fate is Fate.PASSED for fate in found.values())
            waiting = len(mine) - passed - len(new)
            wave = Wave(len(mine), passed, len(new), waiting, len(some) - len(mine))
            if wave.failures > rules.max_failures:
                return report(CanaryEnd.FAILURES, _too_many(wave, rules, len(waves) + 1), wave, new=new)
            if not waiting:
                break
            told(report(CanaryEnd.UNDECIDED, f"waiting for wave {len(waves) + 1}", wave, new=new))
            if stopped():
                return report(CanaryEnd.STOPPED, f"stopped while wave {len(waves) + 1} ran", wave, new=new)
            left_s = end_s - clock.monotonic_s()
            if left_s <= 0:
                why = trouble()
                said = f"{waiting} of wave {len(waves) + 1} were not decided within {rules.wait_s:g} s"
                return report(CanaryEnd.UNDECIDED, said + (f" ({why})" if why else ""), wave, new=new)
            clock.sleep(min(LOOK_EVERY_S, left_s))
        waves.append(wave)
        failed += new
        size *= GROWTH
    return report(CanaryEnd.DONE, "all were handed out, and few enough failed" if failed else "none failed")


def _too_many(wave: Wave, rules: CanaryRules, number: int) -> str:
    return (
        f"{wave.failed} of {counted(wave.released, 'message')} of wave {number} failed ({wave.failures:.1%}), and at most "
        f"{rules.max_failures:.1%} may"
    )


_NO_DRIVER = (DriverState.STOPPED, DriverState.DEAD)


def requeue_canary(
    stores: Stores,
    topology: str,
    chosen: ChosenLetters,
    rules: CanaryRules,
    *,
    by: str,
    why: str,
    clock: Clock | None = None,
    told: Callable[[CanaryReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CanaryReport:
    """Requeue dead letters wave by wave; see `run_canary`. Each wave is on record with who, why, and its number.

    A message that several sinks rejected counts once.

    Raises:
        UsageError: no driver runs that takes messages, so no wave would be decided; nothing was handed out.
    """
    require_driver(stores, topology)
    with letters_of(stores, topology) as letters:
        fates = _Fates(stores, topology, letters)

        def release(some: Sequence[str], wave: int) -> Sequence[str]:
            fates.mark()
            said = f"{why or 'no reason given'} (canary, wave {wave}: {len(some)})"
            return dispose(stores, letters, chosen.of(some), requeue=True, by=by, why=said).messages

        return run_canary(
            topology,
            chosen.messages,
            rules,
            by=by,
            release=release,
            fates=fates,
            trouble=lambda: driver_trouble(stores, topology),
            clock=clock or SystemClock(),
            told=told,
            stopped=stopped,
        )


def require_driver(stores: Stores, topology: str) -> None:
    """Raise UsageError unless a driver of the topology runs, and is not told to open nothing."""
    reason = driver_trouble(stores, topology)
    if reason is not None:
        raise UsageError(
            f"a canary waits for what becomes of its first messages, and {reason}: start or resume it first, or hand some "
            "out without a canary",
            topology=topology,
        )


def driver_trouble(stores: Stores, topology: str) -> str | None:
    """Why a topology processes nothing now; None: its driver runs."""
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        asked = control.control_of(snapshot.connection, row.incarnation)
        blocked = [txn.txid for txn in snapshot.unresolved(row.incarnation) if txn.state.value == "blocked"]
    if blocked:
        return f"txid {blocked[0]} of {topology!r} is blocked"
    if driver_state(row) in _NO_DRIVER:
        return f"no driver of {topology!r} runs"
    if asked is not None and asked.paused:
        return f"{topology!r} is paused"
    return None


class _Fates:
    """What became of messages since the last mark.

    The pending store is read before the rejects: a reject is recorded in the transaction that confirms its message.
    """

    def __init__(self, stores: Stores, topology: str, letters: Letters) -> None:
        self._stores = stores
        self._incarnation = stores.topology(topology).incarnation
        self._letters = letters
        self._after = 0

    def mark(self) -> None:
        """Rejects from here on are new."""
        with self._stores.audit.snapshot() as snapshot:
            self._after = sink_records.newest_reject(snapshot.connection, self._incarnation)

    def __call__(self, messages: Sequence[str]) -> Mapping[str, Fate]:
        unconfirmed = self._letters.unconfirmed(messages)
        with self._stores.audit.snapshot() as snapshot:
            rejected = sink_records.rejected_after(snapshot.connection, self._incarnation, messages, self._after)
        return {
            one: Fate.FAILED
            if one in rejected or unconfirmed.get(one)
            else Fate.WAITING
            if one in unconfirmed
            else Fate.PASSED
            for one in messages
        }
