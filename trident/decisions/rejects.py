"""Decisions about rejects: messages that a sink rejected are opened again for that sink, or given up there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from stormproof.core.errors import Json, UsageError
from stormproof.core.guarantee import Guarantee
from stormproof.trident.decisions.letters import letters_of
from stormproof.trident.ledger import events, rejects
from stormproof.trident.ledger.rows import Reject
from stormproof.trident.transaction_states import OperatorAction, RejectState
from stormproof.trident.wording import counted, moment

if TYPE_CHECKING:
    from stormproof.trident.ledger.tx import Tx
    from stormproof.trident.stores import Stores


@dataclass(frozen=True, slots=True)
class RejectFilter:
    """Each field that is not None must hold; `sqlstate` is a whole one, or the two characters of a class."""

    sink: str | None = None
    sqlstate: str | None = None
    first: int | None = None
    last: int | None = None
    since: datetime | None = None
    undecided: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether every undecided reject passes."""
        return (self.sink, self.sqlstate, self.first, self.last, self.since) == (None,) * 5


def filter_of(
    sink: str | None, sqlstate: str | None, first: int | None, last: int | None, since: str | None, *, undecided: bool
) -> RejectFilter:
    """The filter that a command's options name.

    Raises:
        UsageError: a time cannot be read, or an SQLSTATE has neither two nor five characters.
    """
    if sqlstate is not None and len(sqlstate) not in (2, 5):
        raise UsageError(f"--sqlstate {sqlstate}: write one of five characters, as in 23505, or a class, as in 23")
    at = None if since is None else moment("since", since)
    return RejectFilter(sink, sqlstate, first, last, at, undecided)


def rejects_of(
    stores: Stores,
    topology: str,
    where: RejectFilter | None = None,
    *,
    message: str | None = None,
    payloads: bool = False,
    texts: bool = True,
    limit: int | None = None,
) -> list[Reject]:
    """A topology's rejects, or a message's, oldest first; without `texts`, errors and rows are empty.

    Raises:
        UsageError: there is no such topology.
    """
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        chosen = {} if where is None else asdict(where)
        return snapshot.rejects(row.incarnation, message=message, payloads=payloads, texts=texts, limit=limit, **chosen)


@dataclass(frozen=True, slots=True)
class RejectsDecided:
    """Rejects that are retried or dropped, and why others cannot be retried, by message."""

    topology: str
    retried: bool
    done: tuple[Reject, ...]
    refused: Mapping[str, str]
    by: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        done = "retried" if self.retried else "dropped"
        found = [f"{self.topology}: {counted(len(self.done), 'reject')} {done} by {self.by}"]
        if self.done and self.retried:
            found.append("the messages are opened again, for the sinks that rejected them alone")
        return found


def require_choice(ids: Sequence[str], where: RejectFilter, *, every: bool) -> None:
    """Raise UsageError unless ids, a filter that restricts something, or all of them is chosen, and only one of these.

    With ids, a filter restricts them further.
    """
    if sum((bool(ids), not ids and not where.is_empty, every)) != 1:
        raise UsageError("name the messages' ids, or --all, or a filter such as --sink, and only one of these")


def decide(stores: Stores, topology: str, found: Sequence[Reject], *, retry: bool, by: str, why: str) -> RejectsDecided:
    """Retry or drop these rejects, in one transaction; those that are decided already are left out.

    Raises:
        UsageError: there is no such topology, or (of a retry) its source keeps nothing in the ledger's database.
    """
    if not found:
        return RejectsDecided(topology, retry, (), {}, by)
    if retry:
        return _retry(stores, topology, found, by=by, why=why)
    with stores.transaction(stores.topology(topology)) as tx:
        mine = _undecided(tx, found)
        rejects.decide(tx, [one.id for one in mine], RejectState.DROPPED, by=by, why=why)
        _record(tx, OperatorAction.DROP_REJECT, mine, by=by, why=why)
    return RejectsDecided(topology, retry, tuple(mine), {}, by)


def _retry(stores: Stores, topology: str, found: Sequence[Reject], *, by: str, why: str) -> RejectsDecided:
    row = stores.topology(topology)
    with stores.audit.snapshot() as snapshot:
        graphs = snapshot.graphs(row.incarnation)
    present = graphs[-1].sinks if graphs else None
    with letters_of(stores, row.name) as sources, stores.transaction(row) as tx:
        mine = _undecided(tx, found)
        refused: dict[str, str] = {}
        busy = rejects.retrying(tx, {one.message for one in mine if one.message is not None})
        payloads: dict[str, bytes] = {}
        altered = rejects.altered(tx, [one.id for one in mine])
        for one in mine:
            name = one.message or f"a row of txid {one.txid} at sink {one.sink}"
            if row.guarantee == Guarantee.AT_MOST_ONCE.value:
                refused[name] = (
                    "under at-most-once no message is opened again; put it to the source anew, and drop it here"
                )
            elif one.message is None:
                refused[name] = "it belongs to no single message, and cannot be opened again"
            elif one.id in altered:
                refused[name] = (
                    "its payload or its row is not what was rejected: somebody changed it in the ledger. Drop it"
                )
            elif one.payload is None:
                refused[name] = "its source gave no payload, and it cannot be opened again"
            elif one.message in busy:
                refused[name] = "it is being retried for another sink; retry it for this one after that"
            elif present is not None and one.sink not in present:
                refused[name] = f"the topology has no sink {one.sink!r} any more"
            else:
                payloads[one.message] = one.payload
        opened_again = set(sources.open_again(payloads, by=by, why=why, tx=tx.raw))
        for message in sorted(payloads.keys() - opened_again):
            refused[message] = "it waits for a retry already"
        done = [one for one in mine if one.message in opened_again and one.message not in refused]
        rejects.decide(tx, [one.id for one in done], RejectState.RETRYING, by=by, why=why)
        _record(tx, OperatorAction.RETRY_REJECT, done, by=by, why=why)
    return RejectsDecided(topology, True, tuple(done), refused, by)


def _undecided(tx: Tx, found: Sequence[Reject]) -> list[Reject]:
    """Those that are undecided now, locked."""
    return rejects.undecided(tx, [one.id for one in found])


def _record(tx: Tx, action: OperatorAction, done: Sequence[Reject], *, by: str, why: str) -> None:
    """One event for each txid and sink: who decided, and about how many messages."""
    for (txid, sink), number in Counter((one.txid, one.sink) for one in done).items():
        detail: dict[str, Json] = {"sink": sink, "rejects": number}
        events.decided(tx, action, by=by, why=why, txid=txid, sink=sink, detail=detail)
