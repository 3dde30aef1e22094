"""`rejects list|show|retry|drop`: messages that a sink rejected, and an operator's decisions about them."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.trident.cli.canary import progress, show_canary
from stormproof.trident.cli.layout import cell_text
from stormproof.trident.cli.letters import AT_SERVER
from stormproof.trident.cli.output import Exit, confirmed, emit, finish, note, say, table, written
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions.canaries import retry_canary
from stormproof.trident.decisions.canary import CanaryRules
from stormproof.trident.decisions.letters import called_by_servers, named
from stormproof.trident.decisions.rejects import RejectFilter, decide, rejects_of, require_choice
from stormproof.trident.ledger.rows import Reject
from stormproof.trident.wording import counted, cut

SHOWN: Final = 50
"""How many rejects are shown if no limit is given."""

ROW_CHARACTERS: Final = 60
ERROR_CHARACTERS: Final = 120


# -- list --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RejectClass:
    """The rejects of one sink and SQLSTATE; `undecided` ones wait for an operator."""

    sink: str
    sqlstate: str | None
    undecided: int
    decided: int


def list_rejects(topology: str, chosen: RejectFilter, *, limit: int | None, as_json: bool) -> None:
    """List a topology's rejects, oldest first."""
    shown = limit if limit is not None or as_json else SHOWN
    with opened() as stores:
        found = rejects_of(stores, topology, chosen, texts=False)
        kept = rejects_of(stores, topology, chosen, limit=shown)
        at_server = called_by_servers(stores, topology, [one.message for one in kept if one.message is not None])
    classes = _classes(found)
    report = {
        "topology": topology,
        "total": len(found),
        "undecided": sum(one.is_undecided for one in found),
        "classes": classes,
        "rejects": [{**_listed(one), "server_id": at_server.get(one.message or "")} for one in kept],
    }
    emit(report, as_json=as_json, text=lambda: _list_text(topology, found, kept, classes, at_server))


def _classes(found: Sequence[Reject]) -> list[RejectClass]:
    waiting = Counter((one.sink, one.sqlstate) for one in found if one.is_undecided)
    decided = Counter((one.sink, one.sqlstate) for one in found if not one.is_undecided)
    keys = sorted(waiting.keys() | decided.keys(), key=lambda key: (-waiting[key], key[0], key[1] or ""))
    return [RejectClass(*key, waiting[key], decided[key]) for key in keys]


def _listed(one: Reject) -> dict[str, object]:
    return {
        "id": one.message,
        "sink": one.sink,
        "txid": one.txid,
        "sqlstate": one.sqlstate,
        "error": one.error,
        "row": one.row,
        "rows": one.rows,
        "at": one.at,
        "state": one.state,
        "by": one.by,
        "why": one.why,
        "decided_at": one.decided_at,
        "retried_in": one.retried_in,
    }


def _list_text(
    topology: str,
    found: Sequence[Reject],
    kept: Sequence[Reject],
    classes: Sequence[RejectClass],
    at_server: Mapping[str, str],
) -> None:
    if not found:
        say("no rejects")
        return
    table(
        ["id", *([AT_SERVER] if at_server else []), "sink", "txid", "sqlstate", "error", "row", "state"],
        [
            (
                one.message or "-",
                *([at_server.get(one.message or "")] if at_server else []),
                one.sink,
                one.txid,
                one.sqlstate or "-",
                cut(one.error, ERROR_CHARACTERS),
                cut(one.row, ROW_CHARACTERS),
                one.state.value,
            )
            for one in kept
        ],
    )
    say(f"{counted(len(found), 'reject')}, {sum(one.is_undecided for one in found)} undecided")
    table(
        ["sink", "sqlstate", "undecided", "decided"],
        [(c.sink, c.sqlstate or "-", c.undecided, c.decided) for c in classes],
    )
    if len(found) > len(kept):
        say(f"{len(kept)} of {counted(len(found), 'reject')} shown; --limit {len(found)} shows all of them")
    undecided = next((one for one in found if one.is_undecided and one.message is not None), None)
    if undecided is not None:
        say(f"look at one: stormproof rejects show {topology} {undecided.message}")


# -- show --------------------------------------------------------------------------------------------------------------


def show_reject(topology: str, message: str, *, as_json: bool) -> None:
    """Show all that is known of a rejected message.

    Raises:
        UsageError: no sink rejected it.
    """
    with opened() as stores:
        (message,) = named(stores, topology, [message])
        found = rejects_of(stores, topology, message=message, payloads=True)
        at_server = called_by_servers(stores, topology, [message]).get(message)
    if not found:
        raise UsageError(
            f"message {message} of topology {topology!r} is no reject. See: stormproof rejects list {topology}",
            topology=topology,
            message=message,
        )
    payload = next((one.payload for one in found if one.payload is not None), None)
    report: dict[str, object] = {
        "topology": topology,
        "id": message,
        "server_id": at_server,
        "text": None if payload is None else storable_text(shown_payload(payload)),
        "payload_base64": None if payload is None else base64.b64encode(editable(payload)).decode(),
        "rejects": [_listed(one) for one in found],
    }
    emit(report, as_json=as_json, text=lambda: _show_text(topology, message, at_server, payload, found))


def _show_text(
    topology: str, message: str, at_server: str | None, payload: bytes | None, found: Sequence[Reject]
) -> None:
    say(f"message {message} of {topology}")
    if at_server is not None:
        say(f"its server knows it as {cell_text(at_server)}")
    if payload is None:
        say("its source gave no payload")
    else:
        say(f"payload ({counted(len(editable(payload)), 'byte')}):")
        written(shown_payload(payload), indent="    ")
    for one in found:
        at = "" if one.at is None else f"{cell_text(one.at)} "
        state = "" if one.sqlstate is None else f", SQLSTATE {one.sqlstate}"
        say(f"{at}rejected by sink {one.sink} in txid {one.txid}{state}; {counted(one.rows, 'row')} left out:")
        written(one.error, indent="    ")
        written(f"row: {one.row}", indent="    ")
        if one.decided_at is not None:
            again = "" if one.retried_in is None else f", in txid {one.retried_in}"
            say(f"{cell_text(one.decided_at)} {one.state}{again} by {one.by}: {one.why or 'no reason given'}")
    if any(one.is_undecided for one in found):
        for verb in ("retry", "drop"):
            say(f"to {verb} it: stormproof rejects {verb} {topology} {message}")


# -- retry, drop -------------------------------------------------------------------------------------------------------


def decide_rejects(
    topology: str,
    ids: Sequence[str],
    chosen: RejectFilter,
    *,
    every: bool,
    yes: bool,
    retry: bool,
    by: str,
    why: str,
    as_json: bool,
    dry_run: bool = False,
    careful: CanaryRules | None = None,
) -> None:
    """Retry or drop rejects: those of the named messages, those that the filter admits, or all.

    With ids, a filter further restricts them (as to one sink). Ends with status 1 if one of the named messages has no such
    undecided reject, or cannot be retried.
    """
    require_choice(ids, chosen, every=every)
    with opened() as stores:
        ids = named(stores, topology, ids)
        found = [one for one in rejects_of(stores, topology, chosen, texts=False) if not ids or one.message in ids]
        if dry_run:
            _count(topology, ids, found, "retry" if retry else "drop", as_json=as_json)
            return
        if found and not ids and not yes:
            verb = "retry" if retry else "drop"
            confirmed(topology, verb, "reject", len(found), every=every, as_json=as_json)
        if careful is not None:
            show_canary(
                retry_canary(stores, topology, found, careful, by=by, why=why, told=progress()), as_json=as_json
            )
            return
        done = decide(stores, topology, found, retry=retry, by=by, why=why)
    missed = sorted(set(ids) - {one.message for one in found})
    report = {
        "topology": topology,
        "retried" if retry else "dropped": [
            {"id": one.message, "sink": one.sink, "txid": one.txid} for one in done.done
        ],
        "not_undecided": missed,
        "refused": done.refused,
        "by": by,
    }
    emit(report, as_json=as_json, text=lambda: say("\n".join(done.lines())))
    for message, reason in done.refused.items():
        note(f"stormproof: {message}: {reason}")
    if missed:
        note(f"stormproof: no undecided rejects: {', '.join(missed[:10])}")
    if missed or done.refused:
        finish(Exit.FAILED)


def _count(topology: str, ids: Sequence[str], found: Sequence[Reject], verb: str, *, as_json: bool) -> None:
    """Say which rejects would be decided about; do nothing."""
    missed = sorted(set(ids) - {one.message for one in found})
    report = {
        "topology": topology,
        f"would_{verb}": [{"id": one.message, "sink": one.sink, "txid": one.txid} for one in found],
        "classes": _classes(found),
        "not_undecided": missed,
    }

    def text() -> None:
        table(
            ["sink", "sqlstate", "undecided", "decided"],
            [(c.sink, c.sqlstate or "-", c.undecided, c.decided) for c in _classes(found)],
        )
        say(f"{topology}: would {verb} {counted(len(found), 'reject')}; nothing was done")

    emit(report, as_json=as_json, text=text)
    if missed:
        note(f"stormproof: no undecided rejects: {', '.join(missed[:10])}")
        finish(Exit.FAILED)
