"""`SourceEvidence`: what a source itself records of a topology's messages; of several spouts; of what was handed in."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

import sqlalchemy as sa

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.contract.source import Backlog
from stormproof.core.pending.connector import Finding, Kept
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.source.group import SpoutPart, combined, parts_of
from stormproof.core.source.spouts import shown, unshown
from stormproof.trident.ledger.handed_in import HandedIn, all_taken, missing, newest, oldest, source_of
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.terms.transaction_states import TxnState


class SourceEvidence(Protocol):
    """A source's own record, for one topology's subscription. Messages are named by their shown ids.

    An implementation inherits it. The defaults are those of a source that keeps no failed messages.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The source's name."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """Counts of the messages that are not yet confirmed."""

    def journal(self) -> JournalCounts | None:
        """What the source's journal holds; None if it has none, because its server hands no message out twice."""
        return None

    def notes(self) -> tuple[str, ...]:
        """What holds some of the source's messages up; nothing where all is as usual."""
        return ()

    def losses(self) -> list[Finding]:
        """What the source's server removed, or may have, oldest first; a person may accept each."""
        return []

    def waiting(self) -> Set[str]:
        """Messages that failed and either wait for their retry or are leased for it."""
        return frozenset()

    def dead(self, message: str | None = None) -> Sequence[DeadLetter]:
        """Dead letters, or those of one message, oldest first, including those that an operator decided about. Payloads may
        be left out.
        """
        return ()

    def altered(self) -> Sequence[str]:
        """Retries and dead letters whose payload is not the one that was set aside."""
        return ()

    def kept(self, txns: Sequence[Txn]) -> Kept:
        """Compare the messages of these batches, as the source still keeps them, with what is on record of them."""
        return Kept()

    def dead_classes(self) -> Mapping[tuple[str, str], int]:
        """How many undecided dead letters there are of each class of error and reason."""
        return {}

    def named(self, message: str) -> str:
        """The id under which the record has a message, which may be given by its server's own id. Where both are somebody's,
        it is the record's; ``=ID`` is always the server's.

        Raises:
            UsageError: there is no such message on record.
        """
        return message

    def server_ids(self, messages: Collection[str]) -> Mapping[str, str]:
        """What their server calls messages, by their shown ids; those of which that is not on record are left out."""
        return {}

    def has(self, message: str) -> bool:
        """Whether the source still has the message. True where that is not known, too."""
        return True

    def never_had(self, txn: Txn, message: str) -> bool:
        """Whether there was no such message, although its id lies in the slice of a batch: the source still has all of the
        slice's messages, and it is none of them. False where that cannot be told.
        """
        return False

    @abstractmethod
    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether a slice of new messages (not of retries) holds a message."""

    def opened_in(self, slices: Sequence[tuple[int, Mapping[str, Json]]], message: str) -> list[int]:
        """The txids of those slices of new messages that hold a message; a slice is (txid, position)."""
        return [txid for txid, position in slices if self.contains(position, message)]

    def number_of(self, message: str) -> int | None:
        """The message's number, where slices are ranges of such numbers; None where they may be anything else."""
        return None

    def is_waiting_to_be_opened(self, message: str, *, certainly: bool = False) -> bool:
        """Whether the source has the message and no lease holds it: it was never opened, or was returned. Of a message that
        was never opened it may be that only a server can tell whether it exists: then `certainly` it is not waiting.
        """
        return False

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The txids of those batches whose slices reach furthest into the source."""
        return ()

    def continues(self, anchors: Sequence[Txn], txn: Txn) -> bool:
        """Whether a batch of new messages reads as far as those that read furthest before, or further."""
        return txn.txid in self.furthest([*anchors, txn])

    def gives_back(self) -> bool:
        """Whether slices were given back and wait to be opened again."""
        return False

    @abstractmethod
    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """Overlaps and holes between the slices of these batches.

        `txns` are all batches that the ledger has. After a prune, `forgotten` are the older batches that were kept;
        everything up to the furthest of them counts as handed out once.
        """


class GroupEvidence(SourceEvidence):
    """The sources of several spouts, each with its own record; messages are named ``SPOUT:`` and the source's own id."""

    def __init__(self, name: str, members: Mapping[str, SourceEvidence]) -> None:
        self._name = name
        self._members = members

    @property
    def name(self) -> str:
        """The group."""
        return self._name

    def backlog(self) -> Backlog:
        """What is left, of all spouts together."""
        return combined([member.backlog() for member in self._members.values()])

    def journal(self) -> JournalCounts | None:
        """The journals of all spouts together."""
        found = [journal for member in self._members.values() if (journal := member.journal()) is not None]
        if not found:
            return None
        return JournalCounts(
            messages=sum(journal.messages for journal in found),
            owed=sum(journal.owed for journal in found),
            suppressed=sum(journal.suppressed for journal in found),
            unresolved=sum(journal.unresolved for journal in found),
        )

    def notes(self) -> tuple[str, ...]:
        """Those of every spout."""
        return tuple(f"spout {spout}: {note}" for spout, member in self._members.items() for note in member.notes())

    def losses(self) -> list[Finding]:
        """Those of every spout."""
        return [
            replace(one, text=f"spout {spout}: {one.text}")
            for spout, member in self._members.items()
            for one in member.losses()
        ]

    def waiting(self) -> Set[str]:
        """Those of every spout."""
        return {shown(spout, inner) for spout, member in self._members.items() for inner in member.waiting()}

    def dead(self, message: str | None = None) -> Sequence[DeadLetter]:
        """Those of every spout, or of one message, oldest first."""
        named = None if message is None else unshown(message)
        found = [
            replace(letter, shown_id=shown(spout, letter.shown_id))
            for spout, member in self._members.items()
            if message is None or (named is not None and named[0] == spout)
            for letter in member.dead(None if named is None else named[1])
        ]
        return sorted(found, key=lambda letter: letter.dead_at)

    def altered(self) -> Sequence[str]:
        """Those of every spout."""
        return [shown(spout, inner) for spout, member in self._members.items() for inner in member.altered()]

    def kept(self, txns: Sequence[Txn]) -> Kept:
        """Those of every spout."""
        found = {spout: member.kept(self._parts(spout, txns)) for spout, member in self._members.items()}
        return Kept(
            sum(one.messages for one in found.values()),
            "; ".join(f"spout {spout}: {one.compared}" for spout, one in found.items() if one.compared),
            tuple(replace(f, text=f"spout {spout}: {f.text}") for spout, one in found.items() for f in one.wrong),
            tuple(f"spout {spout}: {text}" for spout, one in found.items() for text in one.left_out),
        )

    def dead_classes(self) -> Mapping[tuple[str, str], int]:
        """The sums of all spouts."""
        found = Counter[tuple[str, str]]()
        for member in self._members.values():
            found.update(member.dead_classes())
        return found

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice has a part of the message's spout that holds it."""
        spout, member, inner = self._member_of(message)
        part = _parts_of(position).get(spout)
        return part is not None and member.contains(part.position, inner)

    def named(self, message: str) -> str:
        """As the message's spout has it. A server's id that names no spout is looked for in all of them."""
        if (unshown(message) or ("", ""))[0] not in self._members:
            found = [one for spout in self._members for one in self._by_server_id(spout, message)]
            if len(found) == 1:
                return found[0]
        spout, member, inner = self._member_of(message)
        return shown(spout, member.named(inner))

    def _by_server_id(self, spout: str, given: str) -> list[str]:
        try:
            inner = self._members[spout].named(f"={given.removeprefix('=')}")
        except UsageError:
            return []
        return [] if inner.startswith("=") else [shown(spout, inner)]

    def server_ids(self, messages: Collection[str]) -> Mapping[str, str]:
        """Those of every spout."""
        inner = {spout: dict[str, str]() for spout in self._members}
        for message in messages:
            spout, own = unshown(message) or ("", message)
            if spout in inner:
                inner[spout][own] = message
        return {
            named[own]: id_
            for spout, named in inner.items()
            if named
            for own, id_ in self._members[spout].server_ids(named).items()
        }

    def has(self, message: str) -> bool:
        """Whether the message's spout has it."""
        _, member, inner = self._member_of(message)
        return member.has(inner)

    def never_had(self, txn: Txn, message: str) -> bool:
        """By the part of the message's spout."""
        spout, member, inner = self._member_of(message)
        part = _parts_of(txn.position).get(spout)
        if part is None:
            return False
        return member.never_had(replace(txn, position=part.position, messages=part.expected.messages), inner)

    def is_waiting_to_be_opened(self, message: str, *, certainly: bool = False) -> bool:
        """Whether the message's spout has it, in no lease."""
        _, member, inner = self._member_of(message)
        return member.is_waiting_to_be_opened(inner, certainly=certainly)

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """What is wrong with the parts of each spout."""
        findings = [
            Finding(f"txid {txn.txid}: its position in {self._name} cannot be read, or names another spout", txn.txid)
            for txn in txns
            if not (parts := _parts_of(txn.position)) or not parts.keys() <= self._members.keys()
        ]
        for spout, member in self._members.items():
            of_spout = member.slice_findings(self._parts(spout, txns), self._parts(spout, forgotten))
            findings += [replace(f, text=f"spout {spout}: {f.text}") for f in of_spout]
        return findings

    def continues(self, anchors: Sequence[Txn], txn: Txn) -> bool:
        """Whether each of its parts does."""
        return all(
            member.continues(self._parts(spout, anchors), part)
            for spout, member in self._members.items()
            for part in self._parts(spout, [txn])
        )

    def gives_back(self) -> bool:
        """Whether one of the spouts' stores has."""
        return any(member.gives_back() for member in self._members.values())

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """For each spout the batch that reaches furthest into its source."""
        return tuple(
            sorted(
                {txid for spout, member in self._members.items() for txid in member.furthest(self._parts(spout, txns))}
            )
        )

    def _parts(self, spout: str, txns: Sequence[Txn]) -> list[Txn]:
        """These batches, as one spout has them."""
        return [
            replace(txn, position=parts[spout].position) for txn in txns if spout in (parts := _parts_of(txn.position))
        ]

    def _member_of(self, message: str) -> tuple[str, SourceEvidence, str]:
        spout, inner = unshown(message) or ("", message)
        if spout not in self._members:
            raise UsageError(
                f"{message!r} is not a message of {self._name}; ids look like SPOUT:ID, with one of the spouts "
                f"{', '.join(self._members)}",
                message=message,
            )
        return spout, self._members[spout], inner


def _parts_of(position: Mapping[str, Json]) -> dict[str, SpoutPart]:
    """A group's parts; none where the row of the ledger was spoiled."""
    try:
        return parts_of(position)
    except UsageError:
        return {}


_FIXED: Final = (TxnState.PREPARED, TxnState.BLOCKED, TxnState.COMMITTED)


def find_handed_in(connection: sa.Connection, incarnation: str, name: str, source: str) -> HandedInEvidence | None:
    """The jobs of this name, or the micro-batches that it took as transactions; None if there are none."""
    taken = [one for one in all_taken(connection, incarnation) if one.txid is not None]
    return HandedInEvidence(source, taken) if taken or source == source_of(name) else None


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A streaming query's last micro-batch in the ledger, and the one with which this topology began."""

    query: str
    batch: int
    began_query: str
    began_batch: int

    @property
    def missing(self) -> str | None:
        """What is not in the sinks, in words; None if the topology began with the query's first micro-batch."""
        if not self.began_batch:
            return None
        return (
            f"begins at batch {self.began_batch} of streaming query {self.began_query}; {missing(self.began_batch)} not in "
            "its sinks"
        )


def place_of(connection: sa.Connection, incarnation: str) -> StreamPlace | None:
    """The place of the streaming query that feeds a topology; None if none does."""
    first, last = oldest(connection, incarnation), newest(connection, incarnation)
    if first is None or last is None or first.query is None or last.query is None:
        return None
    return StreamPlace(last.query, last.batch, first.query, first.batch)


class HandedInEvidence(SourceEvidence):
    """The keys that were taken, in order, each with its txid.

    Nothing waits or dies by itself: Spark hands the last micro-batch out again, or the query fails; a program runs its job
    again, or does not. A prune leaves the rows that count, so `furthest` names none.
    """

    def __init__(self, source: str, taken: Sequence[HandedIn]) -> None:
        self._source = source
        self._taken = tuple(taken)

    @property
    def name(self) -> str:
        """The source, as the ledger names it."""
        return self._source

    def backlog(self) -> Backlog:
        """Zeros: only Spark, or the program, knows what is left."""
        return Backlog(0, 0, 0, 0)

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the transaction is this key's."""
        return position.get("key") == message

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """Keys whose batch is another one, or none; batches of fixed content whose key would be written again; and
        micro-batches that do not follow one another.

        After a prune, the first micro-batch that is left must follow the last one that was pruned.
        """
        if not txns:
            return []
        return [*self._of_batches(txns), *self._of_keys(txns), *self._of_order(min(txn.txid for txn in txns))]

    def _of_batches(self, txns: Sequence[Txn]) -> Generator[Finding]:
        by_txid = {one.txid: one for one in self._taken}
        by_key = {one.key: one for one in self._taken}
        for txn in txns:
            key = txn.position.get("key")
            if not isinstance(key, str):
                yield Finding(f"txid {txn.txid} is nothing that was handed in: its row has no key", txn.txid)
            elif txn.state in _FIXED and (txn.txid not in by_txid or by_txid[txn.txid].key != key):
                told = f"is txid {by_key[key].txid} by its row" if key in by_key else "has no row"
                text = f"txid {txn.txid} wrote key {key!r}, which {told}: its rows may be there twice, or come again"
                yield Finding(text, txn.txid)

    def _of_keys(self, txns: Sequence[Txn]) -> Generator[Finding]:
        lowest, fixed = min(txn.txid for txn in txns), {txn.txid for txn in txns if txn.state in _FIXED}
        for one in self._taken:
            if one.txid is not None and one.txid >= lowest and one.txid not in fixed:
                yield Finding(
                    f"key {one.key!r} was taken as txid {one.txid}, which has no row of fixed content", one.txid
                )

    def _of_order(self, lowest: int) -> Generator[Finding]:
        of_queries = [one for one in self._taken if one.query is not None]
        for before, taken in pairwise(of_queries):
            if taken.txid is not None and taken.txid >= lowest and not _follows(before, taken):
                text = f"micro-batch {taken.key} (txid {taken.txid}) does not follow {before.key}, the one before it"
                yield Finding(text, taken.txid)


def _follows(before: HandedIn, taken: HandedIn) -> bool:
    next_one = taken.query == before.query and taken.batch == before.batch + 1
    return next_one or taken.adopted_from == before.key
