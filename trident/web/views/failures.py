"""Dead letters and rejects: by class of error, one by one, and one of them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from stormproof.core.source.files.rows import editable, shown_payload
from stormproof.trident.audit.questions import QuestionAnswer, QuestionFilter, ask
from stormproof.trident.decisions.letter_choice import Letter, letters_of, named, not_dead
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.terms.wording import parse_time
from stormproof.trident.web.visit import Visit

SHOWN = 100
FILTERS = ("what", "source", "sink", "reason", "error_class", "state")


@dataclass(frozen=True, slots=True)
class Failures:
    """What failed: counted by class of error, and the newest of them."""

    classes: tuple[Mapping[str, Any], ...]
    newest: QuestionAnswer


def asked_of(visit: Visit, **more: Any) -> QuestionFilter:
    """The filters of the address; without a state: those about which nobody has decided; ``any``: all of them."""
    given: dict[str, Any] = {name: visit.text(name) for name in FILTERS}
    given["state"] = {None: "undecided", "any": None}.get(given["state"], given["state"])
    return QuestionFilter(
        topology=visit.text("topology"),
        since=parse_time(visit.text("since"), visit.now),
        until=parse_time(visit.text("until"), visit.now),
        **{**given, **more},
    )


async def failures(visit: Visit) -> Response:
    """The classes, and the newest that the filters leave."""
    limit = visit.number("limit", SHOWN, low=1, high=1_000)
    chosen, grouped = asked_of(visit, limit=limit), asked_of(visit, limit=200, error_class=None, group=_GROUP)

    def question(stores: Stores) -> Failures:
        classes = ask(stores.audit, QUESTIONS["dead-letters"], grouped)
        return Failures(classes.rows, ask(stores.audit, QUESTIONS["dead-letters"], chosen))

    return visit.page(
        "failures.html",
        title="Failures",
        topology_name=chosen.topology,
        chosen=chosen,
        found=await visit.ask(question, *sorted(visit.values().items())),
        limit=limit,
        states=("undecided", "requeue", "edit", "drop", "retrying", "retried", "dropped"),
    )


_GROUP = ("topology", "what", "error_class", "state")


PAYLOAD_MAX: Final = 65_536
"""Bytes of a payload that are shown."""


@dataclass(frozen=True, slots=True)
class ShownPayload:
    """A payload's beginning as text, and its length in bytes."""

    text: str
    length: int

    @staticmethod
    def of(payload: bytes | None) -> ShownPayload | None:
        """Of a stored payload."""
        return None if payload is None else ShownPayload(shown_payload(payload[:PAYLOAD_MAX]), len(editable(payload)))


@dataclass(frozen=True, slots=True)
class ShownFailure:
    """A dead letter, whose payloads are held as they are shown."""

    letter: Letter
    payload: ShownPayload | None
    new_payload: ShownPayload | None


def _read(stores: Stores, name: str, shown_id: str) -> tuple[ShownFailure, ...]:
    """The dead letters of a message, the newest first."""
    with letters_of(stores, name) as letters:
        (message,) = named(stores, name, [shown_id])
        found = letters.of_message(message)
        if not found:
            raise not_dead(letters, message)
    newest_first = sorted(found, key=lambda one: one.dead_at, reverse=True)
    return tuple(
        ShownFailure(
            replace(one, payload=None, new_payload=None), ShownPayload.of(one.payload), ShownPayload.of(one.new_payload)
        )
        for one in newest_first
    )


async def failure(visit: Visit) -> Response:
    """One failed message, whole, but for its payload and what may quote it."""
    name, shown_id = visit.required("topology"), visit.required("id")
    found = await visit.ask(lambda stores: _read(stores, name, shown_id), "failure", name, shown_id)
    return _page(visit, name, shown_id, found, unmasked=False)


async def payload(visit: Visit) -> Response:
    """The same with its payload, for a person who may see it and asked for it. It is in no address, and nothing keeps it."""
    name, shown_id = visit.form.get("topology", ""), visit.form.get("id", "")
    stores = await visit.site.reader.call(visit.site.reader.opened)
    found = await visit.site.reader.call(_read, stores, name, shown_id)
    return _page(visit, name, shown_id, found, unmasked=True)


def _page(visit: Visit, name: str, shown_id: str, found: Sequence[ShownFailure], *, unmasked: bool) -> Response:
    return visit.page(
        "failure.html",
        title=f"Failed message {shown_id}",
        topology_name=name,
        id=found[0].letter.id,
        found=found,
        unmasked=unmasked,
    )
