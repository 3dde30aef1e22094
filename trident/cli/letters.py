"""`dead-letters list` and `show`: messages that failed too often, or that a sink rejected."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from hashlib import sha256
from itertools import islice
from typing import Final

from stormproof.core.errors import Json
from stormproof.core.message import storable_text
from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.trident import audit
from stormproof.trident.cli.layout import cell_text
from stormproof.trident.cli.output import emit, note, say, table, written
from stormproof.trident.cli.reports import end_text, hashes_text, opening_text
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions.letters import (
    Letter,
    LetterClass,
    LetterClasses,
    Letters,
    called_by_servers,
    filter_of,
    letters_of,
    named,
    not_dead,
)
from stormproof.trident.ledger.rows import names_of
from stormproof.trident.stores import Stores
from stormproof.trident.wording import counted, cut

SHOWN_LETTERS: Final = 50
"""How many dead letters are shown if no limit is given."""

AT_SERVER: Final = "at its server"
"""The head over the ids that messages' servers know them by."""
PAYLOAD_CHARACTERS: Final = 60
ERROR_CHARACTERS: Final = 160


# -- list --------------------------------------------------------------------------------------------------------------


def list_letters(
    *,
    topology: str | None,
    where: Sequence[str] | None,
    decided: bool,
    count: bool,
    limit: int | None,
    as_json: bool,
    **filters: object,
) -> None:
    """List the dead letters of one topology, or of all; or count them by class of error.

    All are counted without their payloads. Those that are shown are read whole.
    """
    chosen, undecided = filter_of(where or (), **filters), not decided
    shown = limit if limit is not None or as_json else SHOWN_LETTERS
    kept, counts, ids = list[Letter](), LetterClasses(), dict[tuple[str, str | None], str]()
    undecided_one: tuple[str, str] | None = None
    with opened() as stores:
        for name in _topologies(stores, topology):
            with letters_of(stores, name) as letters:
                note_elsewhere(letters)
                for head in letters.heads(chosen, undecided=undecided):
                    counts.add(name, head)
                    if undecided_one is None and head.disposal is None and head.shown_id is not None:
                        undecided_one = name, head.shown_id
                if topology is not None and counts.is_empty:
                    letters.require_sources()
                room = None if shown is None else shown - len(kept)
                if not count and room != 0:
                    with closing(letters.each(chosen, undecided=undecided)) as each:
                        mine = list(islice(each, room))
                    called = called_by_servers(stores, name, [one.id for one in mine if one.id is not None])
                    ids |= {(name, message): id_ for message, id_ in called.items()}
                    kept += mine
    classes = counts.sorted()
    if count:
        report: dict[str, object] = {"topology": topology, "classes": classes}
        emit(report, as_json=as_json, text=lambda: classes_text(classes))
        return
    report = {
        "topology": topology,
        "total": total_of(classes),
        "classes": classes,
        "dead_letters": [
            {"topology": one.topology, **_listed(one), "server_id": ids.get((one.topology, one.id))} for one in kept
        ],
    }
    emit(report, as_json=as_json, text=lambda: _list_text(kept, ids, classes, undecided_one))


def note_elsewhere(letters: Letters) -> None:
    """Say whose dead letters are out of reach."""
    if letters.elsewhere:
        note(letters.out_of_reach)


def _topologies(stores: Stores, topology: str | None) -> list[str]:
    if topology is not None:
        return [topology]
    with stores.audit.snapshot() as snapshot:
        return [row.name for row in snapshot.topologies()]


def _listed(one: Letter) -> dict[str, object]:
    told = {name: getattr(one, name) for name in names_of(Letter)}
    for name in ("topology", "payload", "new_payload"):
        del told[name]
    return {
        **told,
        "bytes": None if one.payload is None else len(editable(one.payload)),
        "text": None if one.payload is None else storable_text(shown_payload(one.payload)),
    }


def _list_text(
    found: Sequence[Letter],
    ids: Mapping[tuple[str, str | None], str],
    classes: Sequence[LetterClass],
    undecided_one: tuple[str, str] | None,
) -> None:
    several, total = len({one.topology for one in classes}) > 1, total_of(classes)
    at_sinks = any(one.sink is not None for one in found)
    if found:
        table(
            [
                *(["topology"] if several else []),
                "id",
                *([AT_SERVER] if ids else []),
                "failed in",
                *(["txid"] if at_sinks else []),
                "error",
                "refused row, or payload" if at_sinks else "payload",
                "state",
            ],
            [
                (
                    *([one.topology] if several else []),
                    one.id or "-",
                    *([ids.get((one.topology, one.id))] if ids else []),
                    _place(one),
                    *([one.txid] if at_sinks else []),
                    cut(one.error, ERROR_CHARACTERS),
                    cut(one.row or shown_payload(one.payload or b""), PAYLOAD_CHARACTERS),
                    one.state,
                )
                for one in found
            ],
        )
    classes_text(classes)
    if total > len(found):
        say(f"{len(found)} of {counted(total, 'dead letter')} shown; --limit {total} shows all of them")
    if undecided_one is not None:
        say(f"look at one: stormproof dead-letters show {' '.join(undecided_one)}")


def _place(one: Letter) -> str:
    return one.component if one.sink is None else f"sink {one.sink}"


def total_of(classes: Sequence[LetterClass]) -> int:
    """How many dead letters are of these classes."""
    return sum(one.undecided + one.decided for one in classes)


def classes_text(classes: Sequence[LetterClass]) -> None:
    """Print how many there are of each class of error."""
    if not classes:
        say("no dead letters")
        return
    several = len({one.topology for one in classes}) > 1
    undecided = sum(one.undecided for one in classes)
    say(f"{counted(total_of(classes), 'dead letter')}, {undecided} undecided")
    table(
        [*(["topology"] if several else []), "error class", "reason", "failed in", "undecided", "decided"],
        [
            (*([c.topology] if several else []), c.error_class, c.reason, c.component, c.undecided, c.decided)
            for c in classes
        ],
    )


# -- show --------------------------------------------------------------------------------------------------------------


def show_letter(topology: str, message: str, *, as_json: bool) -> None:
    """Show all that is known of a dead letter: payload, failures, refused rows, decisions, batches."""
    with opened() as stores, letters_of(stores, topology) as letters:
        note_elsewhere(letters)
        (message,) = named(stores, topology, [message])
        found = letters.of_message(message)
        if not found:
            letters.require_sources()
            raise not_dead(letters, message)
        traced = audit.message(stores.audit, topology, message, opener=audit.opener_for(stores.database))
    at_sinks = [one for one in found if one.sink is not None]
    *earlier, newest = [one for one in found if one.sink is None] or [at_sinks[-1]]
    report = {
        "topology": topology,
        **_listed(newest),
        "text": None if newest.payload is None else shown_payload(newest.payload),
        "state": newest.state,
        "server_id": traced.server_id,
        **_payload_fields("", newest.payload),
        **_payload_fields("new_", newest.new_payload),
        "history": [_event(entry) for entry in newest.history],
        "openings": traced.openings,
        "end": traced.end,
        "earlier": [_listed(one) for one in earlier],
        "at_sinks": [_listed(one) for one in at_sinks],
    }
    emit(report, as_json=as_json, text=lambda: _show_text(newest, earlier, at_sinks, traced))


def _payload_fields(prefix: str, payload: bytes | None) -> dict[str, object]:
    if payload is None:
        return {}
    given = editable(payload)
    return {
        f"{prefix}payload_base64": base64.b64encode(given).decode(),
        f"{prefix}payload_sha256": sha256(payload).hexdigest(),
    }


def _event(entry: Mapping[str, Json]) -> dict[str, Json]:
    """An entry of the history, with the txid in which it happened."""
    owner = entry.get("owner")
    txid = owner.rpartition("/")[2] if isinstance(owner, str) else ""
    return {**entry, "txid": int(txid) if txid.isdecimal() else None}


def _show_text(one: Letter, earlier: Sequence[Letter], at_sinks: Sequence[Letter], traced: audit.MessageReport) -> None:
    of_source = "" if one.source is None else f", from {one.source}: {one.state}"
    say(f"message {one.id} of {one.topology}{of_source}; now {end_text(traced.end)}")
    if one.sink is None:
        say(
            f"dead since {cell_text(one.dead_at)}, failed {counted(one.times_failed or 0, 'time')}, "
            f"opened {counted(one.times_opened or 0, 'time')}: {one.reason} ({one.error_class})"
        )
    if traced.server_id is not None:
        say(f"its server knows it as {cell_text(traced.server_id)}")
    if one.sink is None:
        _decided_text(one)
    _payload_text("payload", one.payload)
    if one.new_payload is not None:
        _payload_text("new payload", one.new_payload)
    for entry in map(_event, one.history):
        _event_text(entry)
    for rejected in at_sinks:
        _rejected_text(rejected)
    for opening in traced.openings:
        say(opening_text(opening))
    for before in earlier:
        say(f"a dead letter before, since {cell_text(before.dead_at)}: {before.state} by {before.by}")
    if any(letter.disposal is None for letter in (one, *at_sinks)):
        for verb in ("requeue", *(["edit"] if one.sink is None and one.disposal is None else []), "drop"):
            say(f"to {verb} it: stormproof dead-letters {verb} {one.topology} {one.id}")


def _decided_text(one: Letter) -> None:
    if one.disposal is not None:
        at = "" if one.disposed_at is None else f" {cell_text(one.disposed_at)}"
        again = "" if one.requeued_in is None else f", in txid {one.requeued_in}"
        say(f"{one.state}{at}{again} by {one.by}: {one.why or 'no reason given'}")


def _rejected_text(one: Letter) -> None:
    state = "" if one.error_class == one.reason else f", SQLSTATE {one.error_class}"
    rows = counted(one.rows or 0, "row")
    say(f"{cell_text(one.dead_at)} rejected by sink {one.sink} in txid {one.txid}{state}; {rows} left out:")
    written(one.error, indent="    ")
    written(f"row: {one.row}", indent="    ")
    _decided_text(one)


def _payload_text(name: str, payload: bytes | None) -> None:
    if payload is None:
        say("its source gave no payload")
        return
    given = editable(payload)
    say(f"{name} ({counted(len(given), 'byte')}, sha256 {sha256(payload).hexdigest()}):")
    written(shown_payload(payload), indent="    ")


def _event_text(entry: Mapping[str, Json]) -> None:
    at = datetime.fromisoformat(str(entry["at"]))
    if "by" in entry:
        hashes = hashes_text(entry.get("payload_sha256"), entry.get("new_payload_sha256"))
        say(f"{cell_text(at)} {entry['reason']} by {entry['by']}: {entry.get('why') or 'no reason given'}{hashes}")
        return
    txid = "" if entry["txid"] is None else f" in txid {entry['txid']}"
    verb = "returned, no failure counted" if entry.get("returned") else "failed"
    say(f"{cell_text(at)} {verb}{txid}, in {entry.get('component') or '-'}: {entry['reason']}")
    written(str(entry.get("error") or ""), indent="    ")
    if entry.get("input"):
        written(f"input: {entry['input']}", indent="    ")
