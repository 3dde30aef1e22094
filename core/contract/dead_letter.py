"""A dead letter: a message that failed too often, with its payload and everything that happened to it.

When a failed message becomes one, `stormproof.core.pending.source` decides.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from stormproof.core.base.errors import Json


class Disposal(StrEnum):
    """What an operator decided about a dead letter."""

    REQUEUE = "requeue"
    EDIT = "edit"
    """Requeued with another payload."""
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that is not handed out again unless an operator requeues it; `history` has an entry for each failure.

    `disposal`, `by`, `why` and `disposed_at` are None until an operator decides. A requeued message that fails too often
    again becomes another dead letter, and the earlier one stays as it was. `payload` is what failed, also after an edit;
    `new_payload` is what the edit put in its place, None without an edit.
    """

    id: int
    origin: int
    shown_id: str
    subscription: str
    payload: bytes
    reason: str
    error: str
    times_opened: int
    times_failed: int
    history: tuple[dict[str, Json], ...]
    dead_at: datetime
    disposal: Disposal | None = None
    by: str | None = None
    why: str | None = None
    disposed_at: datetime | None = None
    new_payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class LetterHead:
    """What filters and counts need of a dead letter; not its payload, error and history, which may be large."""

    shown_id: str
    reason: str
    error_class: str
    component: str
    dead_at: datetime
    disposal: Disposal | None

    @staticmethod
    def of(letter: DeadLetter) -> LetterHead:
        """Of a dead letter."""
        kind = error_class(letter.reason, letter.error)
        return LetterHead(letter.shown_id, letter.reason, kind, component_of(letter), letter.dead_at, letter.disposal)


def component_of(letter: DeadLetter) -> str:
    """The component of its last failure; empty where none is known."""
    found = [entry["component"] for entry in letter.history if entry.get("component")]
    return str(found[-1]) if found else ""


COMPONENT_SQL: Final = (
    "coalesce((select e.entry ->> 'component' from jsonb_array_elements(history) with ordinality as e (entry, place)"
    " where coalesce(e.entry ->> 'component', '') <> '' order by e.place desc limit 1), '')"
)
"""The same as `component_of`, over the columns of a table of dead letters."""


def error_class(reason: str, error: str) -> str:
    """The kind of a dead letter's error: the class of the exception where a function raised one, else the reason.

    Messages with errors of one kind mostly have one cause, whatever values the errors name.
    """
    named = _CLASS.match(error) if reason in ("error", "sink_error") else None
    return named[1] if named else reason


_CLASS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*): ")
"""The start of an error's text that was made from an exception; a sentence has a space before its colon."""
CLASS_SQL: Final = (
    "case when reason in ('error', 'sink_error')"
    " then coalesce(substring(error from '^([A-Za-z_][A-Za-z0-9_.]*): '), reason) else reason end"
)
"""The same as `error_class`, over the columns of a table of dead letters; the views of the audit have the same."""


def disposal_entry(
    disposal: Disposal, at: datetime, by: str, why: str, payload: bytes, new_payload: bytes | None
) -> dict[str, Json]:
    """The entry of an operator's decision in a message's history; an edit's has the SHA-256 of both payloads."""
    entry: dict[str, Json] = {"at": at.isoformat(), "reason": disposal.value, "by": by, "why": why}
    if new_payload is not None:
        entry["payload_sha256"] = hashlib.sha256(payload).hexdigest()
        entry["new_payload_sha256"] = hashlib.sha256(new_payload).hexdigest()
    return entry


DISPOSAL_ENTRY_SQL: Final = (
    "jsonb_build_object('at', disposed_at, 'reason', disposal, 'by', disposed_by, 'why', disposed_why)"
    " || case when new_payload is null then '{}'::jsonb else jsonb_build_object("
    "'payload_sha256', encode(sha256(payload), 'hex'), 'new_payload_sha256', encode(sha256(new_payload), 'hex')) end"
)
"""The same as `disposal_entry`, over the columns of a table of dead letters."""
