"""`dead-letters list`, `show`, `edit`, `requeue`, `drop`: messages that failed too often, or that a sink rejected."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Final

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.message import MessageReport
from stormproof.trident.audit.message import message as message_report
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import Exit, cell_text, confirmed, emit, finish, note, say, table, written
from stormproof.trident.cli.reports import end_text, hashes_text, opening_text
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions.canary import CanaryEnd, CanaryReport, CanaryRules, requeue_canary
from stormproof.trident.decisions.letter_choice import (
    ChosenLetters,
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
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.ledger.tables import Reject, names_of
from stormproof.trident.terms.wording import counted, cut

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
    decided: bool,
    count: bool,
    limit: int | None,
    as_json: bool,
    **filters: object,
) -> None:
    """List the dead letters of one topology, or of all; or count them by class of error.

    All are counted without their payloads. Those that are shown are read whole.
    """
    chosen, undecided = filter_of(**filters), not decided
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
        traced = message_report(stores.audit, topology, message, opener=opener_for(stores.database))
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


def _show_text(one: Letter, earlier: Sequence[Letter], at_sinks: Sequence[Letter], traced: MessageReport) -> None:
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


def edit_letter(
    topology: str, message: str, payload: str | None, *, exact: bool, by: str, why: str, as_json: bool
) -> None:
    """Requeue a dead letter with another payload: from a file, from standard input, or from the user's editor."""
    with opened() as stores, letters_of(stores, topology) as letters:
        note_elsewhere(letters)
        letter = dead_letters.undecided_letter(letters, *named(stores, topology, [message]))
        before = editable(letter.payload or b"")
        given = _edited_by_hand(letter, before) if payload is None else _read(payload)
        done = dead_letters.edit(stores, letters, letter, given, exact=exact, by=by, why=why)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))


def _read(payload: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if payload == "-" else Path(payload).read_bytes()
    except OSError as error:
        raise UsageError(f"--payload {payload}: it cannot be read: {error.strerror}", file=payload) from error


def _edited_by_hand(one: Letter, before: bytes) -> bytes:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor or not sys.stdin.isatty():
        reason = "neither VISUAL nor EDITOR is set" if not editor else "there is no terminal for an editor"
        raise UsageError(
            f"message {one.id}: {reason}; give the new payload in a file, or - for standard input: "
            f"stormproof dead-letters edit {one.topology} {one.id} --payload FILE"
        )
    suffix = ".json" if before.lstrip()[:1] in (b"{", b"[") else ".txt"
    with tempfile.TemporaryDirectory(prefix="stormproof-") as folder:
        file = Path(folder) / f"payload{suffix}"
        file.write_bytes(before)
        try:
            done = subprocess.run([*shlex.split(editor), str(file)], check=False)
        except OSError as error:
            raise UsageError(f"the editor {editor!r} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            raise UsageError(f"the editor {editor!r} ended with status {done.returncode}; nothing was done")
        return file.read_bytes()


# -- requeue, drop -----------------------------------------------------------------------------------------------------


def ids_in(source: str) -> list[str]:
    """Messages' ids, one a line, of a file or of standard input (``-``); empty lines are left out.

    Raises:
        UsageError: there is no such file, it is no text, or no id is in it.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ids {source} cannot be read: {error}", file=source) from error
    found = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not found:
        raise UsageError(f"--ids {source}: no id is in it; write one a line", file=source)
    return found


def dispose(
    *,
    verb: str,
    topology: str,
    id: Sequence[str] | None,
    ids_file: str | None,
    all: bool,
    canary: int | None = None,
    max_failures: float | None = None,
    wait_s: float | None = None,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str,
    as_json: bool,
    **filters: object,
) -> None:
    """Requeue or drop dead letters: the named ones, those that the filter admits, or all.

    Ends with status 1 if one of the named messages is no undecided dead letter, or one cannot be opened again, or a canary
    did not hand out everything.
    """
    ids, chosen = [*(id or ()), *(() if ids_file is None else ids_in(ids_file))], filter_of(**filters)
    careful, requeue = CanaryRules.of(canary, max_failures, wait_s), verb == "requeue"
    dead_letters.require_choice(ids, chosen, every=all)
    with opened() as stores, letters_of(stores, topology) as letters:
        note_elsewhere(letters)
        ids = named(stores, topology, ids)
        found = letters.named(chosen, ids) if ids and not dry_run else letters.choose(chosen, ids)
        if not found.number:
            letters.require_sources()
        if dry_run:
            _count(topology, ids, found, verb, as_json=as_json)
            return
        if found.number and not ids and not yes:
            show = partial(classes_text, found.classes)
            confirmed(topology, verb, "dead letter", found.number, every=all, as_json=as_json, show=show)
        if careful is not None:
            _show_canary(
                requeue_canary(stores, topology, found, careful, by=by, why=why, told=_progress()), as_json=as_json
            )
            return
        done = dead_letters.dispose(stores, letters, found, requeue=requeue, by=by, why=why, ids=ids)
    report = {
        "topology": topology,
        "requeued" if requeue else "dropped": done.messages,
        "at_sinks": _at_sinks(done.rejects),
        "not_dead": done.not_dead,
        "refused": done.refused,
        "by": by,
    }
    emit(report, as_json=as_json, text=lambda: say("\n".join(done.lines())))
    for message, reason in done.refused.items():
        note(f"stormproof: {message}: {reason}")
    _finish(done.not_dead, is_done=not done.refused)


def _count(topology: str, ids: Sequence[str], found: ChosenLetters, verb: str, *, as_json: bool) -> None:
    """Say which dead letters would be decided about; do nothing."""
    missed = sorted(set(ids).difference(found.messages))
    report = {
        "topology": topology,
        f"would_{verb}": found.messages,
        "at_sinks": _at_sinks(found.rejects),
        "classes": found.classes,
        "not_dead": missed,
    }

    def text() -> None:
        classes_text(found.classes)
        say(f"{topology}: would {verb} {counted(found.number, 'dead letter')}; nothing was done")

    emit(report, as_json=as_json, text=text)
    _finish(missed, is_done=True)


def _at_sinks(found: Sequence[Reject]) -> list[dict[str, object]]:
    return [{"id": one.message, "sink": one.sink, "txid": one.txid} for one in found]


def _finish(missed: Sequence[str], *, is_done: bool) -> None:
    if missed:
        note(f"stormproof: not dead letters, or decided about already: {', '.join(missed[:10])}")
    if missed or not is_done:
        finish(Exit.FAILED)


# -- a canary -----------------------------------------------------------------------------------------------------------


def _progress() -> Callable[[CanaryReport], None]:
    """Says on standard error what changed."""
    said: list[str] = []

    def told(report: CanaryReport) -> None:
        now = report.lines()[len(report.waves) - 1]
        if [now] != said[-1:]:
            said.append(now)
            note(now)

    return told


def _show_canary(report: CanaryReport, *, as_json: bool) -> None:
    """Print how a canary ended; status 1 if something was not handed out, or was not decided."""
    emit(report, as_json=as_json, text=lambda: say("\n".join(report.lines())))
    finish(Exit.DONE if report.end is CanaryEnd.DONE else Exit.FAILED)
