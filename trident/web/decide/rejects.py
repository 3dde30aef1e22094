"""Rejects: open them again for the sink that rejected them, or drop them there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.trident.decisions import canaries
from stormproof.trident.decisions.canary import CanaryRules
from stormproof.trident.decisions.rejects import RejectFilter, decide, filter_of, rejects_of
from stormproof.trident.ledger.rows import Reject
from stormproof.trident.web.decide.action import Action, CanaryRun, Choice, Does, Done, Field, Given, Look, Looks
from stormproof.trident.web.decide.choosing import (
    ALL,
    CANARY,
    canary_numbers,
    changes,
    command_of,
    of_choice,
    require_chosen,
)

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores

FILTERS: Final = ("sink", "sqlstate", "first", "last", "since")
_CHOICE: Final = (
    Field("sink", "Sink"),
    Field("sqlstate", "SQLSTATE", hint="23505, or the class 23"),
    Field("first", "From txid", "number"),
    Field("last", "To txid", "number"),
    Field("since", "Rejected since", hint="a time, or an age as 2h"),
    ALL,
)


def _filter(choice: Choice) -> RejectFilter:
    return filter_of(
        choice.text("sink"),
        choice.text("sqlstate"),
        _txid(choice, "first"),
        _txid(choice, "last"),
        choice.text("since"),
        undecided=True,
    )


def _txid(choice: Choice, name: str) -> int | None:
    text = choice.text(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{name}: {text[:40]!r} is no txid")
    return None if text is None else int(text)


def _found(stores: Stores, choice: Choice) -> list[Reject]:
    ids = set(choice.texts("id"))
    found = rejects_of(stores, choice.topology, _filter(choice), texts=False)
    return [one for one in found if not ids or one.message in ids]


def _key(one: Reject) -> str:
    return f"{one.id}"


def _looks(verb: str) -> Looks:
    def look(stores: Stores, choice: Choice) -> Look:
        ids, every, chosen = choice.texts("id"), choice.is_on("all"), _filter(choice)
        stores.topology(choice.topology)
        nothing = require_chosen(ids, is_empty=bool(ids) or chosen.is_empty, every=every)
        if nothing is not None:
            return Look({}, nothing=nothing)
        found = _found(stores, choice)
        numbers = Counter((one.sink, one.sqlstate or "-") for one in found)
        missed = len(set(ids) - {one.message for one in found})
        return Look(
            {},
            len(found),
            "reject",
            tuple(found),
            (f"{missed} of those selected are decided about already",) if missed else (),
            (("sink", "SQLSTATE", "rejects"), *((*key, str(number)) for key, number in numbers.most_common())),
            None if found else "No undecided reject is chosen.",
            command_of(f"rejects {verb}", choice.topology, ids, of_choice(choice, FILTERS), every=every),
        )

    return look


def _does(*, retry: bool) -> Does:
    def do(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
        found: tuple[Reject, ...] = look.pinned
        now = {_key(one) for one in _found(stores, choice)}
        told = changes({_key(one) for one in found}, now, "reject")
        numbers = canary_numbers({field.name: given.text(field.name) for field in CANARY}) if retry else None
        if numbers is not None:
            rules = CanaryRules(*numbers)
            canaries.require_driver(stores, choice.topology)
            run = CanaryRun(
                lambda told_, stopped: canaries.retry_canary(
                    *(stores, choice.topology, found, rules),
                    by=given.by,
                    why=given.why,
                    told=told_,
                    stopped=stopped,
                )
            )
            return Done((f"{choice.topology}: a canary of {len(found)} rejects has begun", *told), canary=run)
        done = decide(stores, choice.topology, found, retry=retry, by=given.by, why=given.why)
        refused = [f"{message}: {reason}" for message, reason in done.refused.items()]
        return Done((*done.lines(), *told, *refused), ok=not refused)

    return do


ACTIONS: Final = (
    Action(
        "retry-rejects",
        "Retry rejects",
        "Retry",
        _looks("retry"),
        _does(retry=True),
        _CHOICE,
        CANARY,
        about="Their messages are opened again, for the sinks that rejected them alone: the other sinks hold them.",
    ),
    Action(
        "drop-rejects",
        "Drop rejects",
        "Drop",
        _looks("drop"),
        _does(retry=False),
        _CHOICE,
        warning="They are given up for good at the sinks that rejected them.",
        about="They are given up, on record.",
    ),
)
