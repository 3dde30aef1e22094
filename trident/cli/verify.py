"""`audit verify`: its options, its progress on a terminal, its report as text or JSON. `audit report`: makes its file."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.report import Deep, RowsProgress, VerifyReport, keep
from stormproof.trident.audit.report_file import Wanted, file_bytes, record
from stormproof.trident.audit.verify import Since, verify
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import emit, finish, note, say
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.terms.transaction_states import Verdict
from stormproof.trident.terms.wording import counted, parse_time


@contextmanager
def rows_shown() -> Generator[RowsProgress]:
    """Shows, on a terminal, how many rows of which table were read by now."""
    if not sys.stderr.isatty():
        yield lambda sink, done, of: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda sink, done, of: status.update(
            f"{sink}: {done:,} rows read" + ("" if of is None else f" of {of:,}")
        )


def show_verify(
    topology: str,
    *,
    first: int,
    last: int | None,
    since: str | None,
    deep: bool,
    sink: Sequence[str] | None,
    others_write: bool,
    by: str,
    as_json: bool,
) -> None:
    """Verify a topology, keep the verdict, and end with it as exit status."""
    if not deep and (sink or others_write):
        raise UsageError("--sink and --others-write say how tables are read: give --deep, too")
    with opened() as stores:
        read = Deep(sink, others_write) if deep else None
        report = _verified(stores, topology, read, by=by, first=first, last=last, since=since)
    told = {field.name: getattr(report, field.name) for field in fields(report)}
    told |= {"verdict": report.verdict, "reach": report.reach}
    emit(told, as_json=as_json, text=lambda: _verify_text(report))
    finish(report.exit_status)


def _point(text: str | None, now: datetime) -> Since | None:
    """What ``--since`` names."""
    if text is None:
        return None
    if text == "last":
        return "last"
    return int(text) if text.isascii() and text.isdigit() else parse_time(text, now)


def _scope_text(report: VerifyReport) -> str:
    first, last = report.first, report.last
    txids = "no new txid" if last is None else f"txids {first} to {last}"
    if report.chain.basis is None:
        return f"scope: {txids}"
    return (
        f"scope: {txids}, since verdict {report.chain.basis}; what the verdicts before looked at, from txid "
        f"{report.chain.chain_from} on, was not looked at again"
    )


def _verify_text(report: VerifyReport) -> None:
    for violation in report.violations:
        say(f"VIOLATION {violation.kind}: {violation.text}")
    for unknown in report.unknowns:
        say(f"CANNOT TELL: {unknown.text}")
    for notice in report.notices:
        say(f"note {notice.kind}: {notice.text}")
    c = report.checked
    left_open = "1 question that" if len(report.unknowns) == 1 else f"{len(report.unknowns) or 'no'} questions that"
    say(
        f"{report.topology}: {counted(len(report.violations), 'violation')}, {left_open} the evidence leaves open; checked "
        f"{counted(c.txids, 'txid')} ({c.committed} committed), {counted(c.sinks, 'sink')}, "
        f"{counted(c.evidence, 'entry', 'entries')} of their own logs, {counted(c.messages_opened, 'opening')} of messages, "
        f"{counted(c.failures, 'message')} that failed"
    )
    for table in report.tables:
        for text in table.compared:
            say(f"sink {table.sink!r}, compared: {text}")
    if report.kept is not None and report.kept.compared:
        say(f"source, compared: {report.kept.compared}")
    say(_scope_text(report))
    say(f"verdict: {report.reach}")
    if report.verdict is Verdict.NOT_COMPARED:
        say("lineage columns have values by key compared; a gate that takes this verdict reads .verdict of --json")
    if not report.violations and not report.unknowns:
        say(f"proves: {report.proves}")
    if report.not_recorded is not None:
        say(f"the verdict was not kept: {report.not_recorded}")


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
    message: Sequence[str] | None,
    **wanted: Any,
) -> None:
    """Write a report file, and end with the verdict as exit status.

    Raises:
        UsageError: no such topology or message; or the file is there already.
    """
    if others_write and not deep:
        raise UsageError("--others-write says how tables are read: give --deep, too")
    if out.exists():
        raise _stands(out)
    now = SystemClock().now()
    whole = Wanted(topology, parse_time(since, now), parse_time(until, now), messages=tuple(message or ()), **wanted)
    read = Deep(others_write=others_write) if deep else None
    with opened() as stores:

        def verified(first: int, last: int | None) -> VerifyReport:
            note(f"verifying topology {topology} from txid {first} ...")
            return _verified(stores, topology, read, by=by, first=first, last=last)

        told = record(
            stores.audit,
            whole,
            verified,
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
    stores: Stores,
    topology: str,
    deep: Deep | None,
    *,
    by: str,
    first: int,
    last: int | None,
    since: str | None = None,
) -> VerifyReport:
    """Verify it, and keep the verdict."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    with rows_shown() as progress:
        found = verify(
            *(stores.audit, topology, opener_for(stores.database)),
            first=first,
            last=last,
            since=_point(since, clock.now()),
            deep=None if deep is None else replace(deep, progress=progress),
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
