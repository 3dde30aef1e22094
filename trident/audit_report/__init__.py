"""The report file of `stormproof audit report`: what an auditor is handed, and how it is checked without the ledger.

| module | question that it answers |
| --- | --- |
| `wanted`, `record` | what is asked for; what does a report say, all of one instant |
| `answers` | what are the answers to the twelve questions |
| `verdict` | which verdict does a report have, and which batches did that not cover |
| `limits` | what does a report not say |
| `summaries` | what do 100,000 batches come to: states, days, steps, runs of the driver, one digest of all |
| `plain` | how is a value of the ledger said in JSON |
| `page`, `style` | how is the record made into one page of HTML; how does that look |
| `inert` | how is a stranger's text shown, so that it does nothing |
| `keys` | how is an Ed25519 key read, for signing and for checking |
| `seal` | how are record and page joined in one file, signed, and taken apart again |
| `check` | is a file as it was signed, by whom, and what differs |
"""

from __future__ import annotations

from stormproof.trident.audit_report.check import Checked, Finding, check
from stormproof.trident.audit_report.keys import PublicKey, SigningKey
from stormproof.trident.audit_report.record import record
from stormproof.trident.audit_report.seal import sealed
from stormproof.trident.audit_report.wanted import Wanted

__all__ = ["Checked", "Finding", "PublicKey", "SigningKey", "Wanted", "check", "record", "sealed"]
