"""`rejects list|show|retry|drop`: messages that a sink rejected, and an operator's decisions about them."""

from __future__ import annotations

import base64
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import Json, UsageError
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import storable_text
from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.trident.cli.layout import cell_text, counted
from stormproof.trident.cli.letter_filter import moment
from stormproof.trident.cli.letters import cut, letters_of
from stormproof.trident.cli.output import Exit, emit, finish, note, say, table, written
from stormproof.trident.cli.stores import Stores, opened
from stormproof.trident.ledger import events, rejects
from stormproof.trident.ledger.rows import Reject
from stormproof.trident.transaction_states import OperatorAction, RejectState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow
    from stormproof.trident.ledger.tx import Tx

SHOWN: Final = 50
"""How many rejects are shown if no limit is given."""

ROW_CHARACTERS: Final = 60
ERROR_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True)
class RejectFilter:
    """Each field that is not None must hold; `sqlstate` is a whole one, or the two characters of a class."""

    sink: str | None = None
    sqlstate: str | None = None
    first: int | None = None
    last: int | None = None
    since: datetime | None = None
    undecided: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether every undecided reject passes."""
        return (self.sink, self.sqlstate, self.first, self.last, self.since) == (None,) * 5

    def admits(self, one: Reject) -> bool:
        """Whether a reject passes."""
        return (
            (self.sink is None or self.sink == one.sink)
            and (self.sqlstate is None or self.sqlstate in (one.sqlstate, one.sqlstate_class))
            and (self.first is None or one.txid >= self.first)
            and (self.last is None or one.txid <= self.last)
            and (self.since is None or (one.at is not None and one.at >= self.since))
            and (not self.undecided or one.is_undecided)
        )


def filter_of(
    sink: str | None, sqlstate: str | None, first: int | None, last: int | None, since: str | None, *, undecided: bool
) -> RejectFilter:
    """The filter that a command's options name.

    Raises:
        UsageError: a time cannot be read, or an SQLSTATE has neither two nor five characters.
    """
    if sqlstate is not None and len(sqlstate) not in (2, 5):
        raise UsageError(f"--sqlstate {sqlstate}: write one of five characters, as in 23505, or a class, as in 23")
    at = None if since is None else moment("since", since)
    return RejectFilter(sink, sqlstate, first, last, at, undecided)


def _found(stores: Stores, topology: str, *, message: str | None = None, payloads: bool = False) -> list[Reject]:
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        return snapshot.rejects(row.incarnation, message=message, payloads=payloads)


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
    with opened() as stores:
        found = [one for one in _found(stores, topology) if chosen.admits(one)]
    classes = _classes(found)
    kept = found if limit is None else found[:limit]
    report = {
        "topology": topology,
        "total": len(found),
        "undecided": sum(one.is_undecided for one in found),
        "classes": classes,
        "rejects": [_listed(one) for one in kept],
    }
    emit(report, as_json=as_json, text=lambda: _list_text(topology, found, classes, SHOWN if limit is None else limit))


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


def _list_text(topology: str, found: Sequence[Reject], classes: Sequence[RejectClass], limit: int) -> None:
    if not found:
        say("no rejects")
        return
    table(
        ["id", "sink", "txid", "sqlstate", "error", "row", "state"],
        [
            (
                one.message or "-",
                one.sink,
                one.txid,
                one.sqlstate or "-",
                cut(one.error, ERROR_CHARACTERS),
                cut(one.row, ROW_CHARACTERS),
                one.state.value,
            )
            for one in found[:limit]
        ],
    )
    say(f"{counted(len(found), 'reject')}, {sum(one.is_undecided for one in found)} undecided")
    table(
        ["sink", "sqlstate", "undecided", "decided"],
        [(c.sink, c.sqlstate or "-", c.undecided, c.decided) for c in classes],
    )
    if len(found) > limit:
        say(f"{limit} of {counted(len(found), 'reject')} shown; --limit {len(found)} shows all of them")
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
        found = _found(stores, topology, message=message, payloads=True)
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
        "text": None if payload is None else storable_text(shown_payload(payload)),
        "payload_base64": None if payload is None else base64.b64encode(editable(payload)).decode(),
        "rejects": [_listed(one) for one in found],
    }
    emit(report, as_json=as_json, text=lambda: _show_text(topology, message, payload, found))


def _show_text(topology: str, message: str, payload: bytes | None, found: Sequence[Reject]) -> None:
    say(f"message {message} of {topology}")
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
) -> None:
    """Retry or drop rejects: those of the named messages, those that the filter admits, or all.

    With ids, a filter further restricts them (as to one sink). Ends with status 1 if one of the named messages has no such
    undecided reject, or cannot be retried.
    """
    if sum((bool(ids), not ids and not chosen.is_empty, every)) != 1:
        raise UsageError("name the messages' ids, or --all, or a filter such as --sink, and only one of these")
    verb, done_word = ("retry", "retried") if retry else ("drop", "dropped")
    with opened() as stores:
        row = stores.topology(topology)
        found = [one for one in _found(stores, topology) if chosen.admits(one) and (not ids or one.message in ids)]
        if found and not ids and not yes:
            _ask(topology, verb, found, every=every, as_json=as_json)
        if retry:
            done, refused = _retry(stores, row, found, by=by, why=why)
        else:
            done, refused = _drop(stores, row, found, by=by, why=why), {}
    missed = sorted(set(ids) - {one.message for one in found})
    report = {
        "topology": topology,
        done_word: [{"id": one.message, "sink": one.sink, "txid": one.txid} for one in done],
        "not_undecided": missed,
        "refused": refused,
        "by": by,
    }

    def text() -> None:
        say(f"{topology}: {counted(len(done), 'reject')} {done_word} by {by}")
        if done and retry:
            say("the messages are opened again, for the sinks that rejected them alone")

    emit(report, as_json=as_json, text=text)
    for message, reason in refused.items():
        note(f"stormproof: {message}: {reason}")
    if missed:
        note(f"stormproof: no undecided rejects: {', '.join(missed[:10])}")
    if missed or refused:
        finish(Exit.FAILED)


def _ask(topology: str, verb: str, found: Sequence[Reject], *, every: bool, as_json: bool) -> None:
    """Have a person confirm what a filter chose. A script passes `--yes`, or `--all`, which leaves nothing to confirm."""
    number = counted(len(found), "reject")
    if as_json or not sys.stdin.isatty():
        if not every:
            raise UsageError(
                f"the filter chooses {number} of {topology}, and there is nobody to ask: add --yes to {verb} them",
                chosen=len(found),
            )
        return
    note(f"{verb} {number} of {topology}? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was done")
        finish(Exit.FAILED)


def _drop(stores: Stores, row: TopologyRow, found: Sequence[Reject], *, by: str, why: str) -> list[Reject]:
    if not found:
        return []
    with stores.transaction(row) as tx:
        mine = _undecided(tx, found)
        rejects.decide(tx, [one.id for one in mine], RejectState.DROPPED, by=by, why=why)
        _record(tx, OperatorAction.DROP_REJECT, mine, by=by, why=why)
    return mine


def _retry(
    stores: Stores, row: TopologyRow, found: Sequence[Reject], *, by: str, why: str
) -> tuple[list[Reject], dict[str, str]]:
    """Open the messages again; returns the rejects that are retried, and why others are not, by message."""
    if not found:
        return [], {}
    with stores.audit.snapshot() as snapshot:
        graphs = snapshot.graphs(row.incarnation)
    present = graphs[-1].sinks if graphs else None
    with letters_of(stores, row.name) as sources, stores.transaction(row) as tx:
        mine = _undecided(tx, found)
        refused: dict[str, str] = {}
        busy = rejects.retrying(tx, {one.message for one in mine if one.message is not None})
        payloads: dict[str, bytes] = {}
        for one in mine:
            name = one.message or f"a row of txid {one.txid} at sink {one.sink}"
            if row.guarantee == Guarantee.AT_MOST_ONCE.value:
                refused[name] = (
                    "under at-most-once no message is opened again; put it to the source anew, and drop it here"
                )
            elif one.message is None:
                refused[name] = "it belongs to no single message, and cannot be opened again"
            elif one.payload is None:
                refused[name] = "its source gave no payload, and it cannot be opened again"
            elif one.message in busy:
                refused[name] = "it is being retried for another sink; retry it for this one after that"
            elif present is not None and one.sink not in present:
                refused[name] = f"the topology has no sink {one.sink!r} any more"
            else:
                payloads[one.message] = one.payload
        opened_again = set(sources.open_again(payloads, by=by, why=why, tx=tx.raw))
        for message in sorted(payloads.keys() - opened_again):
            refused[message] = "it waits for a retry already"
        done = [one for one in mine if one.message in opened_again and one.message not in refused]
        rejects.decide(tx, [one.id for one in done], RejectState.RETRYING, by=by, why=why)
        _record(tx, OperatorAction.RETRY_REJECT, done, by=by, why=why)
    return done, refused


def _undecided(tx: Tx, found: Sequence[Reject]) -> list[Reject]:
    """Those that are undecided now, locked."""
    return rejects.undecided(tx, [one.id for one in found])


def _record(tx: Tx, action: OperatorAction, done: Sequence[Reject], *, by: str, why: str) -> None:
    """One event for each txid and sink: who decided, and about how many messages."""
    for (txid, sink), number in Counter((one.txid, one.sink) for one in done).items():
        detail: dict[str, Json] = {"sink": sink, "rejects": number}
        events.decided(tx, action, by=by, why=why, txid=txid, sink=sink, detail=detail)
