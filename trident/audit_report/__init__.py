"""The report file of `stormproof audit report`: the answers to the audit's questions as one JSON file, with their digests.

Whoever hands it on signs it with a tool for that (`ssh-keygen -Y sign`): see docs/audit.md.

| module | question that it answers |
| --- | --- |
| `record` | what does a report say, all of one instant |
| `answers` | what are the answers to the twelve questions |
| `verdict` | which verdict does a report have, and which batches did that not cover; what does a report not say |
| `summaries` | what do 100,000 batches come to: states, days, steps, runs of the driver, one digest of all |
| `plain` | what is asked for; how is a value of the ledger said in JSON; what are the bytes of a report |
"""

from __future__ import annotations

from stormproof.trident.audit_report.plain import Wanted, file_bytes
from stormproof.trident.audit_report.record import record

__all__ = ["Wanted", "file_bytes", "record"]
