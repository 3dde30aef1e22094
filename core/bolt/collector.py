"""The collector through which a `Bolt` emits, acks and fails, and the outcome of one call: what came of each tuple.

It shares with `Tuple` what only the two may touch: how many children a tuple has, and whether it is still open. It keeps
lists while a bolt runs and makes arrays of them when the call is over. It knows nothing of shares: the
stage computes them from the numbers in the outcome.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Final, SupportsIndex, cast

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import JobFailed, TasksBroken, UsageError
from stormproof.core.base.message import FailureReason, storable_text
from stormproof.core.bolt.tuples import Tuple, text_of
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.user_code.functions import CAUGHT, batch_of, blame, copied, copies_of


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tuples that one call emitted to one stream.

    The three `anchor_` arrays have one entry for each link from an input tuple to an output row, sorted by row:
    `anchor_row`, the output row; `anchor_input`, the input tuple's handle; `anchor_ordinal`, the number of the link among
    all links of that input, from 0, over all streams and calls. Two links may join the same two tuples. An ordinal is
    missing only where a row was dropped, and then its input failed. An unanchored row has no link. `task` is the task of
    each row, where the stream has a direct() subscriber.
    """

    rows: pa.RecordBatch
    anchor_row: Rows
    anchor_input: Rows
    anchor_ordinal: Rows
    task: Rows | None


@dataclass(frozen=True, slots=True)
class FailedTuple:
    """An input tuple that failed, and why. `error` and `input` are texts that every store takes: see `storable_text`."""

    handle: int
    reason: FailureReason
    error: str
    input: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of one call. `emitted` has only streams with rows; `resets` counts the calls of `reset_timeout`.

    Guarantee:
        Over all calls of a runner, each handle stands exactly once in `acked` or `failed`, at the latest in what `finish`
        returns. The call in which an input ends is the last one with links of that input.
    """

    emitted: Mapping[str, Emitted]
    acked: Rows
    failed: Sequence[FailedTuple]
    resets: int


def in_one(rans: Sequence[Ran]) -> Ran:
    """The outcome of calls one after the other, as if it were one call."""
    if len(rans) == 1:
        return rans[0]
    parts: dict[str, list[Emitted]] = {}
    for ran in rans:
        for stream, one in ran.emitted.items():
            parts.setdefault(stream, []).append(one)
    return Ran(
        {stream: _behind_each_other(of_stream) for stream, of_stream in parts.items()},
        np.concatenate([ran.acked for ran in rans]),
        tuple(failed for ran in rans for failed in ran.failed),
        sum(ran.resets for ran in rans),
    )


def _behind_each_other(parts: Sequence[Emitted]) -> Emitted:
    first_row = np.cumsum([0, *(part.rows.num_rows for part in parts)])
    tasks = [part.task for part in parts if part.task is not None]
    return Emitted(
        pa.concat_batches([part.rows for part in parts]),
        np.concatenate([part.anchor_row + first for part, first in zip(parts, first_row, strict=False)]),
        np.concatenate([part.anchor_input for part in parts]),
        np.concatenate([part.anchor_ordinal for part in parts]),
        np.concatenate(tasks) if tasks else None,
    )


def link_counts(ran: Ran, first: int, inputs: int) -> Rows:
    """How many links go out from each of the `inputs` tuples whose handles count up from `first`, over all streams."""
    counts = np.zeros(inputs, np.int64)
    for emitted in ran.emitted.values():
        numbers = emitted.anchor_input - first
        counts += np.bincount(numbers[(numbers >= 0) & (numbers < inputs)], minlength=inputs)
    return counts


log = logging.getLogger("stormproof.bolt")


# ---- the collector

DEFAULT_STREAM: Final = "default"


class Emission:
    """What was emitted to one stream in one call; `tasks` is the number of tasks of its direct() subscriber, if it has one.

    `handles` and `ordinals` have one entry for each link. Most tuples have one link: `odd` names those that have not, as
    (row, number of links, tuple in hand).
    """

    __slots__ = ("_component", "chosen", "copies", "handles", "name", "odd", "ordinals", "schema", "tasks", "values")

    def __init__(self, component: str, name: str, schema: pa.Schema, tasks: int | None) -> None:
        self._component = component
        self.name = name
        self.schema = schema
        self.tasks = tasks
        self.copies = copies_of(schema)
        self.clear()

    def clear(self) -> None:
        """Make it ready for the next call."""
        self.values: list[object] = []
        self.handles: list[int] = []
        self.ordinals: list[int] = []
        self.odd: list[tuple[int, int, Tuple | None]] = []
        self.chosen: list[int] = []

    def batch(self) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
        """The values as rows, and (row, error) of those that the schema cannot hold."""
        batch, errors = batch_of(self.values, self.schema, (), "got")
        return batch, [(row, self._explained(row, text)) for row, text in errors]

    def _explained(self, row: int, text: str) -> str:
        value = self.values[row]
        said = f"component {self._component!r} emitted to its stream {self.name!r} what that cannot hold: {text}"
        if len(self.schema) == 1 and isinstance(value, (tuple, list, dict)) and len(cast("list[object]", value)) == 1:
            said += "; a stream of one field is given the value itself"
        return said

    def checked_task(self, task: object) -> int | None:
        """The number of the task that a tuple names; None where the stream has no direct() subscriber.

        Raises:
            UsageError: it is missing, out of range, or the stream has no direct() subscriber.
        """
        if self.tasks is None:
            if task is None:
                return None
            raise self._refused(
                f"emit(task={task!r}), but nobody subscribes to it with direct(); leave the task out, or subscribe with "
                ".direct()"
            )
        if task is None:
            raise self._refused(
                f"it has a direct() subscriber, so each tuple names its task: emit(..., task=0 to {self.tasks - 1})"
            )
        try:
            number = operator.index(cast("SupportsIndex", task))
        except TypeError:
            number = -1
        if isinstance(task, bool) or not 0 <= number < self.tasks:
            raise self._refused(f"emit(task={task!r}), but the direct() subscriber has the tasks 0 to {self.tasks - 1}")
        return number

    def _refused(self, text: str) -> UsageError:
        place = f"component {self._component!r}, stream {self.name!r}"
        return UsageError(f"{place}: {text}", component=self._component, stream=self.name)


def unknown_stream(component: str, stream: object, known: Mapping[str, Emission], closed: bool) -> UsageError:
    """The error for a stream that cannot be emitted to."""
    if closed:
        return UsageError(
            f"component {component!r} emitted to {stream!r} outside its call; emit within execute or finish only",
            component=component,
            stream=str(stream),
        )
    return UsageError(
        f"component {component!r} has no stream {stream!r}; known: {', '.join(known) or 'none, declare it in streams'}",
        component=component,
        stream=str(stream),
    )


# ---- the one thread from which a bolt may emit, ack and fail: that of its task
#
# A bolt's own thread would get between the steps of another call, or come when the batch is over. Such a call is
# refused by name, and so is one from a fork, whose rows nobody would see. The run ends with that name, too: an error
# that is raised in a thread may be seen by nobody.


class OwnThread:
    """Whose calls a bolt's task takes. `ident` is compared with `get_ident()` at each call; 0 once the task is over."""

    __slots__ = ("_component", "_made_by", "_refused", "ident")

    def __init__(self, component: str) -> None:
        self._component = component
        self._refused = ""
        self.ident = self._made_by = get_ident()
        _open.add(self)

    def refuse(self, call: str) -> None:
        """Raise UsageError for a call from elsewhere, and note it for the task. One that merely comes late is left alone."""
        if get_ident() == self._made_by:
            return
        if not self._refused:  # the first one: the error itself may be seen by nobody
            self._refused = (
                f"bolt {self._component!r} called {call} from a thread or a fork of its own, where only the thread that "
                "runs its task may: have your threads return their results, and emit, ack and fail in execute or finish"
            )
            log.error("%s; the call had no effect", self._refused)
        raise UsageError(self._refused, component=self._component)

    def require_none_refused(self) -> None:
        """Raise TasksBroken where a call from elsewhere was refused: what it was to emit is nowhere."""
        if self._refused:
            raise TasksBroken(self._refused, component=self._component)

    def abandon(self) -> None:
        """This is a fork: nothing that it calls has an effect."""
        self.ident = self._made_by = 0

    def close(self) -> None:
        """The task is over."""
        self.ident = 0
        _open.discard(self)

    def __reduce__(self) -> str:
        raise UsageError(
            f"bolt {self._component!r}: what emits and acks belongs to its task, and cannot be pickled or copied: give "
            "other processes values, and emit what they return",
            component=self._component,
        )


_open: set[OwnThread] = set()


def _in_child() -> None:
    for owner in _open:
        owner.abandon()


os.register_at_fork(after_in_child=_in_child)


# A tuple's `_links` is the number of links from it to its children while it is open, and one of these when it is not.
_ACKED: Final = -1
_FAILED: Final = -2
_GIVEN_UP: Final = -3
"""The runner failed it. Its bolt may not know, and go on to ack it, fail it or emit from it: that has no effect."""


class Collector:
    """Through this a `Bolt` emits, acks and fails. It belongs to one task in one batch.

    Threads: the task's alone. A call from another thread, or from a fork, is refused, and ends the run by name.
    """

    __slots__ = (
        "_acked",
        "_closed",
        "_component",
        "_failed",
        "_first",
        "_hand",
        "_heartbeat",
        "_held",
        "_now",
        "_outs",
        "_own",
        "_resets",
    )

    def __init__(self, component: str, streams: Mapping[str, pa.Schema], direct: Mapping[str, int]) -> None:
        """Made by the runner only."""
        self._component = component
        self._outs = {name: Emission(component, name, schema, direct.get(name)) for name, schema in streams.items()}
        self._acked: list[int] = []
        self._failed: dict[int, FailedTuple] = {}
        self._held: dict[int, Tuple] = {}
        self._now: list[Tuple] = []
        self._first = 0
        self._hand: Tuple | None = None
        self._resets = 0
        self._heartbeat: Heartbeat | None = None
        self._closed = False
        self._own = OwnThread(component)

    # -- for bolts ---------------------------------------------------------------------------------------------------

    def emit(
        self,
        values: object,
        *,
        stream: str = DEFAULT_STREAM,
        anchors: Tuple | Sequence[Tuple] = (),
        task: int | None = None,
    ) -> None:
        """Emit a tuple: the value itself where the stream has one field, else a tuple, list or dict of its values.

        Anchored, it belongs to the messages of its anchors: they are complete only when it is. Without anchors it is not
        tracked. `task` names the task of a direct() subscriber.

        The values are checked at the end of the call. Where the stream cannot hold them, the tuple's anchors fail with the
        reason `error` (the tuple in hand, where it has none), and the tuple is dropped. A tuple all of whose anchors failed
        because the bolt raised, or because of such values, is dropped, too.

        Raises:
            UsageError: no such stream; an anchor was acked or failed, or is another bolt's; the task is wrong; the batch
                is over; it is another thread.
        """
        if get_ident() != self._own.ident:
            self._own.refuse("emit")
        try:
            out = self._outs[stream]
        except (KeyError, TypeError):
            raise unknown_stream(self._component, stream, self._outs, self._closed) from None
        chosen: int | None = None
        if task is not None or out.tasks is not None:
            chosen = out.checked_task(task)
        if values.__class__ in out.copies:
            values = copied(values, out.copies)
        if type(anchors) is Tuple:
            links = anchors._links
            if links >= 0 and anchors._origin.owner is self:
                anchors._links = links + 1
                out.handles.append(anchors._handle)
                out.ordinals.append(links)
                out.values.append(values)
                if chosen is not None:
                    out.chosen.append(chosen)
                return
            anchors = (anchors,)
        if self._link(out, anchors):
            out.values.append(values)
            if chosen is not None:
                out.chosen.append(chosen)

    def ack(self, tuple: Tuple) -> None:
        """The tuple is done here; what was emitted anchored to it is not affected.

        Raises:
            UsageError: it was acked or failed before, or is another bolt's; it is another thread.
        """
        if get_ident() != self._own.ident:
            self._own.refuse("ack")
        try:
            if tuple._links >= 0 and tuple._origin.owner is self:
                tuple._links = _ACKED
                self._acked.append(tuple._handle)
                return
        except AttributeError:
            pass
        self._refuse_unless_given_up(tuple, "ack")

    def fail(self, tuple: Tuple, reason: str = "") -> None:
        """The tuple failed, and with it every message that it belongs to. They are replayed.

        Raises:
            UsageError: it was acked or failed before, or is another bolt's.
        """
        if self._is_open(tuple, "fail"):
            said = storable_text(reason) if reason else "the bolt called fail without a reason"
            self._failed[tuple._handle] = FailedTuple(tuple._handle, FailureReason.FAILED, said, text_of(tuple))
            tuple._links = _FAILED

    def reset_timeout(self, tuple: Tuple) -> None:
        """The tuple takes longer: the timeout of its messages begins anew.

        Raises:
            UsageError: it was acked or failed before, or is another bolt's.
        """
        if self._is_open(tuple, "reset_timeout"):
            self._resets += 1
            if self._heartbeat is not None:
                self._heartbeat.reset()

    # -- errors and the rarer ways -----------------------------------------------------------------------------------

    def _link(self, out: Emission, anchors: object) -> bool:
        """Link a tuple to any number of anchors. False where all of them were given up: then the tuple is dropped."""
        if not isinstance(anchors, Sequence) or isinstance(anchors, (str, bytes)):
            raise UsageError(
                f"component {self._component!r}: emit(anchors=...) takes a tuple or a sequence of tuples, got a "
                f"{type(anchors).__name__}",
                component=self._component,
                stream=out.name,
            )
        given = cast("Sequence[Tuple]", anchors)
        alive = [anchor for anchor in given if self._is_open(anchor, "emit anchored to")]
        if given and not alive:
            return False
        for anchor in alive:
            out.handles.append(anchor._handle)
            out.ordinals.append(anchor._links)
            anchor._links += 1
        if len(alive) != 1:
            out.odd.append((len(out.values), len(alive), self._hand))
        return True

    def _is_open(self, tuple_: object, doing: str) -> bool:
        if get_ident() != self._own.ident:
            self._own.refuse(doing)
        if isinstance(tuple_, Tuple) and tuple_._links >= 0 and tuple_._origin.owner is self and not self._closed:
            return True
        self._refuse_unless_given_up(tuple_, doing)
        return False

    def _refuse_unless_given_up(self, tuple_: object, doing: str) -> None:
        who = f"bolt {self._component!r}"
        if not isinstance(tuple_, Tuple):
            text = f"{who} cannot {doing} a {type(tuple_).__name__}; give it the tuple that execute got"
        elif tuple_._origin.owner is not self:
            text = f"{who} cannot {doing} {_shown(tuple_)}: it is of another bolt, task or batch; keep none of them"
        elif self._closed:
            text = f"{who} cannot {doing} {_shown(tuple_)}: the batch is over; end held tuples in finish"
        elif tuple_._links == _ACKED:
            text = f"{who} cannot {doing} {_shown(tuple_)}: it acked it before; ack a tuple once, after its last child"
        elif tuple_._links == _FAILED:
            text = f"{who} cannot {doing} {_shown(tuple_)}: it failed it before; end a tuple once"
        else:
            return
        raise UsageError(text, component=self._component)

    # -- for the runner ----------------------------------------------------------------------------------------------

    def call(
        self, execute: Callable[[Tuple], None], first: int, tuples: list[Tuple], heartbeat: Heartbeat | None
    ) -> None:
        """Call `execute` with tuples whose handles count up from `first`. Where it raises, its tuple fails, even one that
        it acked in that call.
        """
        self._first, self._now, self._heartbeat = first, tuples, heartbeat
        for hand in tuples if heartbeat is None else heartbeat.each(tuples):
            self._hand = hand
            try:
                execute(hand)
            except CAUGHT as error:
                reason, text = blame(error)
                self._give_up(hand, reason, text)
        self._hand = None

    def last_call(self, finish: Callable[[], None], first: int, heartbeat: Heartbeat | None) -> None:
        """Call `finish`. Where it raises, every tuple that is still open fails.

        Raises:
            JobFailed: it raised, and no tuple is open.
        """
        self._first, self._now, self._heartbeat = first, [], heartbeat
        try:
            finish()
        except CAUGHT as error:
            reason, text = blame(error)
            if not self._give_up_held(reason, text):
                raise JobFailed(
                    f"bolt {self._component!r} raised in finish, where no message answers for it: {text}",
                    component=self._component,
                    error=text,
                ) from error

    def _give_up_held(self, reason: FailureReason, text: str) -> int:
        """Fail all tuples that are still open; returns their number."""
        found = [tuple_ for tuple_ in self._held.values() if tuple_._links >= 0]
        for tuple_ in found:
            self._give_up(tuple_, reason, text)
        return len(found)

    def _give_up(self, tuple_: Tuple, reason: FailureReason, text: str) -> None:
        if tuple_._handle not in self._failed:
            self._failed[tuple_._handle] = FailedTuple(tuple_._handle, reason, text, text_of(tuple_))
            tuple_._links = _GIVEN_UP

    def end(self, unacked: str | None = None) -> Ran:
        """End the call: returns what it did, as arrays. `unacked` is given after the last call: the error with which the
        tuples fail that are still open.

        Raises:
            TasksBroken: a call from another thread was refused.
            JobFailed: values that their stream cannot hold were emitted unanchored, in `prepare` or `finish`.
        """
        self._own.require_none_refused()
        emitted: dict[str, Emitted] = {}
        for name, out in self._outs.items():
            if out.values:
                given = self._emitted(out)
                if given.rows.num_rows:
                    emitted[name] = given
                out.clear()
        if unacked is not None:
            self._give_up_held(FailureReason.UNACKED, unacked)
        acked = np.array(self._acked, np.int64)
        failed = tuple(self._failed[handle] for handle in sorted(self._failed))
        if failed and len(acked):
            acked = acked[~np.isin(acked, list(self._failed))]
        self._hold(acked)
        ran = Ran(emitted, acked, failed, self._resets)
        self._acked, self._failed, self._resets, self._now = [], {}, 0, []
        return ran

    def held(self) -> Rows:
        """The handles of the tuples that are neither acked nor failed."""
        return np.array(sorted(self._held), np.int64)

    def close(self) -> None:
        """The batch is over: nothing can be emitted, acked or failed any more."""
        self._closed = True
        self._outs = {}
        self._own.close()

    def _hold(self, acked: Rows) -> None:
        """Bring the open tuples up to date at the end of a call."""
        if self._held:
            for handle in [*acked[acked < self._first].tolist(), *self._failed]:
                self._held.pop(handle, None)
        ended = int((acked >= self._first).sum()) + sum(handle >= self._first for handle in self._failed)
        if ended < len(self._now):
            self._held.update((t._handle, t) for t in self._now if t._links >= 0)

    def _tuple(self, handle: int) -> Tuple:
        return self._held[handle] if handle < self._first else self._now[handle - self._first]

    def _emitted(self, out: Emission) -> Emitted:
        batch, errors = out.batch()
        rows = batch.num_rows
        inputs, ordinals = np.array(out.handles, np.int64), np.array(out.ordinals, np.int64)
        anchor_row = np.arange(rows, dtype=np.int64)
        if out.odd:
            counts = np.ones(rows, np.int64)
            for row, links, _ in out.odd:
                counts[row] = links
            anchor_row = np.repeat(anchor_row, counts)
        task = None if out.tasks is None else np.array(out.chosen, np.int64)
        if not errors:
            return Emitted(batch, anchor_row, inputs, ordinals, task)
        keep = np.ones(rows, np.bool_)
        hands = {row: hand for row, links, hand in out.odd if links == 0}
        for row, text in errors:
            keep[row] = False
            start, stop = np.searchsorted(anchor_row, [row, row + 1])
            anchors = [self._tuple(handle) for handle in inputs[start:stop].tolist()]
            self._blame(anchors or [hands[row]], text)
        linked = keep[anchor_row]
        renumbered = np.cumsum(keep) - 1
        return Emitted(
            batch.filter(pa.array(keep)),
            renumbered[anchor_row[linked]],
            inputs[linked],
            ordinals[linked],
            None if task is None else task[keep],
        )

    def _blame(self, tuples: Sequence[Tuple | None], text: str) -> None:
        for tuple_ in tuples:
            if tuple_ is None:
                raise JobFailed(
                    f"{text}; it was emitted without anchors in prepare or finish, so that no message answers for it",
                    component=self._component,
                    error=text,
                )
            self._give_up(tuple_, FailureReason.ERROR, text)


def _shown(tuple_: Tuple) -> str:
    return f"the tuple {text_of(tuple_)} of {tuple_.component!r}"
