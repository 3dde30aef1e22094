"""Dead letters of one subscription for an operator: requeue, drop, edit. It works without the source itself."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import storable_text
from stormproof.core.contract.dead_letter import DeadLetter, Disposal, LetterHead
from stormproof.core.pending.connector import Connector
from stormproof.core.pending.rows import PendingStore, Subscriber


class DeadLetters:
    """The dead letters that a store has of a subscription. Fences nobody: a driver may run meanwhile."""

    def __init__(self, store: PendingStore, who: Subscriber, form: type[Connector]) -> None:
        self._store = store
        self._who = who
        self._form = form

    @property
    def name(self) -> str:
        """The source's name."""
        return self._who.source

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every one, those that were disposed of included, oldest first."""
        with self._store.rows(self._who) as rows:
            return rows.dead_letters(self._form.shown_id)

    def of_message(self, message: str) -> tuple[DeadLetter, ...]:
        """The dead letters of one message, by its shown id, oldest first."""
        number = self._form.number_of(message)
        if number is None:
            return ()
        with self._store.rows(self._who) as rows:
            return rows.dead_letters(self._form.shown_id, of=number)

    def each(self) -> Generator[DeadLetter]:
        """All of them, a few at a time; a transaction is open until the iterator is closed."""
        with self._store.rows(self._who) as rows:
            yield from rows.each_dead_letter(self._form.shown_id)

    def heads(self, *, undecided: bool) -> Generator[LetterHead]:
        """What filters need of all of them, likewise; no payload is read."""
        with self._store.rows(self._who) as rows:
            yield from rows.letter_heads(self._form.shown_id, undecided=undecided)

    def requeue(self, ids: Sequence[str], *, by: str, why: str, tx: object | None = None) -> tuple[str, ...]:
        """Hand these out again, with their failures counted from 0; returns those that were dead.

        Raises:
            UsageError: a payload is not the one that was set aside; nothing was changed.
        """
        return self._dispose(ids, Disposal.REQUEUE, by, why, tx)

    def drop(self, ids: Sequence[str], *, by: str, why: str, tx: object | None = None) -> tuple[str, ...]:
        """Give these up for good; returns those that were dead."""
        return self._dispose(ids, Disposal.DROP, by, why, tx)

    def edit(self, message: str, payload: bytes, *, by: str, why: str, tx: object | None = None) -> bool:
        """Hand one out again with another payload; the old one stays on record. False where it is none.

        Raises:
            UsageError: the source cannot store such a payload; nothing was changed.
        """
        number = self._form.number_of(message)
        if number is None:
            return False
        with self._store.rows(self._who, tx) as rows:
            old = rows.undecided(*number)
            if old is None:
                return False
            stored = self._form.edited(old, payload)
            rows.dispose([number], Disposal.EDIT, by=storable_text(by), why=storable_text(why), payload=stored)
            failpoint("dead_letter.in_transaction")
        return True

    def open_again(
        self, messages: Mapping[str, bytes], *, by: str, why: str, tx: object | None = None
    ) -> tuple[str, ...]:
        """Hand out confirmed messages again, given by their ids with their payloads; returns those that are handed out.

        Their failures are counted from 0, and the first entry of their history is this decision. A message that waits for a
        retry already is left out.
        """
        numbers = {shown: number for shown in messages if (number := self._form.number_of(shown)) is not None}
        entry: dict[str, Json] = {"reason": "retry_reject", "by": storable_text(by), "why": storable_text(why)}
        with self._store.rows(self._who, tx) as rows:
            made = rows.open_again([(*number, messages[shown]) for shown, number in numbers.items()], entry)
        return tuple(self._form.shown_id(*number) for number in made)

    def retry_now(self, *, by: str, why: str, tx: object | None = None) -> int:
        """Hand out what waits for a retry now; gives how many messages that are. Their failures stay counted."""
        entry: dict[str, Json] = {"reason": "retry_now", "by": storable_text(by), "why": storable_text(why)}
        with self._store.rows(self._who, tx) as rows:
            return rows.wait_at_most(0.0, entry)

    def unconfirmed(self, ids: Sequence[str]) -> Mapping[str, bool]:
        """Those of these messages that wait for a retry or are undecided dead letters; and whether each has failed since it
        was handed out anew.
        """
        numbers = {number: shown for shown in ids if (number := self._form.number_of(shown)) is not None}
        with self._store.rows(self._who) as rows:
            found = rows.unconfirmed(list(numbers))
        return {numbers[number]: has_failed for number, has_failed in found.items()}

    def close(self) -> None:
        """Let connections go."""
        self._store.close()

    def _dispose(self, ids: Sequence[str], disposal: Disposal, by: str, why: str, tx: object | None) -> tuple[str, ...]:
        numbers = [number for shown in ids if (number := self._form.number_of(shown)) is not None]
        with self._store.rows(self._who, tx) as rows:
            if disposal is Disposal.REQUEUE and (altered := rows.altered(numbers)):
                shown = self._form.shown_id(*altered[0])
                raise UsageError(
                    f"{self._form.NOUN} {self.name}: the payload of {len(altered)} of these dead letters is not the one "
                    f"that was set aside, such as that of {shown}: somebody changed it in the ledger. Nothing was requeued. "
                    "Put it right with `stormproof dead-letters edit`, or drop it",
                    message=shown,
                )
            done = rows.dispose(numbers, disposal, by=storable_text(by), why=storable_text(why))
            failpoint("dead_letter.in_transaction")
        return tuple(self._form.shown_id(*number) for number in done)
