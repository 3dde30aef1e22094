"""The audit: typed reports of what the ledger, the sinks and the source recorded. The command line prints them.

| module | question that it answers |
| --- | --- |
| `verify`, `report` | `audit verify`: is everything proven, is something lost or doubled, or can it not be told |
| `verify_ledger` | do the ledger's rows agree with each other |
| `verify_messages` | is every opened message in exactly one place; how much may at-most-once have lost |
| `verify_sinks` | does each sink hold exactly the committed txids |
| `verify_rows` | are the rows in the tables those that were written (`--deep`) |
| `message`, `txn`, `replays` | what became of a message, of a txid; what was tried again, and why |
| `batches`, `figures` | the list of batches; what did each component do, how many tuples went over each edge |
| `holdings` | which sinks hold a batch, and since when |
| `questions` | the answers that a view of the ledger has: filters, groups, limits; declared in `trident/declarations` |
| `verdicts` | how is a verdict kept; what may a check build on that looks at what came since another (`--since`) |
| `status`, `overview` | what runs, what waits, how fast: one topology in detail, all of them in a line each |
| `ledger`, `lifecycle` | what is read of the ledger; how did each failed message end |
| `source`, `spouts`, `evidence`, `handed_in` | what do source, spouts, micro-batches and jobs say of their messages |
| `report_file` | what is an auditor handed: verdict, answers and digests in one file |
| `inspect` | how is a sink opened from its name in the ledger |
"""

from __future__ import annotations

from stormproof.trident.audit.inspect import SinkOpener, opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import MessageReport, message
from stormproof.trident.audit.replays import ReplaysReport, replays
from stormproof.trident.audit.report import NoticeKind, VerifyReport, ViolationKind
from stormproof.trident.audit.status import StatusReport, status
from stormproof.trident.audit.txn import TxnReport, txn
from stormproof.trident.audit.verify import verify
from stormproof.trident.audit.verify_rows import Deep

__all__ = [
    "AuditLedger",
    "Deep",
    "MessageReport",
    "NoticeKind",
    "ReplaysReport",
    "SinkOpener",
    "StatusReport",
    "TxnReport",
    "VerifyReport",
    "ViolationKind",
    "message",
    "opener_for",
    "replays",
    "status",
    "txn",
    "verify",
]
