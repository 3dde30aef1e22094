"""`status` and `audit ...`: the reports as text or JSON."""

from __future__ import annotations

from stormproof.trident import audit
from stormproof.trident.audit.lifecycle import EndState
from stormproof.trident.audit.message import MessageReport
from stormproof.trident.audit.pace import Pace
from stormproof.trident.audit.replays import ReplaysReport
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit.status import StatusReport
from stormproof.trident.audit.txn import TxnReport
from stormproof.trident.cli.output import emit, finish, say, table
from stormproof.trident.cli.stores import opened
from stormproof.trident.tuning import Figures


def show_status(*, as_json: bool) -> None:
    """All topologies."""
    with opened() as stores:
        report = audit.status(stores.audit)
    emit(report, as_json=as_json, text=lambda: _status_text(report))


def _status_text(report: StatusReport) -> None:
    if not report.topologies:
        say("no topology was run here yet")
        return
    table(
        ["topology", "driver", "guarantee", "epoch", "last txid", "ready", "pending", "waiting", "dead"],
        [
            (
                t.name,
                f"{t.driver} ({t.driver_host}:{t.driver_pid})",
                t.guarantee,
                t.epoch,
                t.last_txid,
                *(
                    (None,) * 4
                    if t.backlog is None
                    else (t.backlog.ready, t.backlog.pending, t.backlog.waiting, t.backlog.dead)
                ),
            )
            for t in report.topologies
        ],
    )
    for topology in report.topologies:
        for sink in topology.sinks:
            say(f"{topology.name}: sink {sink.sink} ({sink.target}) holds txid {sink.last_txid or '-'}")
            for missing in sink.missing:
                say(f"{topology.name}: sink {sink.sink} does not have {missing}: it was not part of the topology then")
        if topology.tuning is not None:
            say(_tuning_text(topology.name, topology.in_flight, topology.tuning))
        if topology.pace is not None:
            say(_pace_text(topology.name, topology.pace))
        if topology.recovered is not None:
            did = "; ".join(f"{what.replace('_', ' ')}: {which}" for what, which in topology.recovered.did.items())
            at = "" if topology.recovered.at is None else topology.recovered.at.isoformat(timespec="seconds")
            say(f"{topology.name}: epoch {topology.recovered.epoch} recovered {at}: {did or 'nothing to do'}")
        if topology.stream is not None:
            say(f"{topology.name}: streaming query {topology.stream.query} stands at batch {topology.stream.batch}")
            if topology.stream.missing is not None:
                say(f"{topology.name}: {topology.stream.missing}")
        if topology.refused is not None:
            say(f"{topology.name}: epoch {topology.epoch} did not start: {topology.refused.reason}")
        if topology.pruned_upto:
            say(f"{topology.name}: pruned up to txid {topology.pruned_upto}")
        for txn in topology.unresolved:
            reason = f": {txn.reason}" if txn.reason else ""
            since = txn.since.isoformat(timespec="seconds")
            say(f"{topology.name}: txid {txn.txid} is {txn.state} since {since}, {txn.messages} messages{reason}")


def _tuning_text(topology: str, in_flight: int, f: Figures) -> str:
    text = (
        f"{topology}: {in_flight} of at most {f.in_flight} batches in flight, each of at most {f.messages} messages and "
        f"{f.bytes} bytes"
    )
    if f.latency_target_s is None:
        return text
    text += f"; tuned to commit within {f.latency_target_s:g} s of the open, with at most {f.in_flight_max} in flight"
    if f.floor_s is not None:
        text += f", which is below reach: even small batches take {f.floor_s:.3g} s"
    return f"{text}; last step: {f.step}, since {f.why}" if f.step else text


def _pace_text(topology: str, p: Pace) -> str:
    last = "last batch" if p.batches == 1 else f"last {p.batches} batches"
    return (
        f"{topology}: {last}: {p.messages:.0f} messages each, {p.messages_per_s:.0f} messages/s, "
        f"committed {p.latency_p50_ms:.0f} ms after open (nine in ten within {p.latency_p90_ms:.0f} ms): job "
        f"{p.steps_ms['job']:.0f} ms, wait for its turn {p.steps_ms['wait']:.0f} ms, commit {p.steps_ms['commit']:.0f} ms; "
        f"back-pressure {p.back_pressure:.0%}"
    )


def show_verify(topology: str, first: int, last: int | None, *, as_json: bool) -> None:
    """Verify, one violation a line, and end with the verdict as exit status."""
    with opened() as stores:
        opener = audit.opener_for(stores.database)
        report = audit.verify(stores.audit, topology, opener, first=first, last=last)
    emit(report, as_json=as_json, text=lambda: _verify_text(report))
    finish(report.exit_status)


def _verify_text(report: VerifyReport) -> None:
    for violation in report.violations:
        say(f"VIOLATION {violation.kind}: {violation.text}")
    for unknown in report.unknowns:
        say(f"CANNOT TELL: {unknown.text}")
    for notice in report.notices:
        say(f"note {notice.kind}: {notice.text}")
    c = report.checked
    say(
        f"{report.topology}: {len(report.violations)} violations, {len(report.unknowns)} cannot be told; checked "
        f"{c.txids} txids ({c.committed} committed), {c.sinks} sinks, {c.evidence} entries of their own logs, "
        f"{c.messages_opened} openings of messages, {c.failures} messages that failed"
    )
    if report.clean:
        say(f"proves: {report.proves}")


def show_replays(topology: str, *, as_json: bool) -> None:
    """What was replayed."""
    with opened() as stores:
        report = audit.replays(stores.audit, topology)
    emit(report, as_json=as_json, text=lambda: _replays_text(report))


def _replays_text(report: ReplaysReport) -> None:
    if report.messages:
        table(
            ["message", "failed", "returned", "reasons", "components", "replayed in", "end", "last error"],
            [
                (
                    m.message,
                    m.times_failed,
                    len(m.returned),
                    ", ".join(sorted({f.reason for f in m.failures})),
                    ", ".join(sorted({f.component for f in m.failures})),
                    ", ".join(map(str, m.replayed_in)) or None,
                    end_text(m.end),
                    (m.failures or m.returned)[-1].error[:200] if m.failures or m.returned else None,
                )
                for m in report.messages
            ],
        )
    for batch in report.batches:
        say(f"txid {batch.txid} {batch.state}, {batch.messages} messages: {batch.reason}")
    for attempt in report.attempts:
        say(f"txid {attempt.txid} attempt {attempt.attempt} {attempt.outcome}: {attempt.error}")
    for suppressed in report.suppressed:
        again = "" if suppressed.micro_batch is None else f"micro-batch {suppressed.micro_batch} was handed out again, "
        if suppressed.sink:
            say(f"{again}txid {suppressed.txid}: sink {suppressed.sink} held it already, a duplicate was suppressed")
        else:
            say(f"{again}all of its rows had been taken already, a duplicate was suppressed")
    say(
        f"{report.topology}: {len(report.messages)} messages replayed or dead, {len(report.batches)} batches given back "
        f"or abandoned, {len(report.attempts)} failed attempts, {len(report.suppressed)} duplicates suppressed"
    )


def end_text(end: EndState) -> str:
    """Where a message stands, in words."""
    txid = "" if end.txid is None else f" in txid {end.txid}"
    since = "" if end.since is None else f" since {end.since.isoformat(timespec='seconds')}"
    by = f" by {end.by}" if end.by else ""
    return f"{end.kind.value.replace('_', ' ')}{txid}{since}{by}"


def show_txn(topology: str, txid: int, *, as_json: bool) -> None:
    """One batch."""
    with opened() as stores:
        report = audit.txn(stores.audit, topology, txid)
    emit(report, as_json=as_json, text=lambda: _txn_text(report))


def _txn_text(report: TxnReport) -> None:
    reason = f": {report.reason}" if report.reason else ""
    say(f"txid {report.txid} of {report.topology}: {report.state}{reason} ({report.guarantee}, epoch {report.epoch})")
    kind = "messages that failed before" if report.retry else "messages"
    returned = f", {len(report.returned)} returned with them" if report.returned else ""
    say(f"read {report.messages} {kind} ({report.bytes} bytes) from {report.source}; {report.failed} failed{returned}")
    say(f"opened {report.opened_at}, content fixed {report.prepared_at or '-'}, ended {report.ended_at or '-'}")
    if report.steps_ms:
        say("steps (ms): " + ", ".join(f"{name} {ms:.1f}" for name, ms in report.steps_ms.items()))
    if report.sinks:
        table(
            ["sink", "target", "follows", "rows", "bytes", "files", "committed", "outcome", "digest"],
            [
                (s.sink, s.target, s.follows_txid, s.rows, s.bytes, s.files, s.committed_at, s.outcome, s.digest[:16])
                for s in report.sinks
            ],
        )
    table(
        ["attempt", "epoch", "expected", "left out", "outcome", "error"],
        [(a.attempt, a.epoch, a.expected_messages, len(a.excluded), a.outcome, a.error) for a in report.attempts],
    )
    for row in report.failures:
        say(f"failed: {row.message} in {row.failure.component}: {row.failure.reason}: {row.failure.error[:200]}")
    for row in report.returned:
        say(f"returned, no failure counted: {row.message}: {row.failure.error[:200]}")
    if report.replayed:
        say(f"replayed: {', '.join(report.replayed)}")
    for event in report.events:
        say(" ".join(str(part) for part in (event.at, event.kind, event.sink, event.message, event.text) if part))


def show_message(topology: str, message: str, *, as_json: bool) -> None:
    """One message."""
    with opened() as stores:
        report = audit.message(stores.audit, topology, message)
    emit(report, as_json=as_json, text=lambda: _message_text(report))


def _message_text(report: MessageReport) -> None:
    say(f"message {report.message} of {report.topology}: {end_text(report.end)}")
    for opening in report.openings:
        retry = " (a retry)" if opening.retry else ""
        failed = ", failed there" if opening.failed else ", returned from there" if opening.returned else ""
        say(f"opened in txid {opening.txid}{retry}: {opening.state}{failed}")
    for failure in report.failures:
        say(f"failed in txid {failure.txid}, {failure.component}: {failure.reason}: {failure.error[:500]}")
    for returned in report.returned:
        say(f"returned from txid {returned.txid}, no failure counted: {returned.error[:500]}")
    for action in report.operator:
        hashes = (
            f"; payload {action.payload_sha256[:12]} replaced by {action.new_payload_sha256[:12]}"
            if action.payload_sha256 is not None and action.new_payload_sha256 is not None
            else ""
        )
        say(f"{action.action} by {action.by}: {action.why or 'no reason given'}{hashes}")
