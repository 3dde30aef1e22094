"""Tells of batches: one in so many seconds with the sums of those between, and every one that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from openlineage.client.event_v2 import RunState

from stormproof.core.clock import Clock
from stormproof.core.guarantee import Guarantee
from stormproof.core.source.protocol import Slice
from stormproof.trident.observers import CommittedBatch, Observer
from stormproof.trident.openlineage.events import Batch, Told, Written, event_of
from stormproof.trident.transaction_states import AttemptOutcome, TxnCause, TxnState


class LineageReporter(Observer):
    """Makes events of what a run's steps tell. `emit` takes each at once; `merged` is told of each batch that is summed up.

    A run that was begun is always ended, unless its driver dies: then recovery ends it, under the same id.
    """

    def __init__(
        self,
        told: Told,
        emit: Callable[[Any], None],
        clock: Clock,
        *,
        interval_s: float,
        error_texts: bool = False,
        merged: Callable[[], None] = lambda: None,
    ) -> None:
        self._told = told
        self._emit = emit
        self._clock = clock
        self._interval_s = interval_s
        self._error_texts = error_texts
        self._merged = merged
        self._sent_s: float | None = None
        self._opened: dict[int, datetime] = {}
        self._begun: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._sums: Batch | None = None

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """See `Observer.opened`."""
        del guarantee, slice_
        self._opened[txid] = self._clock.now()
        if self._is_due():
            self._begin(txid)

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
        del outcome
        self._attempts[txid] = attempt + 1

    def committed(self, batch: CommittedBatch) -> None:
        """See `Observer.committed`."""
        written = {
            sink: Written(end.rows - end.rejected_rows, end.bytes, end.version, end.suppressed)
            for sink, end in batch.sinks.items()
        }
        attempts = self._attempts.get(batch.txid, 1)
        self._sums = summed(self._sums, Batch(batch.txid, attempts, batch.messages, written))
        # What an earlier driver opened was perhaps begun there: it is ended here.
        if batch.txid in self._begun or batch.txid not in self._opened or self._is_due():
            self._complete()
        else:
            self._merged()
        self._forget(batch.txid)

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """See `Observer.given_up`. The reason may quote a message: it is told where that was asked for."""
        del state
        self._fail(Batch(txid, self._attempts.get(txid, 1), error=self._said(cause, reason)), RunState.ABORT)
        self._forget(txid)

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
        del sink
        self._fail(Batch(txid, self._attempts.get(txid, 1), error=self._said(cause, reason)), RunState.FAIL)

    def close(self) -> None:
        """Tell of what was summed up and not told yet."""
        if self._sums is not None:
            self._complete()

    def _said(self, cause: TxnCause, reason: str) -> str:
        return f"{cause.value}: {reason}" if self._error_texts and reason else cause.value

    def _is_due(self) -> bool:
        return self._sent_s is None or self._clock.monotonic_s() - self._sent_s >= self._interval_s

    def _begin(self, txid: int) -> None:
        self._sent_s = self._clock.monotonic_s()
        self._begun.add(txid)
        at = self._opened.get(txid) or self._clock.now()
        self._emit(event_of(self._told, Batch(txid), RunState.START, at))

    def _complete(self) -> None:
        assert self._sums is not None
        batch, self._sums = self._sums, None
        self._fail(batch, RunState.COMPLETE)

    def _fail(self, batch: Batch, state: RunState) -> None:
        if batch.txid not in self._begun:
            self._begin(batch.txid)
        self._emit(event_of(self._told, batch, state, self._clock.now()))
        self._begun.discard(batch.txid)

    def _forget(self, txid: int) -> None:
        self._opened.pop(txid, None)
        self._attempts.pop(txid, None)
        self._begun.discard(txid)


def summed(sums: Batch | None, batch: Batch) -> Batch:
    """A batch with the sums of those before it that were not told of; its versions are the newest."""
    if sums is None:
        return batch
    written = dict(batch.written)
    for sink, before in sums.written.items():
        now = written.get(sink)
        written[sink] = (
            before
            if now is None
            else replace(
                now,
                rows=before.rows + now.rows,
                bytes=before.bytes + now.bytes,
                suppressed=before.suppressed or now.suppressed,
            )
        )
    return replace(
        batch,
        messages=sums.messages + batch.messages,
        written=written,
        first_txid=sums.txid if sums.first_txid is None else sums.first_txid,
        batches=sums.batches + batch.batches,
    )
