"""`StreamEvidence`: the micro-batches that a streaming query hands straight to sinks; each counts as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.core.pending.audit import Finding
from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.ledger.rows import Txn
from stormproof.trident.ledger.streams import StreamBatch, all_taken, has_table, missing, newest, oldest


def find_stream(connection: sa.Connection, incarnation: str, name: str) -> StreamEvidence | None:
    """The micro-batches that this topology took as transactions; None if there are none."""
    if not has_table(connection):
        return None
    taken = [batch for batch in all_taken(connection, incarnation) if batch.txid is not None]
    return StreamEvidence(name, taken) if taken else None


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A streaming query's last micro-batch in the ledger, and the one with which this topology began."""

    query: str
    batch: int
    began_query: str
    began_batch: int

    @property
    def missing(self) -> str | None:
        """What is not in the sinks, in words; None if the topology began with the query's first micro-batch."""
        if not self.began_batch:
            return None
        return (
            f"begins at batch {self.began_batch} of streaming query {self.began_query}; {missing(self.began_batch)} not in "
            "its sinks"
        )


def place_of(connection: sa.Connection, incarnation: str) -> StreamPlace | None:
    """The place of the streaming query that feeds a topology; None if none does."""
    if connection.dialect.name != "postgresql" or not has_table(connection):
        return None
    first, last = oldest(connection, incarnation), newest(connection, incarnation)
    return None if first is None or last is None else StreamPlace(last.query, last.batch, first.query, first.batch)


class StreamEvidence(SourceEvidence):
    """The micro-batches of one query that were taken, in order, each as one transaction.

    None of them waits or dies by itself: Spark hands the last one out again, or the query fails. A prune leaves the row
    that the next micro-batch follows, so `furthest` names none.
    """

    def __init__(self, name: str, taken: Sequence[StreamBatch]) -> None:
        self._name = name
        self._taken = tuple(taken)

    @property
    def name(self) -> str:
        """The topology's source, as the ledger names it."""
        return self._name

    def backlog(self) -> Backlog:
        """Zeros: only Spark knows what is left."""
        return Backlog(0, 0, 0, 0)

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the transaction is this micro-batch's, by its number."""
        return str(position.get("number")) == message

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """Batches and micro-batches that do not match, and micro-batches that do not follow one another.

        After a prune, the first batch that is left must follow the last one that was pruned.
        """
        del forgotten
        by_txid: dict[int | None, Txn] = {txn.txid: txn for txn in txns}
        lowest = min((txn.txid for txn in txns), default=0)
        findings: list[Finding] = []
        before: StreamBatch | None = None
        for taken in self._taken:
            if taken.txid is None or taken.txid < lowest:
                before = taken  # the row of its txid was pruned
                continue
            txn = by_txid.pop(taken.txid, None)
            if txn is None:
                findings.append(Finding(f"micro-batch {taken.place} was taken as txid {taken.txid}, which has no row"))
            elif _place(txn.position) != taken.place:
                text = f"txid {txn.txid} is micro-batch {_place(txn.position)} by its own row, {taken.place} by the query's"
                findings.append(Finding(text, txn.txid))
            if before is not None and not _follows(before, taken):
                text = (
                    f"micro-batch {taken.place} (txid {taken.txid}) does not follow {before.place}, the one before it"
                )
                findings.append(Finding(text, taken.txid))
            before = taken
        findings += [Finding(f"txid {txid} is no micro-batch that was taken", txid) for txid in by_txid]
        return findings


def _place(position: Mapping[str, Any]) -> str:
    return f"{position.get('query')}:{position.get('batch')}"


def _follows(before: StreamBatch, taken: StreamBatch) -> bool:
    next_one = taken.query == before.query and taken.batch == before.batch + 1
    return next_one or taken.adopted_from == before.place
