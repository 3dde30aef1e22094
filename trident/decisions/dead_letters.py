"""Decisions about dead letters: requeue, drop, and hand out again with another payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.source.files.rows import editable
from stormproof.trident.decisions.letter_choice import (
    ChosenLetters,
    Letter,
    LetterFilter,
    Letters,
    letters_of,
    not_dead,
)
from stormproof.trident.ledger import sink_records
from stormproof.trident.ledger.tables import Reject
from stormproof.trident.terms.transaction_states import OperatorAction, RejectState
from stormproof.trident.terms.wording import counted, local_time

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores
    from stormproof.trident.ledger.database import Tx


@dataclass(frozen=True, slots=True)
class Disposed:
    """Dead letters that were requeued or dropped, and ids that were no undecided dead letters (any more)."""

    topology: str
    requeued: bool
    ids: tuple[str, ...]
    """Messages that had failed too often."""
    rejects: tuple[Reject, ...]
    """What sinks had rejected."""
    not_dead: tuple[str, ...]
    refused: Mapping[str, str]
    """Why others of the rejected messages cannot be opened again."""
    by: str

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages, each once."""
        return ChosenLetters(self.ids, self.rejects, ()).messages

    def lines(self) -> list[str]:
        """What was done, for people."""
        done = "requeued" if self.requeued else "dropped"
        number = len(self.ids) + len(self.rejects)
        found = [f"{self.topology}: {counted(number, 'dead letter')} {done} by {self.by}"]
        if self.rejects and self.requeued:
            found.append(
                f"{len(self.rejects)} of them for the sinks that rejected them alone: the other sinks hold them"
            )
        return found


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
    """Raise UsageError unless ids, a filter that restricts something, or all of them is chosen, and only one of these.

    With ids, a sink restricts them further.
    """
    if sum((bool(ids), not (where.without_sink if ids else where).is_empty, every)) != 1:
        raise UsageError(
            "name the messages' ids, or --all, or a filter such as --reason or --sink, and only one of these; with ids, "
            "--sink restricts them to one sink"
        )


def dispose(
    stores: Stores,
    letters: Letters,
    chosen: ChosenLetters,
    *,
    requeue: bool,
    by: str,
    why: str,
    ids: Sequence[str] = (),
) -> Disposed:
    """Requeue or drop these dead letters, in one transaction; those that are decided already are left out.

    What a sink rejected is opened again for that sink alone, or given up there. `ids` are the messages that a person named.

    Raises:
        UsageError: a payload is not the one that was set aside, or a rejected message is to be opened again and its source
            keeps nothing in the ledger's database; nothing was done.
    """
    refused: dict[str, str] = {}
    if chosen.rejects and requeue:
        letters.require_sources()
    with stores.transaction(letters.row) as tx:
        tx.confirm()
        done = letters.dispose(chosen.ids, requeue=requeue, by=by, why=why, tx=tx.raw)
        mine = sink_records.undecided_rejects(tx, [one.id for one in chosen.rejects])
        if requeue:
            mine, refused = _opened_again(stores, letters, tx, mine, by=by, why=why)
        else:
            sink_records.drop_retrying(tx, done, by=by, why=why)
        sink_records.decide_rejects(
            tx, [one.id for one in mine], RejectState.RETRYING if requeue else RejectState.DROPPED, by=by, why=why
        )
        _record(tx, OperatorAction.RETRY_REJECT if requeue else OperatorAction.DROP_REJECT, mine, by=by, why=why)
    known = {*done, *(one.message for one in mine), *refused}
    missed = tuple(one for one in ids if one not in known)
    return Disposed(letters.topology, requeue, tuple(done), tuple(mine), missed, refused, by)


def _opened_again(
    stores: Stores, letters: Letters, tx: Tx, mine: Sequence[Reject], *, by: str, why: str
) -> tuple[list[Reject], dict[str, str]]:
    """Open rejected messages again; gives those that were opened, and why others cannot be, by message."""
    with stores.audit.snapshot() as snapshot:
        graphs = snapshot.graphs(letters.row.incarnation)
    present = graphs[-1].sinks
    refused: dict[str, str] = {}
    busy = sink_records.retrying(tx, {one.message for one in mine if one.message is not None})
    payloads: dict[str, bytes] = {}
    altered = sink_records.altered_rejects(tx, [one.id for one in mine])
    for one in mine:
        name = one.message or f"a row of txid {one.txid} at sink {one.sink}"
        if letters.row.guarantee == Guarantee.AT_MOST_ONCE.value:
            refused[name] = "under at-most-once no message is opened again; put it to the source anew, and drop it here"
        elif one.message is None:
            refused[name] = "it belongs to no single message, and cannot be opened again"
        elif one.id in altered:
            refused[name] = (
                "its payload or its row is not what was rejected: somebody changed it in the ledger. Drop it"
            )
        elif one.payload is None:
            refused[name] = "its source gave no payload, and it cannot be opened again"
        elif one.message in busy:
            refused[name] = "it is being retried for another sink; requeue it for this one after that"
        elif one.sink not in present:
            refused[name] = f"the topology has no sink {one.sink!r} any more"
        else:
            payloads[one.message] = one.payload
    opened_again = set(letters.open_again(payloads, by=by, why=why, tx=tx.raw))
    for message in sorted(payloads.keys() - opened_again):
        refused[message] = "it waits for a retry already"
    return [one for one in mine if one.message in opened_again and one.message not in refused], refused


def _record(tx: Tx, action: OperatorAction, done: Sequence[Reject], *, by: str, why: str) -> None:
    """One event for each txid and sink: who decided, and about how many messages."""
    for (txid, sink), number in Counter((one.txid, one.sink) for one in done).items():
        detail: dict[str, Json] = {"sink": sink, "rejects": number}
        tx.decided(action, by=by, why=why, txid=txid, sink=sink, detail=detail)


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


def retry_waiting(
    stores: Stores, topology: str, *, by: str, why: str, told: Callable[[str], None] = lambda _: None
) -> RetriedNow:
    """Hand out now what waits for a retry; the running driver sees it when it looks for messages next.

    `told` gets whose messages are out of reach.

    Raises:
        UsageError: there is no such topology, or no message of it is within reach.
    """
    with letters_of(stores, topology) as letters:
        if letters.elsewhere:
            told(letters.out_of_reach)
        letters.require_sources()
        with stores.transaction(letters.row) as tx:
            tx.confirm()
            retried = letters.retry_now(by=by, why=why, tx=tx.raw)
    return RetriedNow(topology, retried, by, why)


def undecided_letter(letters: Letters, message: str) -> Letter:
    """The newest dead letter of a message at all sinks, about which nobody has decided.

    Raises:
        UsageError: there is none.
    """
    letters.require_sources()
    found = letters.of_message(message)
    if not found:
        raise not_dead(letters, message)
    of_source = [one for one in found if one.sink is None]
    if not of_source:
        sinks = ", ".join(sorted({one.component for one in found}))
        raise UsageError(
            f"message {message} of topology {letters.topology!r} was rejected by {sinks} alone: the other sinks hold it as "
            "it is, so its payload stays. Requeue it once the table takes it, or drop it",
            message=message,
        )
    require_undecided(of_source[-1])
    return of_source[-1]


def require_undecided(one: Letter) -> None:
    """Raise UsageError if somebody has decided about a dead letter."""
    if one.disposal is not None:
        at = "" if one.disposed_at is None else f" {local_time(one.disposed_at)}"
        raise UsageError(
            f"message {one.id} of topology {one.topology!r} was {one.state}{at} by {one.by}, and is no dead letter any "
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
    assert one.id is not None
    assert one.payload is not None
    message, before = one.id, editable(one.payload)
    if not exact and given.endswith(b"\n") and not before.endswith(b"\n"):
        given = given.removesuffix(b"\n").removesuffix(b"\r")
    if given == before:
        raise UsageError(
            f"message {message} of topology {letters.topology!r}: the payload is the old one, and nothing was done. To try "
            f"it again: stormproof dead-letters requeue {letters.topology} {message}",
            message=message,
        )
    with stores.transaction(letters.row) as tx:
        tx.confirm()
        was_dead = letters.edit(message, given, by=by, why=why, tx=tx.raw)
    if not was_dead:
        undecided_letter(letters, message)
        raise not_dead(letters, message)
    failpoint("dead_letter.after")
    after = [found for found in letters.of_message(message) if found.new_payload is not None][-1]
    assert after.payload is not None
    assert after.new_payload is not None
    old, new = (sha256(payload).hexdigest() for payload in (after.payload, after.new_payload))
    return Edited(letters.topology, message, by, why, old, new, len(before), len(given))
