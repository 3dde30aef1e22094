"""The acker: keeps one 64-bit ack val for each pending message, and says which messages are complete, failed or timed out.

A message's ack val is the XOR of its token (the notice `init`) and of what its tuples acked. It is 0 when every tuple
anchored to the message was acked, and otherwise only by an accident of 2^-64. XOR commutes, so notices may come in any
order: an ack or a failure may come before the `init`, and the decision waits for that. Messages are asked of it one by one
only where the batch's own verdict (`verdict`) was wrong.

After Storm's acker (`Acker.java`, `RotatingMap.java`), with these differences:

- A message that failed is never answered "complete". Storm tests for 0 first, so it confirms a message that failed and
  whose ack val is 0 by then.
- Time-outs are answered here. Storm's acker forgets a message silently, and its spout keeps a clock of its own.
- A second `init` of a pending message is answered "doubled": it was read twice. Storm XORs it in.
- Notices come in arrays, and a pending message takes 18 bytes in arrays; see `Acker.nbytes`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.arrays import Rows, Words
from stormproof.core.errors import UsageError
from stormproof.core.tracking.share import as_words, mix64
from stormproof.core.tracking.sorted_run import Found, SortedRun, States

Owners: TypeAlias = npt.NDArray[np.uint16]
"""The numbers of the spout tasks that answers go to."""

OWNERS: Final = 1_024
"""Owners are numbered from 0 to below this."""

SLOTS_MAX: Final = 14
"""The most parts that a time-out can be divided into."""

# An entry's state is kind + bucket * 4 + owner * 64; dead is 0 as a whole.
_DEAD: Final = np.uint16(0)
_EARLY: Final = np.uint16(1)  # acked, not initialised
_PENDING: Final = np.uint16(2)  # initialised
_EARLY_FAILED: Final = np.uint16(3)  # failed, not initialised
_KIND: Final = np.uint16(3)
_BUCKET_SHIFT: Final = np.uint16(2)
_BUCKETS: Final = 16
_OWNER_SHIFT: Final = np.uint16(6)

_DELTA_MIN: Final = 1_024
_PART: Final = 24
"""New and dead entries are each at most one in so many of all, and `_DELTA_MIN` more."""


def _no_ids() -> Rows:
    return np.empty(0, np.int64)


def _no_owners() -> Owners:
    return np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True)
class Decided:
    """Messages that get one and the same answer: their ids in rising order, and the owner of each."""

    ids: Rows = field(default_factory=_no_ids)
    owners: Owners = field(default_factory=_no_owners)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Answers:
    """What became decided by one call. A message stands in one of these at most, and in one call's answers at most.

    `doubled` were initialised twice while pending: two readers handed them out, and what was acked for the one cannot be
    told from what was acked for the other. They failed, as those of `failed` and `timed_out`. `ghosts` are ids that had
    notices and no `init` for the whole time-out: notices of messages that were decided before, or that never were.
    """

    completed: Decided = field(default_factory=Decided)
    failed: Decided = field(default_factory=Decided)
    doubled: Decided = field(default_factory=Decided)
    timed_out: Decided = field(default_factory=Decided)
    ghosts: Rows = field(default_factory=_no_ids)


class Acker:
    """Pending messages and their ack vals; one acker task of Storm, or a whole inline run.

    Guarantee:
        - A message is answered once: complete, failed, doubled or timed out. Until its `init` nothing is answered.
        - It is answered complete only if it was initialised, not failed, and its ack val is 0.
        - A message that is pending for longer than `timeout_s` after its `init` or its last `reset_timeout` is answered
          timed out by `tick`: never before `timeout_s`, and at most `timeout_s * (1 + 1 / slots)` and two intervals
          between ticks later. Without calls of `tick` nothing times out.
        - Entries of notices without an `init` are kept as long, and then told as ghosts: nothing stays for ever.
        - With a million pending, at most 20 bytes each, whatever the number of notices. During a call its notices take
          some 150 bytes each.

    Not guaranteed:
        - An id is for one attempt. A late notice of an earlier attempt under the same id would count for the new one,
          which then never completes and times out.
        - XOR is blind to a notice that comes three times instead of once; who transports notices has to count them.
        - Use by several threads.

    The notices of one call are taken to arrive together: decisions are made after all of them. `bits` below 64 cuts
    values to their lowest bits: for tests of how often an ack val is 0 by accident.
    """

    def __init__(self, timeout_s: float = 30.0, *, now_s: float = 0.0, slots: int = 10, bits: int = 64) -> None:
        if not timeout_s > 0:
            raise UsageError(f"the acker's timeout_s is {timeout_s}; it must be above 0")
        if not 1 <= slots <= SLOTS_MAX:
            raise UsageError(f"the acker's slots are {slots}; a time-out has 1 to {SLOTS_MAX} of them")
        if not 4 <= bits <= 64:
            raise UsageError(f"the acker's bits are {bits}; values have 4 to 64 of them")
        self._timeout_s = timeout_s
        self._slot_s = timeout_s / slots
        self._mask = np.uint64((1 << bits) - 1)
        self._main = SortedRun()
        self._delta = SortedRun()
        self._bucket = 0
        self._opened_s = now_s
        self._now_s = now_s
        self._closed: deque[tuple[int, float]] = deque()
        self._pending = 0
        self._ghosts = 0

    @property
    def pending(self) -> int:
        """The number of messages that are initialised and not decided."""
        return self._pending

    @property
    def early(self) -> int:
        """Ids with notices and without an `init`."""
        return len(self) - self._pending

    @property
    def ghosts(self) -> int:
        """How many ghosts there were so far."""
        return self._ghosts

    @property
    def nbytes(self) -> int:
        """The bytes of all that grows with the number of messages, unused room among them."""
        return self._main.nbytes + self._delta.nbytes

    def __len__(self) -> int:
        return len(self._main) + len(self._delta) - self._main.dead - self._delta.dead

    def ack_vals(self, ids: Rows) -> Words:
        """The ack vals of these ids as they stand, to look at; 0 for those that are decided or never were."""
        values = np.zeros(len(ids), np.uint64)
        for run in (self._main, self._delta):
            places, found = run.find(ids)
            values[found], _ = run.read(places[found])
        return values

    def init(self, ids: Rows, values: Words | Rows, owner: int | Owners = 0) -> Answers:
        """Messages begin, each with its token (or the XOR of its first tuples' ids); answers go to `owner`.

        A token of 0 is complete at once: nobody received the message. An id that is pending, or that stands in `ids`
        twice, is answered `doubled`.

        Raises:
            UsageError: an owner is not in 0..1,023, or the arrays' lengths or types do not fit.
        """
        words = self._checked(ids, values)
        owners = _owner_states(owner, len(ids))
        order, starts = _grouped(ids)
        if order is not None:
            ids, words, owners = ids[order], words[order], owners[order] if len(owners) > 1 else owners
        repeated = np.zeros(len(starts) if starts is not None else len(ids), np.bool_)
        if starts is not None:
            repeated = np.diff(starts, append=len(ids)) > 1
            ids, words = ids[starts], np.bitwise_xor.reduceat(words, starts)
            owners = owners[starts] if len(owners) > 1 else owners
        return self._notice(ids, words, init=True, owners=owners, repeated=repeated)

    def ack(self, ids: Rows, values: Words | Rows) -> Answers:
        """Tuples of these messages ended, with these shares; or, in Storm's form, tuples were replaced by others.

        An id may stand in `ids` many times.

        Raises:
            UsageError: the arrays' lengths or types do not fit.
        """
        words = self._checked(ids, values)
        order, starts = _grouped(ids)
        if order is not None:
            ids, words = ids[order], words[order]
        if starts is not None:
            ids, words = ids[starts], np.bitwise_xor.reduceat(words, starts)
        return self._notice(ids, words)

    def fail(self, ids: Rows) -> Answers:
        """These messages failed: they are answered at once, or as soon as they are initialised.

        Raises:
            UsageError: the ids are no array of int64.
        """
        ids = _distinct(_checked_ids(ids))
        return self._notice(ids, np.zeros(len(ids), np.uint64), fail=True)

    def reset_timeout(self, ids: Rows) -> int:
        """The time-out of these messages begins anew; returns how many of them are pending or awaited, others are let be.

        Raises:
            UsageError: the ids are no array of int64.
        """
        ids = _distinct(_checked_ids(ids))
        number = 0
        for run in (self._main, self._delta):
            places, found = run.find(ids)
            places = places[found]
            words, states = run.read(places)
            alive = states != _DEAD
            places, words, states = places[alive], words[alive], states[alive]
            run.write(places, words, self._dated(states))
            number += len(places)
        return number

    def tick(self, now_s: float) -> Answers:
        """Time passes: answers what timed out, and tells the ghosts. Call it at least once a slot (timeout / slots).

        Raises:
            UsageError: `now_s` is before that of the last tick.
        """
        if now_s < self._now_s:
            raise UsageError(
                f"the acker was told that it is {now_s} s after {self._now_s} s; its clock must not go back"
            )
        self._now_s = now_s
        # What came since the bucket was opened came before now: its time-out is counted from here, so none is too short.
        if now_s - self._opened_s >= self._slot_s:
            self._closed.append((self._bucket, now_s))
            self._bucket = (self._bucket + 1) % _BUCKETS
            self._opened_s = now_s
        due: list[int] = []
        while self._closed and now_s - self._closed[0][1] >= self._timeout_s:
            due.append(self._closed.popleft()[0])
        return self._expire(due) if due else Answers()

    def _decide(self, initialised: Found, failed: Found, values: Words) -> tuple[Found, Found]:
        """The rule: which messages are complete, and which have failed. All others wait."""
        return initialised & ~failed & (values == 0), initialised & failed

    def _notice(
        self,
        ids: Rows,
        words: Words,
        *,
        init: bool = False,
        fail: bool = False,
        owners: States | None = None,
        repeated: Found | None = None,
    ) -> Answers:
        """Take one notice for each of these ids, which rise; `repeated` were initialised twice by it."""
        if len(ids) == 0:
            return Answers()
        # Where the entries stand: an id is in one of the two runs at most, maybe dead.
        in_main_at, in_main = self._main.find(ids)
        in_main_at = in_main_at[in_main]
        elsewhere = np.flatnonzero(~in_main)
        in_delta_at, found = self._delta.find(ids[elsewhere])
        in_delta_at, in_delta = in_delta_at[found], elsewhere[found]
        values, states = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint16)
        values[in_main], states[in_main] = self._main.read(in_main_at)
        values[in_delta], states[in_delta] = self._delta.read(in_delta_at)

        kinds = states & _KIND
        was_initialised = kinds == _PENDING
        failed = (kinds == _EARLY_FAILED) | fail
        initialised = was_initialised | init
        values ^= words
        completed, has_failed = self._decide(initialised, failed, values)
        doubled = np.zeros(len(ids), np.bool_)
        if init:
            doubled = was_initialised if repeated is None else was_initialised | repeated
            completed, has_failed = completed & ~doubled, has_failed & ~doubled
        gone = completed | has_failed | doubled

        if init:
            states = self._dated(np.full(len(ids), _PENDING) | (_DEAD if owners is None else owners))
        else:
            fresh = kinds == _DEAD
            states[fresh] = self._dated(np.full(np.count_nonzero(fresh), _EARLY))
            if fail:
                states |= _EARLY_FAILED  # pending ones are gone anyway
        self._pending += int(np.count_nonzero(initialised & ~gone)) - int(np.count_nonzero(was_initialised))

        answers = Answers(
            completed=_messages(ids, states, completed),
            failed=_messages(ids, states, has_failed),
            doubled=_messages(ids, states, doubled),
        )
        values[gone] = 0  # a dead entry may come to life again, and then starts at 0
        states[gone] = _DEAD
        self._main.write(in_main_at, values[in_main], states[in_main])
        self._delta.write(in_delta_at, values[in_delta], states[in_delta])
        new = elsewhere[~found & ~gone[elsewhere]]
        self._keep(ids[new], values[new], states[new])
        return answers

    def _keep(self, ids: Rows, words: Words, states: States) -> None:
        """Put new entries in, and keep the share of new and dead ones small."""
        limit = _DELTA_MIN + len(self._main) // _PART
        if len(self._delta) + len(ids) <= limit:
            self._delta.insert(ids, words, states)
            if self._main.dead > limit:
                self._main.clean()
                self._main.trim()
            return
        self._main.clean()
        self._delta.pour_into(self._main)
        if len(ids) > limit:
            self._main.insert(ids, words, states)
        else:
            self._delta.insert(ids, words, states)
        self._main.trim()
        self._delta.trim()

    def _dated(self, states: States) -> States:
        """The same states in the newest bucket."""
        cleared = states & ~np.uint16((_BUCKETS - 1) << int(_BUCKET_SHIFT))
        return cleared | np.uint16(self._bucket << int(_BUCKET_SHIFT))

    def _expire(self, buckets: list[int]) -> Answers:
        late = np.zeros(_BUCKETS, np.bool_)
        late[buckets] = True
        every = np.arange(1 << 16, dtype=np.uint16)
        chosen = late[(every >> _BUCKET_SHIFT) & np.uint16(_BUCKETS - 1)] & ((every & _KIND) != _DEAD)
        taken = [run.take(chosen) for run in (self._main, self._delta)]
        ids = np.concatenate([ids for ids, _ in taken])
        states = np.concatenate([states for _, states in taken])
        order = np.argsort(ids)
        ids, states = ids[order], states[order]
        initialised = (states & _KIND) == _PENDING
        self._pending -= int(np.count_nonzero(initialised))
        ghosts = ids[~initialised]
        self._ghosts += len(ghosts)
        self._keep(_no_ids(), np.empty(0, np.uint64), np.empty(0, np.uint16))
        return Answers(timed_out=_messages(ids, states, initialised), ghosts=ghosts)

    def _checked(self, ids: Rows, values: Words | Rows) -> Words:
        _checked_ids(ids)
        if values.dtype.kind not in "iu" or values.dtype.itemsize != 8 or values.shape != ids.shape:
            raise UsageError(
                f"an acker's values are {values.dtype} {values.shape} for ids {ids.shape};"
                " they must be 64-bit integers, one for each id"
            )
        return values.view(np.uint64) & self._mask


def incomplete(
    init_ids: Rows, init_tokens: Words | Rows, ack_ids: Rows, ack_shares: Words | Rows
) -> npt.NDArray[np.int64]:
    """The messages of a finished batch that are not complete, in rising order.

    Complete is what was initialised once and whose ack val is 0. So a message that was acked and not initialised is
    here, and one that was initialised twice, even where tokens and shares cancel: it was read twice.
    Failed messages are the caller's to take out.
    """
    acker = Acker(timeout_s=1.0)
    # Acks first: a message is decided when it begins, after all of its notices. What is left then runs out of time.
    acker.ack(ack_ids, ack_shares)
    doubled = acker.init(init_ids, init_tokens).doubled
    acker.tick(1.0)
    over = acker.tick(2.0)
    return np.unique(np.concatenate([doubled.ids, over.timed_out.ids, over.ghosts]))


def acker_of(ids: Rows, ackers: int) -> npt.NDArray[np.int64]:
    """The acker task of each message: Storm's mod hashing, so that all notices of a message meet at one task.

    Raises:
        UsageError: there is no acker.
    """
    if ackers < 1:
        raise UsageError(f"there are {ackers} ackers; messages need at least 1 to be tracked")
    return (mix64(as_words(ids)) % np.uint64(ackers)).astype(np.int64)


def _checked_ids(ids: Rows) -> Rows:
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise UsageError(f"an acker's message ids are {ids.dtype} in {ids.ndim} dimensions; they must be int64 in one")
    return ids


def _owner_states(owner: int | Owners, number: int) -> States:
    owners = np.asarray(owner)
    wrong = owners[(owners < 0) | (owners >= OWNERS)]
    if wrong.size:
        raise UsageError(f"a message's owner is {int(wrong.flat[0])}; owners are numbered 0 to {OWNERS - 1}")
    if owners.ndim and len(owners) != number:
        raise UsageError(f"{len(owners)} owners were given for {number} messages")
    return np.atleast_1d(owners.astype(np.uint16) << _OWNER_SHIFT)


def _starts(ids: Rows) -> Rows:
    """Where each run of equal ids begins; there is at least one id."""
    begins = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=begins[1:])
    return np.flatnonzero(begins)


def _grouped(ids: Rows) -> tuple[Rows | None, Rows | None]:
    """An order in which the ids rise (None: they do), and where each run of equal ids begins in it (None: all differ)."""
    if _rise(ids):
        return None, None
    if bool((ids[1:] >= ids[:-1]).all()):
        return None, _starts(ids)
    order = np.argsort(ids)
    starts = _starts(ids[order])
    return order, None if len(starts) == len(ids) else starts


def _rise(ids: Rows) -> bool:
    return len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())


def _distinct(ids: Rows) -> Rows:
    return ids if _rise(ids) else np.unique(ids)


def _messages(ids: Rows, states: States, chosen: Found) -> Decided:
    if not chosen.any():
        return Decided()
    return Decided(ids[chosen], states[chosen] >> _OWNER_SHIFT)
