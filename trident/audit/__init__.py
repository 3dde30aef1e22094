"""The audit: what the ledger, the sinks and the source say happened, as typed reports; the command line prints them."""

from __future__ import annotations

from stormproof.trident.audit.inspect import SinkOpener, opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import MessageReport, message
from stormproof.trident.audit.replays import ReplaysReport, replays
from stormproof.trident.audit.report import NoticeKind, VerifyReport, ViolationKind
from stormproof.trident.audit.status import StatusReport, status
from stormproof.trident.audit.txn import TxnReport, txn
from stormproof.trident.audit.verify import verify

__all__ = [
    "AuditLedger",
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
