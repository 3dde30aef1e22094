"""Results as HTML tables, as notebooks show them (`_repr_html_`)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; everything in it is text, whatever it has of HTML. None is an empty cell."""
    head = "".join(f"<th>{html.escape(one)}</th>" for one in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        value = f"{value:,.3f}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return f"<td>{'' if value is None else html.escape(str(value))}</td>"
