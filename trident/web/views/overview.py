"""Every topology in a line: what runs, what waits, what is wrong."""

from __future__ import annotations

from starlette.responses import Response

from stormproof.trident.audit.status import StatusReport, status
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.visit import Visit


def _read(opened: Opened) -> StatusReport:
    return status(opened.audit)


async def overview(visit: Visit) -> Response:
    """The first page."""
    return visit.page("overview.html", title="Overview", report=await visit.ask(_read))
