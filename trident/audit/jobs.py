"""`JobEvidence`: batch jobs that are written to sinks once for each key; each counts as one message, named by its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.core.pending.audit import Finding
from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.ledger.job_keys import all_taken, has_table, source_of
from stormproof.trident.ledger.rows import Txn
from stormproof.trident.transaction_states import TxnState

_FIXED = (TxnState.PREPARED, TxnState.BLOCKED, TxnState.COMMITTED)


def find_jobs(connection: sa.Connection, incarnation: str, name: str, source: str) -> JobEvidence | None:
    """The jobs of this name; None where it is no name of jobs."""
    if source != source_of(name) or not has_table(connection):
        return None
    return JobEvidence(source, all_taken(connection, incarnation))


class JobEvidence(SourceEvidence):
    """The keys that were taken, each with its txid.

    A job waits nowhere: a program runs it again, or does not. A prune leaves the keys, so `furthest` names none.
    """

    def __init__(self, source: str, taken: Mapping[str, int]) -> None:
        self._source = source
        self._taken = taken

    @property
    def name(self) -> str:
        """The source, as the ledger names it."""
        return self._source

    def backlog(self) -> Backlog:
        """Zeros: only the program knows what is left."""
        return Backlog(0, 0, 0, 0)

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the transaction is this key's."""
        return position.get("key") == message

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """Keys whose batch is another one, or none, and batches of fixed content whose key would be written again."""
        del forgotten
        findings: list[Finding] = []
        fixed: set[int] = set()
        for txn in txns:
            key = txn.position.get("key")
            if not isinstance(key, str):
                findings.append(Finding(f"txid {txn.txid} is no job: its row has no key", txn.txid))
            elif txn.state in _FIXED:
                fixed.add(txn.txid)
                taken = self._taken.get(key)
                if taken != txn.txid:
                    told = "has no row" if taken is None else f"is txid {taken} by its row"
                    text = (
                        f"txid {txn.txid} wrote key {key!r}, which {told}: its rows may be there twice, or come again"
                    )
                    findings.append(Finding(text, txn.txid))
        lowest = min((txn.txid for txn in txns), default=None)
        findings += [
            Finding(f"key {key!r} was taken as txid {txid}, which has no row of fixed content", txid)
            for key, txid in self._taken.items()
            if lowest is not None and txid >= lowest and txid not in fixed
        ]
        return findings
