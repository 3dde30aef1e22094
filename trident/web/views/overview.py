"""Every topology in a line: what runs, what waits, what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.overview import Health, backlogs
from stormproof.trident.audit.overview import overview as read
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.visit import Visit

BACKLOG_S = 15.0
"""What waits in the sources may be much to count: it is counted so often."""


def _backlogs(opened: Opened) -> dict[str, Backlog | None]:
    return backlogs(opened.audit)


def grade(one: Health) -> str:
    """How a topology stands, in a word: ``bad``, ``warn``, ``ok`` or ``idle``."""
    if one.problems or (one.verdict is not None and one.verdict.verdict == "violation"):
        return "bad"
    if one.dead_letters or one.rejects or one.asked is not None:
        return "warn"
    return "ok" if one.is_alive else "idle"


async def overview(visit: Visit) -> Response:
    """The first page; those with problems first."""
    waiting = await visit.site.reader.latest(_backlogs, key="backlogs", every_s=BACKLOG_S)

    def content(opened: Opened) -> tuple[int, Markup]:
        found = read(opened.audit)
        return len(found), visit.part("overview_content.html", **_shown(found, waiting or {}))

    number, shown = await visit.ask(content, visit.root)
    return visit.page("overview.html", title="Overview", number=number, content=shown)


def _shown(found: Sequence[Health], backlogs: Mapping[str, Backlog | None]) -> dict[str, Any]:
    order = ("bad", "warn", "ok", "idle")
    return {
        "topologies": sorted(found, key=lambda one: (order.index(grade(one)) if grade(one) == "bad" else 1, one.name)),
        "backlogs": backlogs,
        "grade": grade,
        "totals": Counter(grade(one) for one in found),
        "running": sum(one.is_alive for one in found),
        "sums": {
            "rate": sum(one.recent.messages_per_s for one in found if one.recent is not None and one.is_alive),
            "pending": sum(one.pending for one in found),
            "dead": sum(one.dead_letters for one in found),
            "rejects": sum(one.rejects for one in found),
        },
    }
