"""What a task accounts for: the messages that it met, the shares that were acked in it, and the messages that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrays import Rows, Words
from stormproof.core.errors import JobFailed
from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.task.exchange import Sender
from stormproof.core.task.passage import Failed, Passage, Tuples
from stormproof.core.task.report import TaskReport
from stormproof.core.task.wire import ACK, ACK_SCHEMA, INIT, INIT_SCHEMA
from stormproof.core.tracking.acker import acker_of
from stormproof.core.tracking.anchors import MANY, Anchors, MessageTable
from stormproof.core.tracking.share import as_signed, xor_reduce


class Account:
    """One task's account; `report` is what of it goes to the driver.

    `ackers` is the number of acker tasks, 0 where only the whole batch gets a verdict. Where there are any, the account also
    keeps what each message's acker is to be told: its init, and the shares that were acked or that ended in a failure.
    """

    def __init__(self, stage: int, task: int, ackers: int) -> None:
        self.report = TaskReport(stage, task)
        self.messages = MessageTable()
        self._ackers = ackers
        self._late: dict[int, Failed] = {}
        self._together: list[npt.NDArray[np.int64]] = []
        self._inits: list[pa.RecordBatch] = []
        self._acks: list[tuple[Rows, Words]] = []

    def begin(self, ids: Rows, origins: Rows, tokens: Rows) -> None:
        """These messages' ackers are to know that they began."""
        columns = [pa.array(column) for column in (ids, origins, tokens)]
        self.pass_on_init(pa.RecordBatch.from_arrays(columns, schema=INIT_SCHEMA))

    def pass_on_init(self, inits: pa.RecordBatch) -> None:
        """Notices of messages that began, from the stage before."""
        self._inits.append(inits)

    def pass_on_ack(self, ids: Rows, shares: Words) -> None:
        """Notices of shares, from the stage before."""
        self._acks.append((ids, shares))

    def ids_of(self, anchors: Anchors) -> Rows | None:
        """The message id of each tuple, where each has exactly one."""
        if anchors.row is not None or anchors.message is None or (anchors.message == MANY).any():
            return None
        return self.messages.ids(anchors.message)

    def ack(self, anchors: Anchors) -> None:
        """These tuples ended, and nothing failed."""
        self.report.ack(anchors.xor())
        if self._ackers and anchors.message is not None and anchors.share is not None:
            self._acks.append((self.messages.ids(anchors.message), anchors.share))

    def anchored_together(self, anchors: Anchors) -> None:
        """Note which messages anchor one tuple together: a failure of the one spreads to the other."""
        pairs = anchors.together()
        if len(pairs):
            self._together.append(pairs)

    def fail_row(self, passage: Passage, anchors: Anchors, row: int, failed: Failed) -> None:
        """Fail every message that anchors a tuple: early where nothing of it can have gone anywhere, else late."""
        pairs = anchors.pairs_of(row)
        if len(pairs) == 0:
            if anchors.row is None:
                raise AssertionError("a tuple has one pair where there is no index")
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
            self._late.setdefault(message, failed)
            if anchors.share is not None:
                share = anchors.share[pair : pair + 1]
                self.report.late_xor ^= xor_reduce(share)
                if self._ackers:
                    self._acks.append((self.messages.ids(np.array([message])), share))

    def fail_rows(self, passage: Passage, tuples: Tuples, bad: Mapping[int, Failed]) -> Tuples:
        """Fail these rows; gives the rows that are left."""
        if not bad:
            return tuples
        for row, failed in sorted(bad.items()):
            self.fail_row(passage, tuples.anchors, row, failed)
        good = np.ones(tuples.rows.num_rows, np.bool_)
        good[list(bad)] = False
        return passage.alive(tuples.only(good))

    def name_early(self, passage: Passage, untracked: npt.NDArray[np.bool_] | None) -> None:
        """Name the messages that failed early in a passage; `untracked` are those that nobody waits for."""
        for message, failed in sorted(passage.failed.items()):
            if untracked is not None and untracked[message - passage.first]:
                self.report.unanchored += 1
            else:
                self.report.failures.append(self._named(message, failed))

    def close(self) -> None:
        """The task is at its end: put late failures, and messages that are anchored together, into the report."""
        found: dict[tuple[int, str, FailureReason], MessageFailure] = {}
        # A message has a number for each tuple that came over an exchange: it is named once a component and reason.
        for message, failed in sorted(self._late.items()):
            named = self._named(message, failed)
            found.setdefault((named.id, named.component, named.reason), named)
        self.report.late = list(found.values())
        if self._together:
            pairs = np.concatenate(self._together)
            ids = np.sort(self.messages.ids(pairs.reshape(-1)).reshape(-1, 2), axis=1)
            # A message has a number for each chunk that it came in, so the two may be one.
            self.report.together = np.unique(ids[ids[:, 0] != ids[:, 1]], axis=0)

    def notices(self, sender: Sender) -> Iterator[pa.RecordBatch]:
        """What the ackers are to know, one ack notice a message and task, towards the acker that each message has."""
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
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1]))) if len(ids) else np.empty(0, np.int64)
        if len(starts):
            values = as_signed(np.bitwise_xor.reduceat(shares, starts))
            acks = pa.RecordBatch.from_arrays([pa.array(ids[starts]), pa.array(values)], schema=ACK_SCHEMA)
            yield from sender.notices(ACK, acks, acker_of(ids[starts], ackers), ackers)

    def _named(self, message: int, failed: Failed) -> MessageFailure:
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
