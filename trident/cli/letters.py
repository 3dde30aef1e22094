"""`dead-letters list|show|edit|requeue|drop`: messages that failed too often, and an operator's decisions about them."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from stormproof.core.errors import Json, UsageError
from stormproof.core.message import storable_text
from stormproof.core.pending.letters import DeadLetters
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.registry import connector_of
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.core.source.spouts import shown, sources_in, unshown
from stormproof.trident import audit
from stormproof.trident.audit import AuditLedger
from stormproof.trident.audit.source import PendingEvidence, spout_sources, stored_source
from stormproof.trident.cli.layout import cell_text, counted
from stormproof.trident.cli.letter_filter import LetterFilter, class_of, component_of
from stormproof.trident.cli.output import Exit, emit, finish, note, say, table, written
from stormproof.trident.cli.reports import end_text, hashes_text, opening_text
from stormproof.trident.cli.stores import Stores, opened
from stormproof.trident.ledger import rejects

SHOWN_LETTERS: Final = 50
"""How many dead letters are shown if no limit is given."""

PAYLOAD_CHARACTERS: Final = 60
ERROR_CHARACTERS: Final = 160


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, with its id in the topology (with the spout, if there are several), and its source's name."""

    topology: str
    id: str
    source: str
    letter: DeadLetter

    @property
    def state(self) -> str:
        """What an operator decided, or `undecided`."""
        return "undecided" if self.letter.disposal is None else _DECIDED[self.letter.disposal.value]


_DECIDED: Final = {"requeue": "requeued", "edit": "edited", "drop": "dropped"}


@dataclass(frozen=True, slots=True)
class Letters:
    """The dead letters of a topology's source; or of the sources of its spouts, whose names then begin the ids."""

    topology: str
    sources: Mapping[str | None, DeadLetters]

    def all(self, chosen: LetterFilter | None = None, *, undecided: bool = False) -> list[Letter]:
        """The dead letters that the filter admits, source by source, oldest first."""
        return [
            Letter(self.topology, _shown(spout, letter.shown_id), source.name, letter)
            for spout, source in self.sources.items()
            for letter in source.dead_letters()
            if (chosen is None or chosen.admits(letter, [source.name, *([] if spout is None else [spout])]))
            and not (undecided and letter.disposal is not None)
        ]

    def dispose(self, ids: Sequence[str], *, requeue: bool, by: str, why: str, tx: object) -> list[str]:
        """Requeue or drop, in a transaction of the database; returns those that were undecided dead letters."""
        done: list[str] = []
        for spout, source in self.sources.items():
            act = source.requeue if requeue else source.drop
            mine = [inner for one in ids if (inner := _inner(spout, one)) is not None]
            done += [_shown(spout, inner) for inner in act(mine, by=by, why=why, tx=tx)]
        return done

    def open_again(self, messages: Mapping[str, bytes], *, by: str, why: str, tx: object) -> list[str]:
        """Hand out confirmed messages again, in a transaction of the database; returns those that are handed out."""
        done: list[str] = []
        for spout, source in self.sources.items():
            mine = {inner: payload for one, payload in messages.items() if (inner := _inner(spout, one)) is not None}
            if mine:
                done += [_shown(spout, inner) for inner in source.open_again(mine, by=by, why=why, tx=tx)]
        return done

    def server_id(self, message: str) -> str | None:
        """The id under which a server that delivers knows a message; None where there is none, or it is forgotten."""
        for spout, source in self.sources.items():
            inner = _inner(spout, message)
            found = None if inner is None else source.stable_id(inner)
            if found is not None:
                return found.removeprefix("=")  # before an id of the publisher's
        return None

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Requeue with another payload; False if it was no undecided dead letter."""
        return any(
            source.edit(inner, payload, by=by, why=why)
            for spout, source in self.sources.items()
            if (inner := _inner(spout, message)) is not None
        )


def _shown(spout: str | None, inner: str) -> str:
    return inner if spout is None else shown(spout, inner)


def _inner(spout: str | None, message: str) -> str | None:
    """A message's id in the source of a spout; None if it is another spout's."""
    if spout is None:
        return message
    named = unshown(message)
    return named[1] if named is not None and named[0] == spout else None


@contextmanager
def letters_of(stores: Stores, topology: str) -> Generator[Letters]:
    """The dead letters of a topology's sources, under its subscriptions. Fences no driver."""
    with ExitStack() as stack:
        sources: dict[str | None, DeadLetters] = {}
        for spout, evidence in _evidence(stores.audit, topology).items():
            connector = connector_of(evidence.who.kind)
            store = PostgresPendingStore(connector.NOUN, evidence.name, database=stores.database)
            sources[spout] = DeadLetters(store, evidence.who, connector)
            stack.callback(store.close)
        yield Letters(topology, sources)


def _evidence(ledger: AuditLedger, topology: str) -> Mapping[str | None, PendingEvidence]:
    """The records of the topology's sources, by spout; by None if it has no spouts."""
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = stored_source(snapshot, row)
        if isinstance(found, PendingEvidence):
            return {None: found}
        members = spout_sources(snapshot, row)
        if not members:
            raise UsageError(
                f"topology {topology!r} reads {row.source!r}, which keeps nothing in the ledger's database. "
                "No command reaches its dead letters: call the source's dead_letters(), requeue(), edit() and drop() in "
                "the process that has it",
                topology=topology,
            )
        elsewhere = [spout for spout in sources_in(row.source) if spout not in members]
        if elsewhere:
            note(f"stormproof: dead letters of {', '.join(elsewhere)} are not in the ledger's database, and not shown")
        return dict(members.items())


# -- list --------------------------------------------------------------------------------------------------------------


def list_letters(
    topology: str | None, chosen: LetterFilter, *, undecided: bool, count: bool, limit: int | None, as_json: bool
) -> None:
    """List the dead letters of one topology, or of all; or count them by class of error."""
    with opened() as stores:
        found: list[Letter] = []
        for name in _topologies(stores, topology):
            try:
                with letters_of(stores, name) as letters:
                    found += letters.all(chosen, undecided=undecided)
            except UsageError as error:
                if topology is not None:
                    raise
                note(f"stormproof: {error.message}")
    classes = classes_of(found)
    if count:
        report: dict[str, object] = {"topology": topology, "classes": classes}
        emit(report, as_json=as_json, text=lambda: _classes_text(found, classes))
        return
    kept = found if limit is None else found[:limit]
    report = {
        "topology": topology,
        "total": len(found),
        "classes": classes,
        "dead_letters": [{"topology": one.topology, **_listed(one)} for one in kept],
    }
    emit(report, as_json=as_json, text=lambda: _list_text(found, classes, SHOWN_LETTERS if limit is None else limit))


def _topologies(stores: Stores, topology: str | None) -> list[str]:
    if topology is not None:
        return [topology]
    with stores.audit.snapshot() as snapshot:
        return [row.name for row in snapshot.topologies()]


@dataclass(frozen=True, slots=True)
class LetterClass:
    """The dead letters of one topology, class of error, reason and component; `undecided` ones wait for an operator."""

    topology: str
    error_class: str
    reason: str
    component: str
    undecided: int
    decided: int


def classes_of(found: Sequence[Letter]) -> list[LetterClass]:
    """The dead letters by class; the class with the most undecided ones first."""
    waiting, decided = Counter[tuple[str, str, str, str]](), Counter[tuple[str, str, str, str]]()
    for one in found:
        key = (one.topology, class_of(one.letter), one.letter.reason, component_of(one.letter))
        (waiting if one.letter.disposal is None else decided)[key] += 1
    keys = sorted(waiting.keys() | decided.keys(), key=lambda key: (-waiting[key], -decided[key], key))
    return [LetterClass(*key, waiting[key], decided[key]) for key in keys]


def _listed(one: Letter) -> dict[str, object]:
    letter = one.letter
    return {
        "id": one.id,
        "source": one.source,
        "reason": letter.reason,
        "error_class": class_of(letter),
        "component": component_of(letter),
        "error": letter.error,
        "times_opened": letter.times_opened,
        "times_failed": letter.times_failed,
        "dead_at": letter.dead_at,
        "bytes": len(letter.payload),
        "text": storable_text(shown_payload(letter.payload)),
        "history": letter.history,
        "disposal": letter.disposal,
        "by": letter.by,
        "why": letter.why,
        "disposed_at": letter.disposed_at,
    }


def _list_text(found: Sequence[Letter], classes: Sequence[LetterClass], limit: int) -> None:
    several = len({one.topology for one in found}) > 1
    if found[:limit]:
        table(
            [*(["topology"] if several else []), "id", "failed in", "error", "payload", "state"],
            [
                (
                    *([one.topology] if several else []),
                    one.id,
                    component_of(one.letter),
                    cut(one.letter.error, ERROR_CHARACTERS),
                    cut(shown_payload(one.letter.payload), PAYLOAD_CHARACTERS),
                    one.state,
                )
                for one in found[:limit]
            ],
        )
    _classes_text(found, classes)
    if len(found) > limit:
        say(f"{limit} of {counted(len(found), 'dead letter')} shown; --limit {len(found)} shows all of them")
    undecided = next((one for one in found if one.letter.disposal is None), None)
    if undecided is not None:
        say(f"look at one: stormproof dead-letters show {undecided.topology} {undecided.id}")


def _classes_text(found: Sequence[Letter], classes: Sequence[LetterClass]) -> None:
    if not found:
        say("no dead letters")
        return
    several = len({one.topology for one in classes}) > 1
    undecided = sum(one.undecided for one in classes)
    say(f"{counted(len(found), 'dead letter')}, {undecided} undecided")
    table(
        [*(["topology"] if several else []), "error class", "reason", "failed in", "undecided", "decided"],
        [
            (*([c.topology] if several else []), c.error_class, c.reason, c.component, c.undecided, c.decided)
            for c in classes
        ],
    )


def cut(text: str, characters: int) -> str:
    """A text in one line, of at most so many characters, with control characters escaped."""
    line = " ".join(storable_text(text).split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


# -- show --------------------------------------------------------------------------------------------------------------


def show_letter(topology: str, message: str, *, as_json: bool) -> None:
    """Show all that is known of a dead letter: payload, failures, decisions, batches."""
    with opened() as stores, letters_of(stores, topology) as letters:
        found = [one for one in letters.all() if one.id == message]
        if not found:
            raise _not_dead(letters, topology, message)
        traced = audit.message(stores.audit, topology, message)
        server_id = letters.server_id(message)
    newest = found[-1]
    report = {
        "topology": topology,
        **_listed(newest),
        "text": shown_payload(newest.letter.payload),
        "state": newest.state,
        "server_id": server_id,
        **_payload_fields("", newest.letter.payload),
        **({} if newest.letter.new_payload is None else _payload_fields("new_", newest.letter.new_payload)),
        "history": [_event(entry) for entry in newest.letter.history],
        "openings": traced.openings,
        "end": traced.end,
        "earlier": [_listed(one) for one in found[:-1]],
    }
    emit(report, as_json=as_json, text=lambda: _show_text(newest, found[:-1], traced, server_id))


def _payload_fields(prefix: str, payload: bytes) -> dict[str, object]:
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


def _show_text(one: Letter, earlier: Sequence[Letter], traced: audit.MessageReport, server_id: str | None) -> None:
    letter = one.letter
    say(f"message {one.id} of {one.topology}, from {one.source}: {one.state}; now {end_text(traced.end)}")
    say(
        f"dead since {cell_text(letter.dead_at)}, failed {counted(letter.times_failed, 'time')}, "
        f"opened {counted(letter.times_opened, 'time')}: {letter.reason} ({class_of(letter)})"
    )
    if server_id is not None:
        say(f"its server knows it as {cell_text(server_id)}")
    if letter.disposal is not None:
        at = "" if letter.disposed_at is None else f" {cell_text(letter.disposed_at)}"
        say(f"{one.state}{at} by {letter.by}: {letter.why or 'no reason given'}")
    _payload_text("payload", letter.payload)
    if letter.new_payload is not None:
        _payload_text("new payload", letter.new_payload)
    for entry in map(_event, letter.history):
        _event_text(entry)
    for opening in traced.openings:
        say(opening_text(opening))
    for before in earlier:
        say(f"a dead letter before, since {cell_text(before.letter.dead_at)}: {before.state} by {before.letter.by}")
    if letter.disposal is None:
        for verb in ("requeue", "edit", "drop"):
            say(f"to {verb} it: stormproof dead-letters {verb} {one.topology} {one.id}")


def _payload_text(name: str, payload: bytes) -> None:
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


def _not_dead(letters: Letters, topology: str, message: str) -> UsageError:
    names = {spout for spout in letters.sources if spout is not None}
    form = f"; ids look like SPOUT:ID, with one of the spouts {', '.join(sorted(names))}" if names else ""
    return UsageError(
        f"message {message} of topology {topology!r} is no dead letter{form}. See: stormproof dead-letters list {topology}",
        topology=topology,
        message=message,
    )


# -- edit --------------------------------------------------------------------------------------------------------------


def edit_letter(
    topology: str, message: str, payload: str | None, *, exact: bool, by: str, why: str, as_json: bool
) -> None:
    """Requeue a dead letter with another payload: from a file, from standard input, or from the user's editor."""
    with opened() as stores, letters_of(stores, topology) as letters:
        found = [one for one in letters.all() if one.id == message]
        if not found:
            raise _not_dead(letters, topology, message)
        (*_, newest) = found
        _require_undecided(newest)
        before = editable(newest.letter.payload)
        given = _edited_by_hand(newest, before) if payload is None else _read(payload)
        if not exact and given.endswith(b"\n") and not before.endswith(b"\n"):
            given = given.removesuffix(b"\n").removesuffix(b"\r")  # editors and `echo` add it
        if given == before:
            raise UsageError(
                f"message {message} of topology {topology!r}: the payload is the old one, and nothing was done. To try it "
                f"again: stormproof dead-letters requeue {topology} {message}",
                message=message,
            )
        if not letters.edit(message, given, by=by, why=why):
            _require_undecided([one for one in letters.all() if one.id == message][-1])
        after = [one for one in letters.all() if one.id == message and one.letter.new_payload is not None][-1].letter
    assert after.new_payload is not None
    hashes = [sha256(one).hexdigest() for one in (after.payload, after.new_payload)]
    report = {
        "topology": topology,
        "edited": message,
        "by": by,
        "why": why,
        "payload_sha256": hashes[0],
        "new_payload_sha256": hashes[1],
        "bytes": len(before),
        "new_bytes": len(given),
    }

    def text() -> None:
        say(
            f"{topology}: {message} is handed out again with its new payload ({counted(len(given), 'byte')}, was "
            f"{len(before)}); the old one stays on record"
        )

    emit(report, as_json=as_json, text=text)


def _require_undecided(one: Letter) -> None:
    letter = one.letter
    if letter.disposal is not None:
        at = "" if letter.disposed_at is None else f" {cell_text(letter.disposed_at)}"
        raise UsageError(
            f"message {one.id} of topology {one.topology!r} was {one.state}{at} by {letter.by}, and is no dead letter any "
            f"more. What became of it: stormproof audit message {one.topology} {one.id}",
            message=one.id,
        )


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
    topology: str,
    ids: Sequence[str],
    where: LetterFilter,
    *,
    every: bool,
    yes: bool,
    requeue: bool,
    by: str,
    why: str,
    as_json: bool,
) -> None:
    """Requeue or drop dead letters: the named ones, those that the filter admits, or all.

    Ends with status 1 if one of the named messages is no undecided dead letter.
    """
    if sum((bool(ids), not where.is_empty, every)) != 1:
        raise UsageError(
            "name the messages' ids, or --all, or a filter such as --reason or --match, and only one of these"
        )
    verb, done_word = ("requeue", "requeued") if requeue else ("drop", "dropped")
    with opened() as stores, letters_of(stores, topology) as letters:
        chosen = list(ids)
        if not ids:
            found = letters.all(where, undecided=True)
            chosen = [one.id for one in found]
            if found and not yes:
                _ask(topology, verb, found, every=every, as_json=as_json)
        with stores.transaction(stores.topology(topology)) as tx:
            done = letters.dispose(chosen, requeue=requeue, by=by, why=why, tx=tx.raw)
            if not requeue:
                rejects.drop_retrying(tx, done, by=by, why=why)
    missed = [one for one in chosen if one not in set(done)]
    report = {"topology": topology, done_word: done, "not_dead": missed, "by": by}
    text = f"{topology}: {counted(len(done), 'dead letter')} {done_word} by {by}"
    emit(report, as_json=as_json, text=lambda: say(text))
    if missed:
        note(f"stormproof: not dead letters, or decided about already: {', '.join(missed[:10])}")
        finish(Exit.FAILED)


def _ask(topology: str, verb: str, found: Sequence[Letter], *, every: bool, as_json: bool) -> None:
    """Have a person confirm what a filter chose. A script passes `--yes`, or `--all`, which leaves nothing to confirm."""
    number = counted(len(found), "dead letter")
    if as_json or not sys.stdin.isatty():
        if not every:
            raise UsageError(
                f"the filter chooses {number} of {topology}, and there is nobody to ask: add --yes to {verb} them",
                chosen=len(found),
            )
        return
    _classes_text(found, classes_of(found))
    note(f"{verb} {number} of {topology}? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was done")
        finish(Exit.FAILED)
