"""The account of a task: the messages that it met, the shares that were acked in it, and the messages that failed.

A passage is the tuples of one record batch on their way through a stage, and the messages that failed among them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, MessageFailure, MessageId, Token, storable_text
from stormproof.core.graph.plan import CombineNode, GatherNode, JoinSideNode, SendNode, WriteNode
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.exchange import Sender
from stormproof.core.task.job import ACK, ACK_SCHEMA, INIT, INIT_SCHEMA, TaskReport, WireRow
from stormproof.core.tracking.acker import ACKER, acker_of
from stormproof.core.tracking.share import MANY, Anchors, MetMessages, as_signed, mix64, xor_reduce
from stormproof.core.tracking.verdict import ANY_KEY, TaskCounts

Observer: TypeAlias = Callable[[str, str, pa.RecordBatch], None]
"""Is called inside a task with all tuples that a component emits at once: component, stream, rows."""


@dataclass(frozen=True, slots=True)
class Tuples:
    """Tuples: the rows, their anchors, and for a direct stream the task that the emitter named for each."""

    rows: pa.RecordBatch
    anchors: Anchors
    task: Rows | None = None

    def only(self, mask: npt.NDArray[np.bool_]) -> Tuples:
        """The tuples where `mask` is set."""
        return Tuples(
            self.rows.filter(pa.array(mask)),
            self.anchors.only(mask),
            None if self.task is None else self.task[mask],
        )


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why a message failed, and where; `input` shows what the component was called with."""

    reason: FailureReason
    component: str
    error: str
    input: str


End: TypeAlias = CombineNode | GatherNode | JoinSideNode | SendNode | WriteNode
"""Where tuples end in a stage."""


@dataclass(frozen=True, slots=True)
class EndedTuples:
    """Tuples that end at a node, and the component and stream that they are from."""

    key: str
    node: End
    tuples: Tuples
    component: str
    stream: str


@dataclass(slots=True)
class Passage:
    """One record batch on its way through a stage; nothing of it is combined, sent or written until its end.

    The messages `first` to `first + number - 1` are fresh: all of their tuples are in this passage. `escaped` tells which of
    these were given to a bolt that may remember them; such a message can no longer fail early.
    """

    first: int = 0
    number: int = 0
    failed: dict[int, FailureCause] = field(default_factory=dict[int, FailureCause])
    escaped: npt.NDArray[np.bool_] | None = None
    acked: list[Anchors] = field(default_factory=list[Anchors])
    ends: list[EndedTuples] = field(default_factory=list[EndedTuples])

    def is_early(self, message: int) -> bool:
        """Whether nothing of this message can have left the passage."""
        fresh = self.first <= message < self.first + self.number
        return fresh and (self.escaped is None or not self.escaped[message - self.first])

    def seen(self, messages: Rows) -> None:
        """Note that a bolt that may remember them was given these messages."""
        if self.escaped is None:
            self.escaped = np.zeros(self.number, np.bool_)
        local = messages - self.first
        self.escaped[local[(local >= 0) & (local < self.number)]] = True

    def mask(self, anchors: Anchors) -> npt.NDArray[np.bool_] | None:
        """The tuples of messages that have not failed early, as a mask; None: all of them."""
        if not self.failed or anchors.message is None:
            return None
        bad = np.zeros(self.number, np.bool_)
        bad[[message - self.first for message in self.failed]] = True
        local = anchors.message - self.first
        inside = (local >= 0) & (local < self.number)
        hit = bad[np.where(inside, local, 0)] & inside
        if anchors.row is None:
            return ~hit
        mask = np.ones(anchors.rows, np.bool_)
        mask[anchors.row[hit]] = False
        return mask

    def alive(self, tuples: Tuples) -> Tuples:
        """The tuples whose messages have not failed early."""
        mask = self.mask(tuples.anchors)
        return tuples if mask is None else tuples.only(mask)


def shown_row(rows: pa.RecordBatch, row: int) -> str:
    """A row as text, for the input of a failure."""
    try:
        text = repr(rows.slice(row, 1).to_pylist()[0])
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is no UTF-8
        text = f"a row of {', '.join(rows.schema.names)} whose text is not UTF-8"
    except (ValueError, OverflowError):  # or a date outside the years that Python knows
        text = f"a row of {', '.join(rows.schema.names)} with a value that Python cannot show"
    return storable_text(text, INPUT_TEXT_MAX)


# ---- the account of a task


class Account:
    """One task's account; its `report` goes to the driver.

    `ackers` is the number of acker tasks, 0 where only the whole batch gets a verdict. Where there are any, the account also
    keeps the notices for them: the init of each message, and the shares that were acked or that ended in a failure. It names
    `named_max` messages that failed early, and as many that failed late; it only counts the others. None: it names all.
    """

    def __init__(self, stage: int, task: int, ackers: int, named_max: int | None = None) -> None:
        self.report = TaskReport(stage, task)
        self.messages = MetMessages()
        self._ackers = ackers
        self._named_max = named_max
        self._late: dict[int, FailureCause] = {}
        self._late_ids: set[int] = set()
        self._together: list[npt.NDArray[np.int64]] = []
        self._met: list[npt.NDArray[np.int64]] = []
        self._inits: list[pa.RecordBatch] = []
        self._acks: list[tuple[Rows, Words]] = []

    @property
    def counts(self) -> TaskCounts:
        """What each component did in this task."""
        return self.report.counts

    def begin(self, ids: Rows, origins: Rows, tokens: Rows) -> None:
        """Note that these messages began, for their ackers."""
        columns = [pa.array(column) for column in (ids, origins, tokens)]
        self.pass_on_init(pa.RecordBatch.from_arrays(columns, schema=INIT_SCHEMA))

    def pass_on_init(self, inits: pa.RecordBatch) -> None:
        """Pass notices of messages that began on, from the stage before."""
        self._inits.append(inits)

    def pass_on_ack(self, ids: Rows, shares: Words) -> None:
        """Pass notices of shares on, from the stage before."""
        self._acks.append((ids, shares))

    def enter(self, heartbeat: Heartbeat | None, component: str, anchors: Anchors) -> None:
        """Tell the heartbeat which step gets these tuples now, and, where it is careful, the message id of each."""
        if heartbeat is None:
            return
        heartbeat.enter(component, anchors.rows)
        if heartbeat.careful:
            single = anchors.row is None and anchors.message is not None and not (anchors.message == MANY).any()
            heartbeat.at(self.messages.ids(anchors.messages()) if single else None)

    def ack(self, anchors: Anchors) -> None:
        """Ack these tuples: they ended, and none failed."""
        if anchors.share is None:
            return
        with self.counts.busy(ACKER):
            self.counts.of(ACKER).executed += len(anchors.share)
            self.report.ack(anchors.xor())
            if self._ackers and anchors.message is not None:
                self._acks.append((self.messages.ids(anchors.message), anchors.share))

    def anchored_together(self, anchors: Anchors) -> None:
        """Note which messages anchor one tuple together: a failure of one spreads to the others."""
        pairs = anchors.together()
        if len(pairs):
            self._together.append(pairs)

    def met(self, component: str, keys: Words, anchors: Anchors) -> None:
        """Note which messages reached a component at which messages meet, each with a hash of the key."""
        salt = np.uint64(zlib.crc32(component.encode()))
        at, messages = mix64(keys ^ salt)[anchors.row_of_pairs()], anchors.messages()
        known = messages != MANY
        if known.any():
            self._met.append(np.stack([self.messages.ids(messages[known]), as_signed(at[known])], axis=1))
        if not known.all():
            self._met.append(np.array([[0, ANY_KEY]]))

    def fail_row(self, passage: Passage, anchors: Anchors, row: int, failed: FailureCause) -> None:
        """Fail every message that anchors a tuple: early where nothing of it can have left the passage, else late."""
        pairs = anchors.pairs_of(row)
        if len(pairs) == 0:
            self.report.unanchored += 1
            return
        messages = anchors.messages()[pairs]
        if (messages == MANY).any():
            raise JobFailed(
                f"component {failed.component!r} failed after a group, where a row belongs to no single message: "
                f"{failed.error}; input: {failed.input}",
                component=failed.component,
                reason=failed.reason.value,
                error=failed.error,
                input=failed.input,
            )
        for pair, message in zip(pairs.tolist(), messages.tolist(), strict=True):
            if passage.is_early(message):
                passage.failed.setdefault(message, failed)
                continue
            # A message has a number for each tuple that came over an exchange: its id says whether it is a further one.
            id_ = int(self.messages.ids(np.array([message]))[0])
            if id_ not in self._late_ids and self._is_enough(len(self._late_ids)):
                self.report.unnamed += 1
                continue
            self._late_ids.add(id_)
            self._late.setdefault(message, failed)
            if anchors.share is not None:
                share = anchors.share[pair : pair + 1]
                self.report.late_xor ^= xor_reduce(share)
                if self._ackers:
                    self._acks.append((self.messages.ids(np.array([message])), share))

    def fail_rows(self, passage: Passage, tuples: Tuples, bad: Mapping[int, FailureCause]) -> Tuples:
        """Fail these rows; returns the tuples that are left."""
        if not bad:
            return tuples
        for row, failed in sorted(bad.items()):
            self.fail_row(passage, tuples.anchors, row, failed)
        good = np.ones(tuples.rows.num_rows, np.bool_)
        good[list(bad)] = False
        return passage.alive(tuples.only(good))

    def name_early(self, passage: Passage, untracked: npt.NDArray[np.bool_] | None) -> None:
        """Name the messages that failed early in a passage, but for those that the source does not track (`untracked`)."""
        for message, failed in sorted(passage.failed.items()):
            if untracked is not None and untracked[message - passage.first]:
                self.report.unanchored += 1
            elif self._is_enough(len(self.report.failures)):
                self.report.unnamed += 1
            else:
                self.report.failures.append(self._named(message, failed))

    def close(self) -> None:
        """Put late failures, and the messages that are anchored together, into the report; call it at the task's end."""
        found: dict[tuple[int, str, FailureReason], MessageFailure] = {}
        # A message has a number for each tuple that came over an exchange. It is named once for each component and reason.
        for message, failed in sorted(self._late.items()):
            named = self._named(message, failed)
            found.setdefault((named.id, named.component, named.reason), named)
        self.report.late = list(found.values())
        if self._met:
            self.report.met = np.concatenate(self._met)
        if self._together:
            pairs = np.concatenate(self._together)
            ids = np.sort(self.messages.ids(pairs.reshape(-1)).reshape(-1, 2), axis=1)
            # A message has a number for each chunk in which it came, so both may be the same message.
            self.report.together = np.unique(ids[ids[:, 0] != ids[:, 1]], axis=0)

    def notices(self, sender: Sender) -> Iterator[WireRow]:
        """Send the notices to the ackers, with one ack notice a message."""
        ackers = self._ackers
        if not ackers:
            return
        for inits in self._inits:
            yield from sender.notices(INIT, inits, acker_of(inits.column(0).to_numpy(), ackers), ackers)
        if not self._acks:
            return
        ids = np.concatenate([ids for ids, _ in self._acks])
        shares = np.concatenate([shares for _, shares in self._acks])
        order = np.argsort(ids, kind="stable")
        ids, shares = ids[order], shares[order]
        ids, starts = np.unique(ids, return_index=True)
        if len(ids):
            values = as_signed(np.bitwise_xor.reduceat(shares, starts))
            acks = pa.RecordBatch.from_arrays([pa.array(ids), pa.array(values)], schema=ACK_SCHEMA)
            yield from sender.notices(ACK, acks, acker_of(ids, ackers), ackers)

    def _is_enough(self, named: int) -> bool:
        return self._named_max is not None and named >= self._named_max

    def _named(self, message: int, failed: FailureCause) -> MessageFailure:
        at = np.array([message])
        return MessageFailure(
            MessageId(int(self.messages.ids(at)[0])),
            int(self.messages.origins(at)[0]),
            Token(int(self.messages.tokens(at)[0])),
            failed.reason,
            failed.component,
            failed.error,
            failed.input,
        )
