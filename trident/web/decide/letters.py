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

FILTERS: Final = ("source", "reason", "component", "error_class", "match", "since", "until")
_CHOICE: Final = (
    Field("source", "Source or spout"),
    Field("reason", "Reason", hint="error, timeout, ..."),
    Field("component", "Component", hint="of the last failure"),
    Field("error_class", "Error class", hint="as ValueError"),
    Field("match", "Text", hint="in error or payload"),
    Field("since", "Dead since", hint="a time, or an age as 2h"),
    Field("until", "Dead before", hint="a time, or an age as 2h"),
    ALL,
)


def _filter(choice: Choice) -> LetterFilter:
    return filter_of((), **of_choice(choice, FILTERS))


def _found(stores: Stores, choice: Choice) -> ChosenLetters:
    with letters_of(stores, choice.topology) as letters:
        return letters.choose(_filter(choice), choice.texts("id"))


def _looks(verb: str) -> Looks:
    def look(stores: Stores, choice: Choice) -> Look:
        ids, every = choice.texts("id"), choice.is_on("all")
        stores.topology(choice.topology)
        nothing = require_chosen(ids, is_empty=_filter(choice).is_empty, every=every)
        if nothing is not None:
            return Look({}, nothing=nothing)
        found = _found(stores, choice)
        classes = [(one.error_class, one.reason, one.component, str(one.undecided)) for one in found.classes]
        missed = len(set(ids).difference(found.ids))
        return Look(
            {},
            len(found.ids),
            "dead letter",
            found.ids,
            (f"{missed} of those selected are decided about already",) if missed else (),
            (("error class", "reason", "failed in", "dead letters"), *classes),
            None if found.ids else "No undecided dead letter is chosen.",
            command_of(f"dead-letters {verb}", choice.topology, ids, of_choice(choice, FILTERS), every=every),
        )

    return look


def _does(*, requeue: bool) -> Does:
    def do(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
        ids: tuple[str, ...] = look.pinned
        now = set(_found(stores, choice).ids)
        told = changes(set(ids), now, "dead letter")
        numbers = canary_numbers({field.name: given.text(field.name) for field in CANARY}) if requeue else None
        if numbers is not None:
            rules = CanaryRules(*numbers)
            canaries.require_driver(stores, choice.topology)
            run = CanaryRun(
                lambda told_, stopped: canaries.requeue_canary(
                    *(stores, choice.topology, ids, rules),
                    by=given.by,
                    why=given.why,
                    told=told_,
                    stopped=stopped,
                )
            )
            return Done((f"{choice.topology}: a canary of {len(ids)} dead letters has begun", *told), canary=run)
        with letters_of(stores, choice.topology) as letters:
            done = dead_letters.dispose(stores, letters, ids, requeue=requeue, by=given.by, why=given.why)
        return Done((*done.lines(), *told))

    return do


# -- edit --------------------------------------------------------------------------------------------------------------


def _look_edit(stores: Stores, choice: Choice) -> Look:
    message = choice.text("id")
    if message is None:
        raise UsageError("an edit is of one message: the address lacks id=")
    with letters_of(stores, choice.topology) as letters:
        one = dead_letters.undecided_letter(letters, message)
    payload = editable(one.letter.payload)
    command = f"stormproof dead-letters edit {quoted(choice.topology)} {quoted(message)} --payload FILE"
    text = text_to_edit(payload)
    facts = {"message": message, "failed": f"{one.letter.times_failed} times", "dead since": str(one.letter.dead_at)}
    if text is None:
        why = "The payload is no text that a form of a browser keeps byte by byte. Edit it by the command below."
        return Look(facts, 1, "dead letter", None, nothing=why, command=command)
    return Look(
        facts,
        1,
        "dead letter",
        payload,
        (f"the payload has {len(payload)} bytes; the error was: {one.letter.error}",),
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
        about="They are handed out again, with their failures counted from 0.",
    ),
    Action(
        "drop",
        "Drop dead letters",
        "Drop",
        _looks("drop"),
        _does(requeue=False),
        _CHOICE,
        warning="They are given up for good: nothing hands them out again.",
        about="They are given up, on record.",
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
