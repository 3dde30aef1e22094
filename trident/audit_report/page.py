"""The record as one page of HTML: without a script, without anything from elsewhere, and for paper as well.

The page says nothing that the record does not: it is made from the record alone, and made again by whoever checks it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stormproof.trident.audit_report.inert import inert
from stormproof.trident.audit_report.style import STYLE

RENDERER: Final = 3
"""Number of the page's form; changed with every change of the page, so that a check knows whether it can make it again."""
RECORD_START: Final = '<pre id="stormproof-record">\n'
RECORD_END: Final = "\n</pre>\n"
UNSIGNED: Final = (
    "THIS REPORT IS NOT SIGNED. Nobody vouches for it: compare its SHA-256 with the one that its maker was shown."
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_VERDICTS: Final = {
    "clean": "Clean: all that was compared agrees",
    "not_compared": "Not all was compared: the rest agrees",
    "violation": "VIOLATION: something is wrong",
    "cannot_tell": "Cannot tell: not all of it was compared, or some of the evidence is gone",
}


def page(record: Mapping[str, Any]) -> str:
    """The page up to the seal."""
    return "".join(_parts(record))


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    scope = record["scope"]
    title = f"Audit report: {inert(str(scope['topology']))}"
    signed_by = record["signed_by"]
    yield f"<!doctype html>\n<!-- stormproof audit report, {'not signed' if signed_by is None else 'signed'} -->\n"
    yield '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="referrer" content="no-referrer">\n'
    yield f"<title>Audit report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
    if signed_by is None:
        yield f'<p class="unsigned">{UNSIGNED}</p>\n'
    else:
        yield (
            f'<p class="signed">Signed with the key {inert(str(signed_by))}. Whether that holds, and whose key it is, '
            "this page cannot say: check it with <code>stormproof audit report --check FILE --public-key KEY</code>.</p>\n"
        )
    yield f"<h1>{title}</h1>\n"
    yield from _summary(record)
    yield from _verdict(record["verdict"])
    yield "<h2>Not looked at</h2>\n<ul>\n"
    yield from (f"<li>{inert(str(one), 2_000)}</li>\n" for one in record["not_looked_at"])
    yield "</ul>\n<h2>The topology</h2>\n"
    yield _pairs(record["topology"])
    yield "<h3>Sinks</h3>\n" + _table(record["sinks"])
    yield "<h3>Shapes of its graph</h3>\n" + _table(record["graphs"])
    yield "<h3>Runs of its driver</h3>\n" + _table(record["driver_lives"])
    yield "<h3>Take-overs, recoveries, refused starts</h3>\n" + _table(record["driver_events"])
    for one in record["questions"]:
        yield from _question(one)
    digest = record["digest"]
    yield "<h2>One digest of all batches</h2>\n"
    yield f"<p><code>{inert(str(digest['sha256']))}</code>, over {digest['lines']} lines. {inert(str(digest['of']))}.</p>\n"
    yield '<section class="machine">\n<h2>The record</h2>\n'
    yield "<p>All of the above is made from this; it is what the signature is of, with the page itself.</p>\n"
    text = json.dumps(record, indent=1, ensure_ascii=True)
    yield f"{RECORD_START}{html.escape(text, quote=False)}{RECORD_END}</section>\n<h2>Seal</h2>\n"


def _summary(record: Mapping[str, Any]) -> Iterator[str]:
    scope = record["scope"]
    since, until = scope["since"] or "its first batch", scope["until"] or "the instant of the report"
    yield _pairs(
        {
            "Of": f"topology {scope['topology']}, incarnation {scope['incarnation']}",
            "From": since,
            "To": until,
            "Made": f"{record['made_at']} by {record['made_by']}, with Stormproof {record['stormproof']}",
            "Batches": f"{_grouped(scope['batches'])} (txid {scope['first']} to {scope['last']})"
            if scope["batches"]
            else "none",
            "Messages opened": _grouped(scope["messages"]),
            "Failed": _grouped(scope["failed"]),
            "Returned with failed ones": _grouped(scope["returned"]),
            "Rejected by sinks": _grouped(scope["rejected"]),
            "Bytes of messages": _grouped(scope["bytes"]),
        }
    )


def _grouped(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


def _verdict(verdict: Mapping[str, Any]) -> Iterator[str]:
    word = str(verdict["verdict"])
    reach = "" if word in ("violation", "cannot_tell") else _reach(verdict)
    yield f'<h2>Verdict</h2>\n<p class="verdict {html.escape(word)}">{inert(_VERDICTS.get(word, word) + reach)}</p>\n'
    yield _pairs(
        {k: one for k, one in verdict.items() if k not in ("violations", "unknowns", "notices", "verdict", "tables")}
    )
    tables = verdict.get("tables")
    if isinstance(tables, list):
        yield "<h3>Tables whose rows were read</h3>\n" + _table(tables)
    for name in ("violations", "unknowns", "notices"):
        found = verdict.get(name)
        if isinstance(found, list):
            yield f"<h3>{name.capitalize()}: {len(found)}</h3>\n" + _table(found)


def _reach(verdict: Mapping[str, Any]) -> str:
    told = verdict.get("reach")
    return f" ({told})" if told else "" if verdict.get("deep") else " (records; no rows of tables)"


def _question(one: Mapping[str, Any]) -> Iterator[str]:
    yield f'<section>\n<h2><span class="number">{one["number"]}</span> {inert(str(one["question"]))}</h2>\n'
    of = f", of {one['of']}" if "of" in one else ""
    yield f'<p class="from"><code>{inert(str(one["command"]))}</code>, view <code>{inert(str(one["view"]))}</code>{of}</p>\n'
    for name in ("by_state", "by_sink", "by_step", "by_day", "entries"):
        if name in one:
            yield f"<h3>{name.replace('_', ' ').capitalize()}</h3>\n" + _table(one[name])
    for count in one.get("counts", ()):
        yield f"<h3>By {inert(', '.join(map(str, count['by'])))}</h3>\n" + _table(count["rows"])
    if "rows" in one:
        more = f"; {one['left_out']} more are left out" if one["left_out"] else ""
        said = str(one.get("rows_are", "rows, the newest first"))
        yield f"<h3>{len(one['rows'])} {inert(said)}{more}</h3>\n" + _table(one["rows"])
    if "payloads" in one:
        yield "<h3>Digests of payloads</h3>\n" + _table(one["payloads"])
    for history in one.get("histories", ()):
        yield f"<h3>Message {inert(str(history['message']))}</h3>\n"
        # The second is of reports before there was such a state: they are checked byte by byte.
        is_its_own = history["in_source"] or history["end"]["kind"] == "unproven"
        state = "Its state" if is_its_own else "State of the batch whose slice its id lies in"
        yield _pairs({state: history["end"], "In the source": history["in_source"]})
        for name in ("openings", "failures", "rejects", "decisions", "rows_in"):
            if history.get(name):
                yield f"<h4>{name.replace('_', ' ').capitalize()}</h4>\n" + _table(history[name])
    yield "</section>\n"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{inert(key.replace('_', ' '))}</th><td>{_cell(value)}</td></tr>\n"
        for key, value in values.items()
        if value is not None
    )
    return f'<table class="pairs">\n{rows}</table>\n'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under the names of those columns in which one of them has a value."""
    if not rows:
        return '<p class="none">None.</p>\n'
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(map(_has(name), rows))]
    head = "".join(f"<th>{inert(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td{_kind(row.get(name))}>{_cell(row.get(name))}</td>' for name in names)}</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'


def _has(name: str) -> Any:
    return lambda row: row.get(name) not in (None, "", [], {})


def _kind(value: object) -> str:
    return ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return str(value)
        case dict() if not value:
            return ""
        case dict():
            parts = "".join(f"<dt>{inert(str(key))}</dt><dd>{_cell(one)}</dd>" for key, one in value.items())
            return f"<dl>{parts}</dl>"
        case list():
            if all(isinstance(one, str | int | float) for one in value):
                return ", ".join(inert(str(one)) for one in value)
            return "".join(f"<div>{_cell(one)}</div>" for one in value)
        case _:
            return inert(str(value))
