"""Dead letters on the page: requeue, drop, and hand one out again with another payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stormproof.core.base.errors import UsageError
from stormproof.core.source.files.rows import editable
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions.dead_letters import CanaryReport, CanaryRules, requeue_canary, require_driver
from stormproof.trident.decisions.letters import ChosenLetters, LetterFilter, filter_of, letters_of
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.terms.wording import counted

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """A canary to be run in a thread of its own: it gets a listener, and what says that it is to stop."""

    run: Callable[[Callable[[CanaryReport], None], Callable[[], bool]], CanaryReport]


@dataclass(frozen=True, slots=True)
class Done:
    """What was done, in sentences; the exit status is 1 where something of it was refused."""

    told: tuple[str, ...]
    exit_status: int = 0
    canary: CanaryRun | None = None
    """A canary that has begun, and goes on."""

    def lines(self) -> Sequence[str]:
        """What was done, for people."""
        return self.told


def look(stores: Stores, topology: str, *, id: tuple[str, ...], all: bool, **filters: object) -> Look:
    """Which dead letters are meant: those selected, those that a filter admits, or expressly all of them."""
    where = filter_of(**filters)
    stores.topology(topology)
    nothing = require_chosen(id, is_empty=(where.without_sink if id else where).is_empty, every=all)
    if nothing is not None:
        return Look({}, nothing=nothing)
    found = _found(stores, topology, where, id)
    classes = [(one.error_class, one.reason, one.component, str(one.undecided)) for one in found.classes]
    missed = len(set(id).difference(found.messages))
    at_sinks = len(found.rejects)
    return Look(
        {},
        found.number,
        "dead letter",
        {"chosen": found},
        (
            *((f"{missed} of those selected are decided about already",) if missed else ()),
            *((f"{at_sinks} of them only at the sinks that rejected them",) if at_sinks else ()),
        ),
        (("error class", "reason", "failed in", "dead letters"), *classes),
        None if found.number else "No undecided dead letter is chosen.",
    )


def require_chosen(ids: Sequence[str], *, is_empty: bool, every: bool) -> str | None:
    """Why nothing is chosen; None: something is. An empty filter must be confirmed by choosing all.

    Raises:
        UsageError: more than one of selected, filter, and all.
    """
    chosen = (bool(ids), not is_empty, every)
    if sum(chosen) > 1:
        raise UsageError("choose messages, or a filter, or all of them: only one of these")
    return None if any(chosen) else "Nothing is chosen yet: fill in a filter, or check “All of them”."


def _found(stores: Stores, topology: str, where: LetterFilter, ids: Sequence[str]) -> ChosenLetters:
    with letters_of(stores, topology) as letters:
        return letters.choose(where, ids)


def drop(
    stores: Stores,
    topology: str,
    *,
    id: tuple[str, ...],
    all: bool,
    chosen: ChosenLetters,
    by: str,
    why: str,
    requeue: bool = False,
    **filters: object,
) -> Done:
    """Drop, or requeue, those that were shown; what changed since is told."""
    del all
    told = changes(chosen.keys, _found(stores, topology, filter_of(**filters), id).keys)
    with letters_of(stores, topology) as letters:
        done = dead_letters.dispose(stores, letters, chosen, requeue=requeue, by=by, why=why)
    refused = [f"{message}: {reason}" for message, reason in done.refused.items()]
    return Done((*done.lines(), *told, *refused), 1 if refused else 0)


def requeue(
    stores: Stores,
    topology: str,
    *,
    chosen: ChosenLetters,
    by: str,
    why: str,
    canary: int | None = None,
    max_failures: float | None = None,
    wait_s: float | None = None,
    **about: Any,
) -> Done:
    """Requeue those that were shown; with a canary the first ones alone, and the others behind the page."""
    rules = CanaryRules.of(canary, max_failures, wait_s)
    if rules is None:
        return drop(stores, topology, chosen=chosen, by=by, why=why, requeue=True, **about)
    require_driver(stores, topology)
    run = CanaryRun(
        lambda told, stopped: requeue_canary(
            *(stores, topology, chosen, rules), by=by, why=why, told=told, stopped=stopped
        )
    )
    return Done((f"{topology}: a canary of {chosen.number} dead letters has begun",), canary=run)


def changes(before: Set[str | int], now: Set[str | int]) -> list[str]:
    """What changed since somebody looked."""
    found = list[str]()
    if gone := len(before - now):
        was = "was" if gone == 1 else "were"
        found.append(
            f"since you looked, {counted(gone, 'dead letter')} of these {was} decided about by others: left alone"
        )
    if new := len(now - before):
        found.append(f"since you looked, {counted(new, 'dead letter')} more came to match: not touched")
    return found


# -- edit --------------------------------------------------------------------------------------------------------------


def look_at_one(stores: Stores, topology: str, id: str) -> Look:
    """One dead letter, with its payload as the text of a form."""
    with letters_of(stores, topology) as letters:
        one = dead_letters.undecided_letter(letters, id)
    payload = editable(one.payload or b"")
    text = text_to_edit(payload)
    facts = {"message": id, "failed": f"{one.times_failed} times", "dead since": str(one.dead_at)}
    if text is None:
        why = "The payload is no text that a form of a browser keeps byte by byte. Edit it by the command below."
        return Look(facts, 1, "dead letter", nothing=why)
    said = f"the payload has {len(payload)} bytes; the error was: {one.error}"
    return Look(facts, 1, "dead letter", {"before": payload}, (said,), prefilled={"payload": text})


def edit(
    stores: Stores, topology: str, id: str, *, before: bytes, payload: str, by: str, why: str
) -> dead_letters.Edited:
    """Hand it out again with the payload of the form."""
    with letters_of(stores, topology) as letters:
        one = dead_letters.undecided_letter(letters, id)
        new = edited_bytes(before, payload)
        return dead_letters.edit(stores, letters, one, new, exact=True, by=by, why=why)


def text_to_edit(payload: bytes) -> str | None:
    """A payload as the text of a form's field; None if a browser would change it."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return None
    lone = text.replace("\r\n", "\n")
    ends_mixed = "\r\n" in text and lone.replace("\n", "\r\n") != text
    hidden = any(ord(character) < 32 and character not in "\n\t" for character in lone)
    return None if ends_mixed or hidden else text


def edited_bytes(before: bytes, given: str) -> bytes:
    """The bytes of an edited text: a browser sends each line end as CR LF, and the payload keeps those that it had."""
    text = given.replace("\r\n", "\n")
    return (text.replace("\n", "\r\n") if b"\r\n" in before else text).encode("utf-8", "surrogatepass")
