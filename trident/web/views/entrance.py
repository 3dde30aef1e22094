"""Begins a session with a one-time token, and ends it."""

from __future__ import annotations

from starlette.responses import Response

from stormproof.trident.web.visit import Refused, Visit


async def enter(visit: Visit) -> Response:
    """Exchange a token for a session's cookie. The page then goes on by itself: a redirect would not have the cookie yet."""
    if visit.request.method != "GET":
        raise Refused(400, "A token is used by GET.")
    token = visit.query.get("token", "")
    secret = visit.site.sessions.begin(token) if token and visit.site.options.identify is None else None
    if secret is None:
        raise Refused(
            401,
            "This address was used, or is none of this page's. `stormproof web` printed another one when it was used.",
        )
    answer = visit.page("entered.html")
    answer.set_cookie(
        visit.site.cookie_name(visit.request),
        secret,
        max_age=int(visit.site.sessions.session_s),
        path=visit.request.scope.get("root_path") or "/",
        secure=visit.request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


async def leave(visit: Visit) -> Response:
    """End the session."""
    secret = visit.request.scope["state"].get("session")
    if secret is not None:
        visit.site.sessions.end(secret)
    answer = visit.page("left.html")
    answer.delete_cookie(visit.site.cookie_name(visit.request), path=visit.request.scope.get("root_path") or "/")
    return answer
