"""What became of a message; and where a message, or a txid, is found."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.dead_letter import error_class
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.message import MessageReport
from stormproof.trident.audit.message import message as read
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.web.visit import Visit

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
        return read(stores.audit, name, shown_id, opener=opener_for(stores.database))

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
            report = read(stores.audit, row.name, sought)
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
