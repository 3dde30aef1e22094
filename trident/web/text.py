"""Text that others wrote, made safe to look at: control and bidirectional characters as visible marks, long texts cut.

Escaping for HTML is Jinja's, which is on in every template; this comes before it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

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
