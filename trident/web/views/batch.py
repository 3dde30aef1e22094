"""The list of batches; one batch as a timeline, down to each sink's evidence; what became of one of its messages.

`find` looks for a message, or for a txid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from starlette.responses import Response

from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.contract.dead_letter import error_class
from stormproof.trident.audit.batches import BatchFilter, BatchPage, TxnReport, txn
from stormproof.trident.audit.batches import batches as read
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.message import MessageReport
from stormproof.trident.audit.message import message as read_message
from stormproof.trident.decisions import skips
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.terms.transaction_states import TxnCause, TxnState
from stormproof.trident.terms.wording import counted, parse_time
from stormproof.trident.web.visit import Visit

MESSAGES_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Moment:
    """An entry of a batch's timeline; `grade` is a state's: ok, warn, bad, run, or none."""

    at: datetime | None
    what: str
    detail: str
    grade: str = ""
    took_ms: float | None = None


_ENDS = {
    "committed": (
        "committed",
        "ok",
        "Every sink holds it but for what it rejected, or was given up there; it is confirmed.",
    ),
    "aborted": ("aborted", "warn", "Its messages went back."),
    "abandoned": ("abandoned", "bad", "It was in flight when its driver ended; under at-most-once nothing goes back."),
}
_OUTCOMES = {"complete": "ok", "running": "run", "moot": "warn"}


WHY_HIDDEN: Final = "operators see why, since it may quote a row"


def timeline(found: TxnReport) -> list[Moment]:
    """What happened to a batch, in order."""
    steps = found.steps_ms
    opened = f"{counted(found.messages, 'message')} of {found.source}" + (
        ", which failed before" if found.retry else ""
    )
    moments = [Moment(found.opened_at, "opened", opened, "ok", steps.get("open"))]
    for one in found.attempts:
        excluded = f", without {len(one.excluded)} that had failed" if one.excluded else ""
        detail = f"attempt {one.attempt} in epoch {one.epoch}: {one.outcome.replace('_', ' ')}{excluded}"
        detail += f"; {error_class('error', one.error)}" if one.error else ""
        took = steps.get("job") if len(found.attempts) == 1 else None
        moments.append(Moment(one.started_at, "job", detail, _OUTCOMES.get(one.outcome, "bad"), took))
    if found.prepared_at is not None:
        detail = "content fixed and durable: from here it is only rolled forward"
        moments.append(Moment(found.prepared_at, "prepared", detail, "ok", steps.get("prepare")))
    for sink in found.sinks:
        if sink.committed_at is not None:
            after = "as the first" if sink.follows_txid is None else f"after txid {sink.follows_txid}"
            detail = f"{sink.sink}: {(sink.outcome or 'held').replace('_', ' ')}, {counted(sink.rows, 'row')}, {after}"
            detail += f"; {counted(sink.rejected, 'row')} of them rejected" if sink.rejected else ""
            grade = "warn" if sink.outcome == "skipped" else "ok"
            since = found.prepared_at or found.opened_at
            took = (sink.committed_at - since) / timedelta(milliseconds=1)
            moments.append(Moment(sink.committed_at, "sink holds it", detail, grade, max(took, 0.0)))
    for event in found.events:
        if event.kind in ("dead_letter", "reject"):
            continue  # counted below, message by message
        what = f"operator: {event.action}" if event.kind == "operator" else event.kind.replace("_", " ")
        detail = " · ".join(part for part in (event.sink, event.message, event.text) if part)
        moments.append(Moment(event.at, what, detail, "bad" if event.kind == "blocked" else "warn"))
    if found.ended_at is not None and found.state in _ENDS:
        what, grade, detail = _ENDS[found.state]
        moments.append(Moment(found.ended_at, what, found.reason or detail, grade))
    # The first attempt is written down together with the open, and may seem to be before it.
    moments.sort(key=lambda one: found.opened_at if one.at is None else max(one.at, found.opened_at))
    if found.state == "blocked":
        moments.append(Moment(None, "blocked", found.reason or "", "bad"))
    elif found.ended_at is None:
        moments.append(Moment(None, "in flight", f"it is {found.state}", "run"))
    return moments


def _refusing(stores: Stores, found: TxnReport) -> tuple[str | None, bool]:
    """The sink at which a batch is blocked; and whether its table can be given the rows that it takes."""
    at = [event.sink for event in found.events if event.kind == "blocked" and event.sink is not None]
    if found.state != "blocked" or not at:
        return None, False
    try:
        skips.row_skipper(stores, stores.topology(found.topology), found.txid, at[-1])
    except StormproofError:
        return at[-1], False
    return at[-1], True


async def batch(visit: Visit) -> Response:
    """The page of one batch."""
    name, txid = visit.required("topology"), visit.number("txid", 0, low=1)

    def question(stores: Stores) -> tuple[TxnReport, str | None, bool]:
        report = txn(stores.audit, name, txid, opener_for(stores.database))
        return report, *_refusing(stores, report)

    found, refusing, takes_rows = await visit.ask(question, name, txid)
    if not visit.is_operator:
        events = tuple(one if one.kind == "operator" else replace(one, text="") for one in found.events)
        found = replace(found, reason=found.reason and WHY_HIDDEN, events=events)
    rejected = [event for event in found.events if event.kind == "reject"]
    return visit.page(
        "batch.html",
        title=f"{name} · txid {txid}",
        topology_name=name,
        one=found,
        refusing=refusing,
        takes_rows=takes_rows,
        moments=timeline(found),
        steps={key: value for key, value in found.steps_ms.items() if "." not in key},
        classes=Counter((error_class(f.reason, f.error), f.component) for f in found.failures),
        rejected=rejected[:MESSAGES_SHOWN],
        shown=MESSAGES_SHOWN,
        error_class=error_class,
    )


KINDS = {
    "new": "of new messages",
    "retry": "of messages that failed before",
    "failed": "in which messages failed",
    "again": "whose job was begun more than once",
    "rejected": "of which a sink rejected messages",
}


async def batches(visit: Visit) -> Response:
    """A page of batches."""
    chosen = BatchFilter(
        topology=visit.text("topology"),
        state=visit.text("state"),
        cause=visit.text("cause"),
        kind=visit.text("kind"),
        since=parse_time(visit.text("since"), visit.now),
        until=parse_time(visit.text("until"), visit.now),
    )
    after = visit.text("after")

    def question(stores: Stores) -> BatchPage:
        return read(stores.audit, chosen, after=after)

    return visit.page(
        "batches.html",
        title="Batches",
        topology_name=chosen.topology,
        chosen=chosen,
        found=await visit.ask(question, *sorted(visit.values().items())),
        after=after,
        states=[state.value for state in TxnState],
        causes=[cause.value for cause in TxnCause],
        kinds=KINDS,
    )


TOPOLOGIES_MAX = 100
SAID = {
    "committed": "It was committed: every sink of that batch holds it, or rejected it by name.",
    "pending": "It is in a batch that has not ended.",
    "waiting": "It failed or was returned, and will be opened again.",
    "dead_letter": "It failed too often, and nobody has decided about it.",
    "rejected": "A sink's table refuses a row of it; other sinks may hold it. Nobody has decided about it.",
    "dropped": "An operator gave it up.",
    "skipped": "Its batch was committed, but for a sink at which an operator gave up the batch's rows.",
    "unproven": (
        "Unproven: its id lies inside the slice that the batch read, and the source does not have it. It was removed after "
        "it was read, or there was never such a message."
    ),
    "lost": "It was confirmed and then lost, which at-most-once allows.",
    "not_opened": "It waits in its source, and was never opened.",
    "unknown": "The records do not say; an audit verify names it.",
}
GRADES = {
    "committed": "ok",
    "pending": "run",
    "waiting": "run",
    "not_opened": "",
    "dropped": "warn",
    "skipped": "warn",
    "unproven": "warn",
}


async def message(visit: Visit) -> Response:
    """The page of one message."""
    name, shown_id = visit.required("topology"), visit.required("id")

    def question(stores: Stores) -> MessageReport:
        return read_message(stores.audit, name, shown_id, opener=opener_for(stores.database))

    found = await visit.ask(question, name, shown_id)
    return visit.page(
        "message.html",
        title=f"Message {shown_id}",
        topology_name=name,
        one=found,
        said=SAID[found.end.kind.value],
        grade=GRADES.get(found.end.kind.value, "bad"),
        error_class=error_class,
    )


@dataclass(frozen=True, slots=True)
class Hit:
    """Where what was looked for is."""

    topology: str
    txid: int | None
    message: str | None
    state: str


def _find(stores: Stores, sought: str, topology: str | None) -> list[Hit]:
    hits: list[Hit] = []
    with stores.audit.snapshot() as snapshot:
        rows = [snapshot.topology(topology)] if topology is not None else list(snapshot.topologies()[:TOPOLOGIES_MAX])
        number = int(sought) if sought.isascii() and sought.isdigit() and len(sought) < 19 else None
        if number is not None:
            hits += [
                Hit(row.name, one.txid, None, one.state.value)
                for row in rows
                for one in snapshot.some_txns(row.incarnation, [number])
            ]
    for row in rows:
        try:
            report = read_message(stores.audit, row.name, sought)
        except UsageError:
            continue  # no message of this topology
        hits.append(Hit(row.name, None, report.message, report.end.kind.value))
    return hits


async def find(visit: Visit) -> Response:
    """Look for a message's id or a txid, in one topology or in all; one hit is shown at once."""
    sought, topology = visit.text("q") or "", visit.text("topology")

    def question(stores: Stores) -> list[Hit]:
        return _find(stores, sought, topology)

    hits = await visit.ask(question, sought, topology) if sought else []
    if len(hits) == 1:
        (hit,) = hits
        if hit.txid is not None:
            return visit.redirect("batch", topology=hit.topology, txid=hit.txid)
        return visit.redirect("message", topology=hit.topology, id=hit.message)
    return visit.page("find.html", title="Find", topology_name=topology, sought=sought, hits=hits)
