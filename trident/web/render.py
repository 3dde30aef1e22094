"""What a browser gets: templates, which escape all that they print, and show it without hidden characters; the page's files.

A file has an address with its content's hash, so that a cache may keep it.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape
from starlette.responses import Response

from stormproof.trident.terms.wording import counted

SHOWN_MAX: Final = 2_000
"""Characters of a text that a page shows unless a template asks for more."""

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ud800-\udfff]"
)
"""Characters that show nothing, or change how their neighbours are shown; tab and newline are kept."""
_MARKS_MAX: Final = 2


def visible(text: str, limit: int = SHOWN_MAX) -> str:
    """The text with each hidden character as its number, ``⟨U+202E⟩``, cut to `limit` characters with its length said.

    Of marks that are piled on one letter, two are kept. Guarantee: the result has no character that hides, reorders or
    overlaps another, whatever the text is.
    """
    shown = _without_piles(text[:limit]) if not text.isascii() else text[:limit]
    shown = _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", shown)
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters in all)"


def one_line(text: str, limit: int = 160) -> str:
    """The same for a cell: in one line, and shorter."""
    line = " ".join(text[: limit * 4].split())
    if len(text) <= limit * 4 and len(line) <= limit:
        return visible(line, limit)
    return f"{visible(line[:limit], limit)}… ({len(text):,} characters in all)"


def _without_piles(text: str) -> str:
    kept, marks = list[str](), 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) or unicodedata.category(character) == "Me" else 0
        if marks <= _MARKS_MAX:
            kept.append(character)
    return "".join(kept)


PACKAGE: Final = "stormproof.trident.web"
UNKNOWN: Final = "\u2013"


def printed(value: object) -> object:
    """What a template prints of a value: a time in UTC, no control characters, at most `text.SHOWN_MAX` of them."""
    match value:
        case Markup():
            return value
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value)
        case float():
            return number(value)
        case datetime():
            return clock_time(value)
        case _:
            return visible(str(value))


def number(value: float) -> str:
    """A figure with three digits that count."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def count(value: int | None) -> str:
    """A number of things, with separators; a dash where it is not known."""
    return UNKNOWN if value is None else f"{value:,}"


def short(value: int | None) -> str:
    """A number of things where there is little room: from a million on to three digits."""
    if value is None or value < 1_000_000:
        return count(value)
    return f"{value / 1e6:.3g} M" if value < 999_500_000 else f"{value / 1e9:,.3g} G"


def rate(value: float | None) -> str:
    """A number of things a second."""
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(value: float | None) -> str:
    """A span that is given in milliseconds."""
    return duration(None if value is None else value / 1000)


def clock_time(at: datetime) -> str:
    """A time of day with its date, in UTC, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """A span, in its two largest units."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return "0 s"
    if 0 < seconds < 0.001:
        us = seconds * 1_000_000
        return f"{us:.0f} µs" if us >= 10 else f"{us:.2g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    parts, left = list[str](), int(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= size and len(parts) < 2:
            parts.append(f"{left // size} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts)


def size(value: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def exact(value: object) -> Markup:
    """A text as it is, escaped for HTML alone: for the value of a form's field. Nothing else prints others' texts so."""
    return escape(str(value))


def as_data(value: object) -> Markup:
    """A value as JSON, for an attribute that a script reads."""
    return escape(json.dumps(value, default=str))


def line(value: object, limit: int = 160) -> str:
    """A text in one line, for a cell."""
    return "" if value is None else one_line(str(value), limit)


def long(value: object, limit: int = 20_000) -> Markup:
    """A text with its line breaks, up to a limit of its own."""
    return escape("" if value is None else visible(str(value), limit))


@cache
def environment() -> jinja2.Environment:
    """The page's templates. An unknown name in one is an error; printing goes through `printed`, then the escaping."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(PACKAGE),
        autoescape=True,
        finalize=printed,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = made.filters
    filters |= {"exact": exact, "as_data": as_data, "line": line, "long": long, "counted": counted}
    filters |= {"duration": duration, "size": size, "n": count, "ms": milliseconds, "rate": rate, "short": short}
    return made


def rendered(template: str, values: dict[str, Any]) -> str:
    """A template's text. No lone surrogate can be in it: `visible` marks them."""
    return environment().get_template(template).render(values)


# ---- the page's files

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
