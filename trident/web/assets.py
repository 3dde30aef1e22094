"""The page's scripts and styles: read once, each under an address with its content's hash, so that a cache may keep it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from starlette.responses import Response

ASSETS: Final = "/assets/"
TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Vendored:
    """A file of somebody else's, as the package of that version has it."""

    file: str
    package: str
    version: str
    path: str
    """Inside of the package."""
    sha256: str
    licence: str


VENDORED: Final = (
    Vendored(
        "htmx.min.js",
        "htmx.org",
        "2.0.11",
        "dist/htmx.min.js",
        "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
        "0BSD",
    ),
    Vendored(
        "htmx.LICENSE",
        "htmx.org",
        "2.0.11",
        "LICENSE",
        "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
        "0BSD",
    ),
    Vendored(
        "uplot.min.js",
        "uplot",
        "1.6.32",
        "dist/uPlot.iife.min.js",
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "MIT",
    ),
    Vendored(
        "uplot.min.css",
        "uplot",
        "1.6.32",
        "dist/uPlot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "MIT",
    ),
    Vendored(
        "uplot.LICENSE",
        "uplot",
        "1.6.32",
        "LICENSE",
        "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "MIT",
    ),
)


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
