"""`dead-letters edit`, `requeue`, `drop`: what an operator decides about them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stormproof.core.errors import UsageError
from stormproof.core.source.files.rows import editable
from stormproof.trident.cli.letters import classes_text, note_elsewhere
from stormproof.trident.cli.output import Exit, confirmed, emit, finish, note, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions.dead_letters import CanaryEnd, CanaryReport, CanaryRules, requeue_canary
from stormproof.trident.decisions.letters import ChosenLetters, Letter, filter_of, letters_of, named
from stormproof.trident.ledger.rows import Reject
from stormproof.trident.wording import counted

# -- edit --------------------------------------------------------------------------------------------------------------


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
    verb: str,
    *,
    topology: str,
    id: Sequence[str] | None,
    ids_file: str | None,
    all: bool,
    where: Sequence[str] | None,
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
    ids, chosen = [*(id or ()), *(() if ids_file is None else ids_in(ids_file))], filter_of(where or (), **filters)
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
