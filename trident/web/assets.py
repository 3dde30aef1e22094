"""The page's scripts and styles: read once, each under an address with its content's hash, so that a cache may keep it."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

from starlette.responses import Response

ASSETS: Final = "/assets/"
TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@cache
def asset(name: str) -> bytes:
    """A file's content."""
    return files("stormproof.trident.web").joinpath("assets", name).read_bytes()


@cache
def address(name: str) -> str:
    """The end of a file's address: its hash, then its name."""
    return f"{hashlib.sha256(asset(name)).hexdigest()[:16]}/{name}"


@cache
def served() -> dict[str, str]:
    """The files that a browser may have, by the ends of their addresses."""
    folder = files("stormproof.trident.web").joinpath("assets")
    names = [one.name for one in folder.iterdir() if one.name.endswith(tuple(TYPES))]
    return {address(name): name for name in names}


def answer(end: str) -> Response:
    """A file by the end of its address; a browser keeps it, for another content has another address."""
    name = served().get(end)
    if name is None:
        return Response("There is no such file.\n", 404, media_type="text/plain")
    kind = TYPES[name[name.rindex(".") :]]
    return Response(asset(name), media_type=kind, headers={"cache-control": "public, max-age=31536000, immutable"})
