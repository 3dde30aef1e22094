"""Decisions about dead letters: requeue, drop, and hand out again with another payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from stormproof.core.errors import UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.source.files.rows import editable
from stormproof.trident.decisions.letters import Letter, Letters, not_dead
from stormproof.trident.ledger import rejects
from stormproof.trident.wording import counted, local_time

if TYPE_CHECKING:
    from stormproof.trident.decisions.letter_filter import LetterFilter
    from stormproof.trident.stores import Stores


@dataclass(frozen=True, slots=True)
class Disposed:
    """Dead letters that were requeued or dropped, and ids that were no undecided dead letters (any more)."""

    topology: str
    requeued: bool
    done: tuple[str, ...]
    not_dead: tuple[str, ...]
    by: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        done = "requeued" if self.requeued else "dropped"
        return [f"{self.topology}: {counted(len(self.done), 'dead letter')} {done} by {self.by}"]


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter that is handed out again with another payload; the hashes are SHA-256 of what is stored."""

    topology: str
    edited: str
    by: str
    why: str
    payload_sha256: str
    new_payload_sha256: str
    bytes: int
    new_bytes: int

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [
            f"{self.topology}: {self.edited} is handed out again with its new payload ({counted(self.new_bytes, 'byte')}, "
            f"was {self.bytes}); the old one stays on record"
        ]


def require_choice(ids: Sequence[str], where: LetterFilter, *, every: bool) -> None:
    """Raise UsageError unless ids, a filter that restricts something, or all of them is chosen, and only one of these."""
    if sum((bool(ids), not where.is_empty, every)) != 1:
        raise UsageError(
            "name the messages' ids, or --all, or a filter such as --reason or --match, and only one of these"
        )


def dispose(stores: Stores, letters: Letters, ids: Sequence[str], *, requeue: bool, by: str, why: str) -> Disposed:
    """Requeue or drop the dead letters with these ids, in one transaction; those that are decided already are left out."""
    with stores.transaction(stores.topology(letters.topology)) as tx:
        tx.confirm()
        done = letters.dispose(ids, requeue=requeue, by=by, why=why, tx=tx.raw)
        if not requeue:
            rejects.drop_retrying(tx, done, by=by, why=why)
    known = set(done)
    missed = tuple(one for one in ids if one not in known)
    return Disposed(letters.topology, requeue, tuple(done), missed, by)


@dataclass(frozen=True, slots=True)
class RetriedNow:
    """How many messages waited for a retry and are handed out now."""

    topology: str
    retried: int
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology}: {counted(self.retried, 'waiting message')} handed out now by {self.by}"]


def retry_now(stores: Stores, letters: Letters, *, by: str, why: str) -> RetriedNow:
    """Hand out now what waits for a retry; the running driver sees it when it looks for messages next."""
    with stores.transaction(stores.topology(letters.topology)) as tx:
        tx.confirm()
        retried = letters.retry_now(by=by, why=why, tx=tx.raw)
    return RetriedNow(letters.topology, retried, by, why)


def undecided_letter(letters: Letters, message: str) -> Letter:
    """The newest dead letter of a message, about which nobody has decided.

    Raises:
        UsageError: there is none.
    """
    found = letters.of_message(message)
    if not found:
        raise not_dead(letters, message)
    require_undecided(found[-1])
    return found[-1]


def require_undecided(one: Letter) -> None:
    """Raise UsageError if somebody has decided about a dead letter."""
    letter = one.letter
    if letter.disposal is not None:
        at = "" if letter.disposed_at is None else f" {local_time(letter.disposed_at)}"
        raise UsageError(
            f"message {one.id} of topology {one.topology!r} was {one.state}{at} by {letter.by}, and is no dead letter any "
            f"more. What became of it: stormproof audit message {one.topology} {one.id}",
            message=one.id,
        )


def edit(stores: Stores, letters: Letters, one: Letter, given: bytes, *, exact: bool, by: str, why: str) -> Edited:
    """Requeue an undecided dead letter with another payload.

    A newline at the end that the old payload did not have is taken off, unless `exact`: editors add it.

    Raises:
        UsageError: the payload is the old one, or the source cannot store it, or somebody has decided meanwhile; nothing was
            done.
    """
    message, before = one.id, editable(one.letter.payload)
    if not exact and given.endswith(b"\n") and not before.endswith(b"\n"):
        given = given.removesuffix(b"\n").removesuffix(b"\r")
    if given == before:
        raise UsageError(
            f"message {message} of topology {letters.topology!r}: the payload is the old one, and nothing was done. To try "
            f"it again: stormproof dead-letters requeue {letters.topology} {message}",
            message=message,
        )
    with stores.transaction(stores.topology(letters.topology)) as tx:
        tx.confirm()
        was_dead = letters.edit(message, given, by=by, why=why, tx=tx.raw)
    if not was_dead:
        require_undecided(letters.of_message(message)[-1])
        raise not_dead(letters, message)
    failpoint("dead_letter.after")
    after = [found.letter for found in letters.of_message(message) if found.letter.new_payload is not None][-1]
    assert after.new_payload is not None
    old, new = (sha256(payload).hexdigest() for payload in (after.payload, after.new_payload))
    return Edited(letters.topology, message, by, why, old, new, len(before), len(given))
