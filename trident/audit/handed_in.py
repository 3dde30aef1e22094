"""`HandedInEvidence`: the jobs, or the micro-batches, that are written straight to sinks; each counts as one message."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.core.pending.audit import Finding
from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.ledger.handed_in import HandedIn, all_taken, newest, oldest, source_of
from stormproof.trident.ledger.rows import Txn
from stormproof.trident.ledger.streams import missing
from stormproof.trident.transaction_states import TxnState

_FIXED: Final = (TxnState.PREPARED, TxnState.BLOCKED, TxnState.COMMITTED)


def find_handed_in(connection: sa.Connection, incarnation: str, name: str, source: str) -> HandedInEvidence | None:
    """The jobs of this name, or the micro-batches that it took as transactions; None if there are none."""
    taken = [one for one in all_taken(connection, incarnation) if one.txid is not None]
    return HandedInEvidence(source, taken) if taken or source == source_of(name) else None


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
    first, last = oldest(connection, incarnation), newest(connection, incarnation)
    if first is None or last is None or first.query is None or last.query is None:
        return None
    return StreamPlace(last.query, last.batch, first.query, first.batch)


class HandedInEvidence(SourceEvidence):
    """The keys that were taken, in order, each with its txid.

    Nothing waits or dies by itself: Spark hands the last micro-batch out again, or the query fails; a program runs its job
    again, or does not. A prune leaves the rows that count, so `furthest` names none.
    """

    def __init__(self, source: str, taken: Sequence[HandedIn]) -> None:
        self._source = source
        self._taken = tuple(taken)

    @property
    def name(self) -> str:
        """The source, as the ledger names it."""
        return self._source

    def backlog(self) -> Backlog:
        """Zeros: only Spark, or the program, knows what is left."""
        return Backlog(0, 0, 0, 0)

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the transaction is this key's."""
        return position.get("key") == message

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """Keys whose batch is another one, or none; batches of fixed content whose key would be written again; and
        micro-batches that do not follow one another.

        After a prune, the first micro-batch that is left must follow the last one that was pruned.
        """
        del forgotten
        if not txns:
            return []
        return [*self._of_batches(txns), *self._of_keys(txns), *self._of_order(min(txn.txid for txn in txns))]

    def _of_batches(self, txns: Sequence[Txn]) -> Generator[Finding]:
        by_txid = {one.txid: one for one in self._taken}
        by_key = {one.key: one for one in self._taken}
        for txn in txns:
            key = txn.position.get("key")
            if not isinstance(key, str):
                yield Finding(f"txid {txn.txid} is nothing that was handed in: its row has no key", txn.txid)
            elif txn.state in _FIXED and (txn.txid not in by_txid or by_txid[txn.txid].key != key):
                told = f"is txid {by_key[key].txid} by its row" if key in by_key else "has no row"
                text = f"txid {txn.txid} wrote key {key!r}, which {told}: its rows may be there twice, or come again"
                yield Finding(text, txn.txid)

    def _of_keys(self, txns: Sequence[Txn]) -> Generator[Finding]:
        lowest, fixed = min(txn.txid for txn in txns), {txn.txid for txn in txns if txn.state in _FIXED}
        for one in self._taken:
            if one.txid is not None and one.txid >= lowest and one.txid not in fixed:
                yield Finding(
                    f"key {one.key!r} was taken as txid {one.txid}, which has no row of fixed content", one.txid
                )

    def _of_order(self, lowest: int) -> Generator[Finding]:
        of_queries = [one for one in self._taken if one.query is not None]
        for before, taken in pairwise(of_queries):
            if taken.txid is not None and taken.txid >= lowest and not _follows(before, taken):
                text = f"micro-batch {taken.key} (txid {taken.txid}) does not follow {before.key}, the one before it"
                yield Finding(text, taken.txid)


def _follows(before: HandedIn, taken: HandedIn) -> bool:
    next_one = taken.query == before.query and taken.batch == before.batch + 1
    return next_one or taken.adopted_from == before.key
