"""`stormproof audit report`: makes a report file, or checks one."""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stormproof.core.clock import SystemClock
from stormproof.core.errors import UsageError
from stormproof.core.settings import SIGNING_VARIABLE
from stormproof.trident import audit
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit.verdicts import keep
from stormproof.trident.audit.verify_rows import Deep
from stormproof.trident.audit_report import Checked, Finding, PublicKey, SigningKey, Wanted, check, record, sealed
from stormproof.trident.audit_report.seal import sha256
from stormproof.trident.cli.output import emit, finish, note, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.cli.verify import rows_shown
from stormproof.trident.stores import Stores
from stormproof.trident.wording import parse_time

_STATUS: Final = {"clean": 0, "violation": 1, "cannot_tell": 4, "not_compared": 4}


def make_report(
    topology: str,
    out: Path,
    *,
    sign_key: Path | None,
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
        UsageError: no such topology, key, message or verdict; the file is there already; or a verdict on record is asked
            for and tables are to be read.
    """
    if deep and wanted.get("verdict") is not None:
        raise UsageError("--deep has the tables read now; a verdict on record (--verdict) says itself whether it did")
    if others_write and not deep:
        raise UsageError("--others-write says how tables are read: give --deep, too")
    key = None if sign_key is None else SigningKey.read(sign_key, lambda: _passphrase(sign_key))
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
    data = sealed(told, key)
    _write_new(out, data)
    verdict = told["verdict"]
    assert isinstance(verdict, dict)
    report = {
        "file": str(out),
        "bytes": len(data),
        "sha256": sha256(data),
        "signed_by": None if key is None else key.public.fingerprint,
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


def _passphrase(path: Path) -> bytes:
    given = os.environ.get(SIGNING_VARIABLE)
    if given is not None:
        return given.encode()
    if not sys.stdin.isatty():
        raise UsageError(f"the key {path} is encrypted: give its passphrase in {SIGNING_VARIABLE}, or at a terminal")
    return getpass.getpass(f"passphrase of {path}: ").encode()


def _made_text(report: dict[str, Any]) -> None:
    signed_by = report["signed_by"]
    how = "NOT SIGNED (--sign-key)" if signed_by is None else f"signed with {signed_by}"
    say(f"{report['file']}: {report['topology']}, verdict {report['verdict']}, {how}")
    say(f"SHA-256 {report['sha256']}, {report['bytes']} bytes")


def check_report(file: Path, *, public_key: Path | None, digest: str | None, as_json: bool) -> None:
    """Check a report file; needs no ledger. Exit status: 0 genuine, 1 altered, 4 cannot tell."""
    key = None if public_key is None else PublicKey.read(public_key)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"the report {file} cannot be read: {error.strerror}", file=str(file)) from error
    found = check(data, key, digest)
    emit({"file": str(file), **asdict(found)}, as_json=as_json, text=lambda: _checked_text(file, found))
    finish(found.exit_status)


def _checked_text(file: Path, found: Checked) -> None:
    for one in found.differs:
        say(f"DIFFERS: {one}")
    for one in found.open:
        say(f"CANNOT TELL: {one}")
    words = {
        Finding.GENUINE: "as it was made",
        Finding.ALTERED: "not as it was made: what it says is worth nothing",
        Finding.CANNOT_TELL: "it agrees with itself; nothing shows who made it",
    }
    signed = "" if found.signed_by is None or found.finding is Finding.ALTERED else f", signed with {found.signed_by}"
    say(f"{file}: {words[found.finding]}{signed}")
    if found.finding is not Finding.ALTERED and found.scope is not None:
        scope = found.scope
        say(
            f"of topology {scope.get('topology')}, {scope.get('batches')} batches (txid {scope.get('first')} to "
            f"{scope.get('last')}), made {found.made_at}; its verdict on the ledger: {found.verdict}"
        )
    say(f"SHA-256 {found.sha256}")
