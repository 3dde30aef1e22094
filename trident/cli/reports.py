"""`status` and `audit ...`: the reports as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from stormproof.core.base.clock import SystemClock
from stormproof.trident.audit.batches import TxnReport, txn
from stormproof.trident.audit.figures import ComponentsReport, components
from stormproof.trident.audit.inspect import Holding, committer_of, opener_for
from stormproof.trident.audit.message import EndState, MessageReport, Opening
from stormproof.trident.audit.message import message as message_report
from stormproof.trident.audit.status import DriverState, OperatorRequest, Pace, StatusReport, TopologyStatus, status
from stormproof.trident.cli.logs import recovery_text
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import Exit, cell_text, emit, finish, say, table
from stormproof.trident.terms.observers import Figures
from stormproof.trident.terms.wording import counted, parse_time


def show_status(topology: str | None, *, as_json: bool) -> None:
    """Show all topologies; or one in detail, with status 1 if something keeps it from going on."""
    with opened() as stores:
        committer = partial(committer_of, ledger_database=stores.database)
        report = status(stores.audit, topology, committer=committer, opener=opener_for(stores.database))
    if topology is None:
        emit(report, as_json=as_json, text=lambda: _status_text(report))
        return
    (found,) = report.topologies
    emit(report, as_json=as_json, text=lambda: _topology_text(found))
    finish(Exit.FAILED if found.problems else Exit.DONE)


def _status_text(report: StatusReport) -> None:
    if not report.topologies:
        say("no topology was run here yet")
        return
    table(
        ["topology", "driver", "epoch", "last txid", "ready", "pending", "waiting", "dead"],
        [
            (
                t.name,
                t.driver,
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
        _details(topology, f"{topology.name}: ")
    say(f"one in detail: stormproof status {report.topologies[0].name}")


def _topology_text(t: TopologyStatus) -> None:
    """One topology, its problems first."""
    for problem in t.problems:
        say(f"PROBLEM {problem.kind}: {problem.text}")
        if problem.command is not None:
            say(f"  once the cause is repaired: {problem.command}")
    say(f"{t.name}: {t.guarantee}, epoch {t.epoch}, last txid {t.last_txid or '-'}")
    doing = "" if t.doing in (None, "running") else f", {t.doing}"
    say(f"driver: {t.driver} since {cell_text(t.since)} ({t.driver_host}, process {t.driver_pid}){doing}")
    if t.backlog is None:
        say(f"source: {t.source}; what waits there cannot be told from here")
    else:
        b = t.backlog
        age = "" if b.oldest_ready_age_s is None else f", the oldest for {duration(b.oldest_ready_age_s)}"
        say(
            f"source: {t.source}: {counted(b.ready, 'message')} ready{age}; {b.pending} pending; {b.waiting} to be retried"
        )
    if t.backlog is not None and t.backlog.at_server != 0:
        left = "not known" if t.backlog.at_server is None else counted(t.backlog.at_server, "message")
        say(f"at the server, not received when messages were last opened: {left}")
    for note in t.notes:
        say(f"held up: {note}")
    if t.journal is not None:
        say(
            f"journal: {counted(t.journal.unresolved, 'message')} not resolved, of {t.journal.messages} that are known; "
            f"{counted(t.journal.owed, 'confirmation')} owed to the server; "
            f"{counted(t.journal.suppressed, 'delivery', 'deliveries')} of messages that were done already"
        )
    oldest = min((txn.since for txn in t.unresolved), default=None)
    if oldest is not None:
        say(f"oldest batch that has not ended: since {cell_text(oldest)}")
    _dead_text(t)
    if t.rejects:
        states = ", ".join(f"{number} {state}" for state, number in t.rejects.items())
        say(f"{counted(sum(t.rejects.values()), 'reject')} ({states}): stormproof dead-letters list {t.name}")
    _details(t, "")
    if not t.problems:
        say("nothing keeps it from going on")


def _dead_text(t: TopologyStatus) -> None:
    if t.dead_letters is None or t.backlog is None:
        return
    say(counted(t.backlog.dead, "dead letter"))
    for letters in t.dead_letters:
        say(f"  {letters.number} {letters.error_class} ({letters.reason})")
    if t.dead_letters:
        say(f"  see them: stormproof dead-letters list {t.name}")


def duration(seconds: float) -> str:
    """A time span in the largest unit that fits, as in 3 min."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _details(topology: TopologyStatus, of: str) -> None:
    if topology.asked is not None:
        say(_asked_text(topology, of, topology.asked))
    for sink in topology.sinks:
        by = "" if sink.committer is None else f"; committed by {sink.committer}"
        say(f"{of}sink {sink.sink} ({sink.target}) holds txid {sink.last_txid or '-'}{by}")
        if sink.superseded:
            say(f"{of}sink {sink.sink}: {counted(sink.superseded, 'row')} superseded by later ones of their keys")
        if sink.dropped:
            say(f"{of}sink {sink.sink}: {counted(sink.dropped, 'row')} dropped by the table's own triggers")
        for missing in sink.missing:
            say(f"{of}sink {sink.sink} does not have {missing}: it was not part of the topology then")
    if topology.tuning is not None:
        say(_tuning_text(of, topology.in_flight, topology.tuning))
    if topology.job is not None:
        say(f"{of}{topology.job}")
    if topology.pace is not None:
        say(_pace_text(of, topology.pace))
    if topology.recovered is not None:
        did = recovery_text(topology.recovered.did)
        before = topology.recovered.did.get("took_over_from")
        took_over = f"; took over from {before}" if before else ""
        say(f"{of}epoch {topology.recovered.epoch} recovered {cell_text(topology.recovered.at)}: {did}{took_over}")
    if topology.stream is not None:
        say(f"{of}streaming query {topology.stream.query} stands at batch {topology.stream.batch}")
        if topology.stream.missing is not None:
            say(f"{of}{topology.stream.missing}")
    if topology.jobs is not None:
        jobs = topology.jobs
        keys = "1 key" if jobs.count == 1 else f"{jobs.count} keys"
        say(f"{of}{keys} written; the last is {jobs.last!r}, txid {jobs.last_txid}")
    if topology.refused is not None:
        say(f"{of}epoch {topology.epoch} did not start: {topology.refused.reason}")
    if topology.pruned_upto:
        say(f"{of}pruned up to txid {topology.pruned_upto}")
    for one in topology.unresolved:
        reason = f": {one.reason}" if one.reason else ""
        since = cell_text(one.since)
        stopped = topology.driver in (DriverState.STOPPED, DriverState.DEAD) and one.state == "prepared"
        then = "; the topology's next start commits it" if stopped and not reason else ""
        say(f"{of}txid {one.txid} is {one.state} since {since}, {counted(one.messages, 'message')}{reason}{then}")
        for held in one.sinks:
            say(f"{of}txid {one.txid}: {holding_text(held)}")


def _asked_text(t: TopologyStatus, of: str, asked: OperatorRequest) -> str:
    why = f" ({asked.why})" if asked.why else ""
    text = f"{of}{asked.what}, asked for by {asked.by} {cell_text(asked.at)}{why}"
    if asked.heard_at is None and t.driver in (DriverState.RUNNING, DriverState.UNKNOWN):
        text += "; the driver has not heard it yet"
    return f"{text}; it goes on after: stormproof resume {t.name}" if asked.what == "pause" else text


def _tuning_text(of: str, in_flight: int, f: Figures) -> str:
    text = (
        f"{of}{in_flight} of at most {counted(f.in_flight, 'batch', 'batches')} in flight, each of at most "
        f"{counted(f.messages, 'message')} and {counted(f.bytes, 'byte')}"
    )
    if f.latency_target_s is None:
        return text
    text += f"; tuned to commit within {f.latency_target_s:g} s of the open, with at most {f.in_flight_max} in flight"
    if f.floor_s is not None:
        text += f", which is below reach: even small batches take {f.floor_s:.3g} s"
    return f"{text}; last step: {f.step}, since {f.why}" if f.step else text


def _pace_text(of: str, p: Pace) -> str:
    last = "last batch" if p.batches == 1 else f"last {p.batches} batches"
    return (
        f"{of}{last}: {p.messages:.0f} messages each, {p.messages_per_s:.0f} messages/s, "
        f"committed {p.latency_p50_ms:.0f} ms after open (nine in ten within {p.latency_p90_ms:.0f} ms): job "
        f"{p.steps_ms['job']:.0f} ms, wait for its turn {p.steps_ms['wait']:.0f} ms, commit {p.steps_ms['commit']:.0f} ms; "
        f"back-pressure {p.back_pressure:.0%}"
    )


def _with_server_id(message: str, server_ids: Mapping[str, str]) -> str:
    known = server_ids.get(message)
    return message if known is None else f"{message} (its server: {known})"


def end_text(end: EndState) -> str:
    """The state of a message, in words."""
    txid = "" if end.txid is None else f" in txid {end.txid}"
    since = "" if end.since is None else f" since {cell_text(end.since)}"
    by = f" by {end.by}" if end.by else ""
    return f"{end.kind.value.replace('_', ' ')}{txid}{since}{by}"


def show_txn(topology: str, txid: int, *, as_json: bool) -> None:
    """Show one batch."""
    with opened() as stores:
        report = txn(stores.audit, topology, txid, opener_for(stores.database))
    emit(report, as_json=as_json, text=lambda: _txn_text(report))


def _txn_text(report: TxnReport) -> None:
    reason = f": {report.reason}" if report.reason else ""
    say(f"txid {report.txid} of {report.topology}: {report.state}{reason} ({report.guarantee}, epoch {report.epoch})")
    returned = f", {len(report.returned)} returned with them" if report.returned else ""
    say(
        f"read {counted(report.messages, 'message')}{' that failed before' if report.retry else ''} "
        f"({counted(report.bytes, 'byte')}) from {report.source}; {report.failed} failed{returned}"
    )
    if "key" in report.position:
        say(f"its key is {report.position['key']!r}")
    opened_at, prepared_at, ended_at = map(cell_text, (report.opened_at, report.prepared_at, report.ended_at))
    say(f"opened {opened_at}, content fixed {prepared_at}, ended {ended_at}")
    if report.steps_ms:
        say("steps (ms): " + ", ".join(f"{name} {ms:.1f}" for name, ms in report.steps_ms.items()))
    if report.sinks:
        table(
            [
                *("sink", "target", "follows", "rows", "rejected", "bytes", "files"),
                *("has it", "since", "outcome", "version", "digest"),
            ],
            [
                (
                    *(s.sink, s.target, s.follows_txid, s.rows, s.rejected or None, s.bytes, s.files),
                    *(s.has.replace("_", " "), s.committed_at, s.outcome, s.version, s.digest[:16]),
                )
                for s in report.sinks
            ],
        )
    for sink in report.sinks:
        if sink.why is not None:
            say(f"sink {sink.sink} {sink.has.replace('_', ' ')}: {sink.why}")
    table(
        ["attempt", "epoch", "expected", "left out", "outcome", "error"],
        [(a.attempt, a.epoch, a.expected_messages, len(a.excluded), a.outcome, a.error) for a in report.attempts],
    )
    for row in report.failures:
        message = _with_server_id(row.message, report.server_ids)
        say(f"failed: {message} in {row.component}: {row.reason}: {row.error[:200]}")
    for row in report.returned:
        message = _with_server_id(row.message, report.server_ids)
        say(f"returned, no failure counted: {message}: {row.error[:200]}")
    if report.replayed:
        say(f"replayed: {', '.join(_with_server_id(one, report.server_ids) for one in report.replayed)}")
    for event in report.events:
        at = None if event.at is None else cell_text(event.at)
        say(" ".join(str(part) for part in (at, event.kind, event.sink, event.message, event.text) if part))


def show_message(topology: str, message: str, *, as_json: bool) -> None:
    """Show one message."""
    with opened() as stores:
        report = message_report(stores.audit, topology, message, opener=opener_for(stores.database))
    emit(report, as_json=as_json, text=lambda: _message_text(report))


def _message_text(report: MessageReport) -> None:
    if report.in_source:
        say(f"message {report.message} of {report.topology}: {end_text(report.end)}")
    else:
        say(
            f"message {report.message} of {report.topology}: unproven. Its id lies inside the slice that txid "
            f"{report.end.txid} read; the source does not have it, nor all messages of that slice: it was removed after it "
            "was read, or there was never such a message"
        )
    if report.server_id is not None:
        say(f"its server knows it as {cell_text(report.server_id)}")
    for opening in report.openings:
        say(opening_text(opening) if report.in_source else f"txid {opening.txid}: {opening.state}")
        for one in opening.skipped:
            say(
                f"  sink {one.sink} ({one.target}) does not hold it: the batch's {counted(one.rows, 'row')} there were "
                f"given up by {one.by}: {one.why or 'no reason given'}"
            )
        for held in opening.held:
            version = "" if held.version is None else f", version {held.version} of the table"
            since = "" if held.at is None else f" since {cell_text(held.at)}"
            say(f"  held by sink {held.sink} ({held.target}){since}{version}")
        for other in opening.not_held:
            say(f"  {holding_text(other)}")
    for failure in report.failures:
        say(f"failed in txid {failure.txid}, {failure.component}: {failure.reason}: {failure.error[:500]}")
    for returned in report.returned:
        say(f"returned from txid {returned.txid}, no failure counted: {returned.error[:500]}")
    for reject in report.rejects:
        say(
            f"rejected by sink {reject.sink} in txid {reject.txid}, {counted(reject.rows, 'row')}, {reject.state}: "
            f"{reject.reason}: {reject.error[:500]}"
        )
    for stored in report.stored_in:
        say(f"rows in {stored.sink} ({stored.target}): where {stored.column} = {report.message!r}")
    for action in report.operator:
        hashes = hashes_text(action.payload_sha256, action.new_payload_sha256)
        at = "" if action.sink is None else f" at sink {action.sink}"
        say(f"{action.action}{at} by {action.by}: {action.why or 'no reason given'}{hashes}")


def holding_text(one: Holding) -> str:
    """What a sink holds of a batch, in words."""
    since = "" if one.at is None else f" since {cell_text(one.at)}"
    without = f", without {counted(one.rejected, 'rejected row')}" if one.rejected else ""
    return f"sink {one.sink} {one.has.replace('_', ' ')}{since}{without}{'' if one.why is None else f': {one.why}'}"


def opening_text(opening: Opening) -> str:
    """One batch that opened a message, in words."""
    retry = " (a retry)" if opening.retry else ""
    how = ", failed there" if opening.failed else ", returned from there" if opening.returned else ""
    return f"opened in txid {opening.txid}{retry}: {opening.state}{how}"


def hashes_text(old: object, new: object) -> str:
    """That an edit replaced a payload, by the SHA-256 of both; empty if there was no edit."""
    return "" if old is None or new is None else f"; payload {str(old)[:12]} replaced by {str(new)[:12]}"


def show_components(topology: str, *, since: str | None, as_json: bool) -> None:
    """Show what each component did, and how many tuples went over each edge."""
    with opened() as stores:
        report = components(stores.audit, topology, parse_time(since, SystemClock().now()))
    emit(report, as_json=as_json, text=lambda: _components_text(report))


def _components_text(report: ComponentsReport) -> None:
    if report.components:
        table(
            ["component", "kind", "executed", "emitted", "acked", "failed", "busy ms", "ms a tuple"],
            [
                (
                    *(one.component, one.kind, one.executed, one.emitted, one.acked, one.failed),
                    *(f"{one.busy_ms:.0f}", None if one.latency_ms is None else f"{one.latency_ms:.3g}"),
                )
                for one in report.components
            ],
        )
        table(
            ["from", "stream", "to", "tuples", "a second"],
            [
                (
                    one.origin,
                    one.stream,
                    one.target,
                    one.tuples,
                    None if one.tuples_per_s is None else f"{one.tuples_per_s:.3g}",
                )
                for one in report.edges
            ],
        )
    where = "" if report.first_txid is None else f", txids {report.first_txid} to {report.last_txid}"
    views = "stormproof.audit_components and stormproof.audit_edges"
    say(f"{counted(report.batches, 'batch', 'batches')}{where}; batch by batch in SQL: {views}")
