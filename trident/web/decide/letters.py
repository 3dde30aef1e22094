"""Dead letters: requeue, drop, and hand one out again with another payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.core.source.files.rows import editable
from stormproof.trident.decisions import canaries, dead_letters
from stormproof.trident.decisions.canary import CanaryRules
from stormproof.trident.decisions.letter_filter import LetterFilter, filter_of
from stormproof.trident.decisions.letters import ChosenLetters, letters_of
from stormproof.trident.web.decide.action import Action, CanaryRun, Choice, Does, Done, Field, Given, Look, Looks
from stormproof.trident.web.decide.choosing import (
    ALL,
    CANARY,
    canary_numbers,
    changes,
    command_of,
    of_choice,
    quoted,
    require_chosen,
)

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores

FILTERS: Final = ("source", "reason", "component", "error_class", "match", "since", "until", "sink", "first", "last")
_CHOICE: Final = (
    Field("source", "Source or spout"),
    Field("reason", "Reason", hint="error, timeout, refused, ..."),
    Field("component", "Component", hint="of the last failure"),
    Field("error_class", "Error class", hint="as ValueError; SQLSTATE 23505, or the class 23"),
    Field("match", "Text", hint="in error, payload or refused row"),
    Field("since", "Dead since", hint="a time, or an age as 2h"),
    Field("until", "Dead before", hint="a time, or an age as 2h"),
    Field("sink", "Rejected by sink"),
    Field("first", "Rejected from txid", "number"),
    Field("last", "Rejected to txid", "number"),
    ALL,
)


def _filter(choice: Choice) -> LetterFilter:
    return filter_of((), **of_choice(choice, FILTERS))


def _found(stores: Stores, choice: Choice) -> ChosenLetters:
    with letters_of(stores, choice.topology) as letters:
        return letters.choose(_filter(choice), choice.texts("id"))


def _looks(verb: str) -> Looks:
    def look(stores: Stores, choice: Choice) -> Look:
        ids, every, where = choice.texts("id"), choice.is_on("all"), _filter(choice)
        stores.topology(choice.topology)
        nothing = require_chosen(ids, is_empty=(where.without_sink if ids else where).is_empty, every=every)
        if nothing is not None:
            return Look({}, nothing=nothing)
        found = _found(stores, choice)
        classes = [(one.error_class, one.reason, one.component, str(one.undecided)) for one in found.classes]
        missed = len(set(ids).difference(found.messages))
        at_sinks = len(found.rejects)
        return Look(
            {},
            found.number,
            "dead letter",
            found,
            (
                *((f"{missed} of those selected are decided about already",) if missed else ()),
                *((f"{at_sinks} of them only at the sinks that rejected them",) if at_sinks else ()),
            ),
            (("error class", "reason", "failed in", "dead letters"), *classes),
            None if found.number else "No undecided dead letter is chosen.",
            command_of(f"dead-letters {verb}", choice.topology, ids, of_choice(choice, FILTERS), every=every),
        )

    return look


def _does(*, requeue: bool) -> Does:
    def do(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
        chosen: ChosenLetters = look.pinned
        told = changes(chosen.keys, _found(stores, choice).keys, "dead letter")
        numbers = canary_numbers({field.name: given.text(field.name) for field in CANARY}) if requeue else None
        if numbers is not None:
            rules = CanaryRules(*numbers)
            canaries.require_driver(stores, choice.topology)
            run = CanaryRun(
                lambda told_, stopped: canaries.requeue_canary(
                    *(stores, choice.topology, chosen, rules),
                    by=given.by,
                    why=given.why,
                    told=told_,
                    stopped=stopped,
                )
            )
            return Done((f"{choice.topology}: a canary of {chosen.number} dead letters has begun", *told), canary=run)
        with letters_of(stores, choice.topology) as letters:
            done = dead_letters.dispose(stores, letters, chosen, requeue=requeue, by=given.by, why=given.why)
        refused = [f"{message}: {reason}" for message, reason in done.refused.items()]
        return Done((*done.lines(), *told, *refused), ok=not refused)

    return do


# -- edit --------------------------------------------------------------------------------------------------------------


def _look_edit(stores: Stores, choice: Choice) -> Look:
    message = choice.text("id")
    if message is None:
        raise UsageError("an edit is of one message: the address lacks id=")
    with letters_of(stores, choice.topology) as letters:
        one = dead_letters.undecided_letter(letters, message)
    payload = editable(one.payload or b"")
    command = f"stormproof dead-letters edit {quoted(choice.topology)} {quoted(message)} --payload FILE"
    text = text_to_edit(payload)
    facts = {"message": message, "failed": f"{one.times_failed} times", "dead since": str(one.dead_at)}
    if text is None:
        why = "The payload is no text that a form of a browser keeps byte by byte. Edit it by the command below."
        return Look(facts, 1, "dead letter", None, nothing=why, command=command)
    return Look(
        facts,
        1,
        "dead letter",
        payload,
        (f"the payload has {len(payload)} bytes; the error was: {one.error}",),
        command=command,
        prefilled={"payload": text},
    )


def _edit(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    message = choice.text("id") or ""
    text = given.params.get("payload")
    if text is None:
        raise UsageError("the form has no payload")
    with letters_of(stores, choice.topology) as letters:
        one = dead_letters.undecided_letter(letters, message)
        new = edited_bytes(look.pinned, text)
        done = dead_letters.edit(stores, letters, one, new, exact=True, by=given.by, why=given.why)
    return Done(tuple(done.lines()))


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


ACTIONS: Final = (
    Action(
        "requeue",
        "Requeue dead letters",
        "Requeue",
        _looks("requeue"),
        _does(requeue=True),
        _CHOICE,
        CANARY,
        about="They are handed out again, with their failures counted from 0; what a sink rejected goes to that sink alone.",
    ),
    Action(
        "drop",
        "Drop dead letters",
        "Drop",
        _looks("drop"),
        _does(requeue=False),
        _CHOICE,
        warning="They are given up for good: nothing hands them out again.",
        about="They are given up, on record; what a sink rejected is given up at that sink.",
    ),
    Action(
        "edit",
        "Edit a dead letter and requeue it",
        "Requeue with this payload",
        _look_edit,
        _edit,
        given=(Field("payload", "Payload", "payload", required=True),),
        about="It is handed out again with the new payload; the old one stays on record.",
    ),
)
