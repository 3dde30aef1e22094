"""`stormproof audit report`: makes a report file."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stormproof.core.clock import SystemClock
from stormproof.core.errors import UsageError
from stormproof.trident import audit
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit.verdicts import keep
from stormproof.trident.audit.verify_rows import Deep
from stormproof.trident.audit_report import Wanted, file_bytes, record
from stormproof.trident.cli.output import emit, finish, note, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.cli.verify import rows_shown
from stormproof.trident.stores import Stores
from stormproof.trident.wording import parse_time

NAMESPACE: Final = "stormproof-report"
"""What a signature is for, so that one of the same key for another purpose passes for none of a report."""
_STATUS: Final = {"clean": 0, "violation": 1, "cannot_tell": 4, "not_compared": 4}


def make_report(
    topology: str,
    out: Path,
    *,
    since: str | None,
    until: str | None,
    deep: bool,
    others_write: bool,
    by: str,
    as_json: bool,
    **wanted: Any,
) -> None:
    """Write a report file, and end with the verdict as exit status.

    Raises:
        UsageError: no such topology, message or verdict; the file is there already; or a verdict on record is asked
            for and tables are to be read.
    """
    if deep and wanted.get("verdict") is not None:
        raise UsageError("--deep has the tables read now; a verdict on record (--verdict) says itself whether it did")
    if others_write and not deep:
        raise UsageError("--others-write says how tables are read: give --deep, too")
    if out.exists():
        raise _stands(out)
    now = SystemClock().now()
    whole = Wanted(topology, parse_time(since, now), parse_time(until, now), **wanted)
    with opened() as stores:
        told = record(
            stores.audit,
            whole,
            lambda first, last: _verified(stores, topology, first, last, by=by, deep=deep, others_write=others_write),
            now=now,
            by=by,
            version=version("stormproof"),
        )
    data = file_bytes(told)
    _write_new(out, data)
    verdict = told["verdict"]
    assert isinstance(verdict, dict)
    report = {
        "file": str(out),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "topology": topology,
        "verdict": verdict["verdict"],
    }
    emit(report, as_json=as_json, text=lambda: _made_text(report))
    finish(_STATUS[str(verdict["verdict"])])


def _verified(
    stores: Stores, topology: str, first: int, last: int | None, *, by: str, deep: bool, others_write: bool
) -> VerifyReport:
    clock = SystemClock()
    began_s = clock.monotonic_s()
    note(f"verifying topology {topology} from txid {first} ...")
    with rows_shown() as progress:
        found = audit.verify(
            *(stores.audit, topology, audit.opener_for(stores.database)),
            first=first,
            last=last,
            deep=Deep(None, others_write, progress) if deep else None,
        )
    took_ms = round((clock.monotonic_s() - began_s) * 1000)
    return keep(stores.engine, found, at=clock.now(), by=by, took_ms=took_ms)


def _write_new(out: Path, data: bytes) -> None:
    """Write the file; a part of one, after a full disk, is removed."""
    try:
        file = out.open("xb")
    except FileExistsError as error:
        raise _stands(out) from error
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        out.unlink(missing_ok=True)
        raise


def _stands(out: Path) -> UsageError:
    return UsageError(f"{out} is there already; a report is never written over another file", file=str(out))


def _made_text(report: dict[str, Any]) -> None:
    say(f"{report['file']}: {report['topology']}, verdict {report['verdict']}")
    say(
        f"SHA-256 {report['sha256']}, {report['bytes']} bytes; sign it with: ssh-keygen -Y sign -n {NAMESPACE} -f KEY FILE"
    )
