"""`audit verify`: its options, its progress on a terminal, and its report as text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime

from stormproof.core.clock import SystemClock
from stormproof.core.errors import UsageError
from stormproof.trident import audit
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit.verdicts import keep
from stormproof.trident.audit.verify import Since
from stormproof.trident.audit.verify_rows import Deep, RowsProgress
from stormproof.trident.cli.output import emit, finish, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.wording import counted, parse_time


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of ``audit verify``."""

    first: int = 1
    last: int | None = None
    since: str | None = None
    deep: bool = False
    sinks: Sequence[str] | None = None
    others_write: bool = False


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


def show_verify(topology: str, asked: VerifyOptions, *, by: str, as_json: bool) -> None:
    """Verify a topology, keep the verdict, and end with it as exit status."""
    if not asked.deep and (asked.sinks or asked.others_write):
        raise UsageError("--sink and --others-write say how tables are read: give --deep, too")
    clock = SystemClock()
    with opened() as stores:
        began_s = clock.monotonic_s()
        opener = audit.opener_for(stores.database)
        with rows_shown() as progress:
            found = audit.verify(
                *(stores.audit, topology, opener),
                first=asked.first,
                last=asked.last,
                since=_point(asked.since, clock.now()),
                deep=Deep(asked.sinks, asked.others_write, progress) if asked.deep else None,
            )
        took_ms = round((clock.monotonic_s() - began_s) * 1000)
        report = keep(stores.engine, found, at=clock.now(), by=by, took_ms=took_ms)
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
    if not report.violations and not report.unknowns:
        say(f"proves: {report.proves}")
    if report.not_recorded is not None:
        say(f"the verdict was not kept: {report.not_recorded}")
