"""A route of the page: its address, its method, the role that it needs, and what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from starlette.responses import Response

from stormproof.trident.web.people import WebRole
from stormproof.trident.web.visit import Visit

Handler: TypeAlias = Callable[[Visit], Awaitable[Response]]
"""Answers a request that was let in: host, person, role and, of a POST, origin and token were checked."""


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of `ROUTES`. `role` None: for everybody, also without a session.

    A GET changes nothing. A POST needs the form's token, and an origin that is this page's.
    """

    name: str
    path: str
    handler: Handler
    role: WebRole | None = WebRole.READER
    method: Literal["GET", "POST"] = "GET"
