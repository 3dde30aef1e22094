"""Text of strangers, such as messages' ids, names and operators' reasons, shown so that it does nothing in a page."""

from __future__ import annotations

import html
import unicodedata
from typing import Final

SHOWN_MAX: Final = 400
"""Characters of one text that a page shows."""
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that are not seen, or that move others: controls, directions, surrogates, separators."""


def inert(text: str, most: int = SHOWN_MAX) -> str:
    """The text as HTML: escaped, unseen characters as marks, directions isolated, and cut with its length said."""
    shown = "".join(_mark(character) for character in text[:most])
    cut = f" [cut: {len(text)} characters]" if len(text) > most else ""
    return f"<bdi>{html.escape(shown)}</bdi>{cut}" if shown else ""


def _mark(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN:
        return character
    return f"[U+{ord(character):04X}]"
