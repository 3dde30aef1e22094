"""One topology: driver, pace, back-pressure, tuning, sources, sinks, and its graph."""

from __future__ import annotations

from starlette.responses import Response

from stormproof.trident.audit.figures import GraphFigures, figures
from stormproof.trident.audit.inspect import committer_of, opener_for
from stormproof.trident.audit.questions import Answer, Asked, ask
from stormproof.trident.audit.status import TopologyStatus, status
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.views.graph import Drawing, drawing
from stormproof.trident.web.visit import Visit

SLOW_S = 5.0
STEPS = ("open", "job", "wait", "prepare", "commit", "held_up")


def _status(opened: Opened, name: str) -> TopologyStatus:
    def committer(binding: object) -> str | None:
        return committer_of(binding, opened.database)  # type: ignore[arg-type]

    return status(opened.audit, name, committer=committer, opener=opener_for(opened.database)).topologies[0]


def _figures(opened: Opened, name: str) -> tuple[GraphFigures, Drawing]:
    found = figures(opened.audit, name)
    return found, drawing(found)


def _asked(opened: Opened, question: str, name: str) -> Answer:
    return ask(opened.audit, QUESTIONS[question], Asked(topology=name, limit=5))


async def topology(visit: Visit) -> Response:
    """The page of one topology."""
    name = visit.required("topology")
    found = await visit.ask(lambda opened: _status(opened, name), "status", name, for_s=2.0)
    drawn = await visit.ask(lambda opened: _figures(opened, name), "figures", name, for_s=SLOW_S)
    verdicts = await visit.ask(lambda opened: _asked(opened, "verdicts", name), "verdicts", name)
    actions = await visit.ask(lambda opened: _asked(opened, "actions", name), "actions", name)
    return visit.page(
        "topology.html",
        title=name,
        topology_name=name,
        one=found,
        figures=drawn[0],
        drawing=drawn[1],
        verdicts=verdicts.rows,
        actions=actions.rows,
        steps=STEPS,
    )
