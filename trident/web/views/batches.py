"""The list of batches: filters in the address, pages."""

from __future__ import annotations

from starlette.responses import Response

from stormproof.trident.audit.batches import BatchFilter, BatchPage
from stormproof.trident.audit.batches import batches as read
from stormproof.trident.transaction_states import TxnCause, TxnState
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.visit import Visit
from stormproof.trident.wording import parse_time

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

    def question(opened: Opened) -> BatchPage:
        return read(opened.audit, chosen, after=after)

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
