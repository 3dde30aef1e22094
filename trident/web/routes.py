"""`ROUTES`: every address of the page with the role that it needs. A test tries each of them with each role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stormproof.trident.web.decide import pages
from stormproof.trident.web.people import WebRole
from stormproof.trident.web.route import Route
from stormproof.trident.web.views import (
    batch,
    batches,
    entrance,
    failures,
    message,
    overview,
    questions,
    replays,
    topology,
)

VIEWS: Final = (
    Route("overview", "/", overview.overview),
    Route("topology", "/topology", topology.topology),
    Route("batches", "/batches", batches.batches),
    Route("batch", "/batch", batch.batch),
    Route("find", "/find", message.find),
    Route("message", "/message", message.message),
    Route("failures", "/failures", failures.failures),
    Route("failure", "/failure", failures.failure),
    Route("payload", "/failure/payload", failures.payload, role=WebRole.OPERATOR, method="POST"),
    Route("replays", "/replays", replays.replays),
    Route("questions", "/questions", questions.questions),
    Route("question", "/question", questions.question),
)
ENTRANCE: Final = (
    Route("enter", "/enter", entrance.enter, role=None),
    Route("leave", "/leave", entrance.leave, method="POST"),
)
ROUTES: Final[tuple[Route, ...]] = (*VIEWS, *pages.ROUTES, *ENTRANCE)
"""An address is in it once. Whoever adds a view or an action adds a line to one of the tuples."""


@dataclass(frozen=True, slots=True)
class Tab:
    """A view in the page's head, and the routes that belong to it."""

    label: str
    route: str
    covers: frozenset[str]


NAVIGATION: Final = (
    Tab("Overview", "overview", frozenset({"overview", "topology"})),
    Tab("Batches", "batches", frozenset({"batches", "batch"})),
    Tab("Failures", "failures", frozenset({"failures", "failure", "payload"})),
    Tab("Replays", "replays", frozenset({"replays"})),
    Tab("Questions", "questions", frozenset({"questions", "question"})),
)
