"""`SourceEvidence`: what a source itself records of a topology's messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Protocol

from stormproof.core.errors import Json
from stormproof.core.pending.audit import Finding, Kept
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.protocol import Backlog
from stormproof.trident.ledger.rows import Txn


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
        del message
        return ()

    def altered(self) -> Sequence[str]:
        """Retries and dead letters whose payload is not the one that was set aside."""
        return ()

    def kept(self, txns: Sequence[Txn]) -> Kept:
        """Compare the messages of these batches, as the source still keeps them, with what is on record of them."""
        del txns
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
        del messages
        return {}

    def has(self, message: str) -> bool:
        """Whether the source still has the message. True where that is not known, too."""
        del message
        return True

    def never_had(self, txn: Txn, message: str) -> bool:
        """Whether there was no such message, although its id lies in the slice of a batch: the source still has all of the
        slice's messages, and it is none of them. False where that cannot be told.
        """
        del txn, message
        return False

    @abstractmethod
    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether a slice of new messages (not of retries) holds a message."""

    def opened_in(self, slices: Sequence[tuple[int, Mapping[str, Json]]], message: str) -> list[int]:
        """The txids of those slices of new messages that hold a message; a slice is (txid, position)."""
        return [txid for txid, position in slices if self.contains(position, message)]

    def number_of(self, message: str) -> int | None:
        """The message's number, where slices are ranges of such numbers; None where they may be anything else."""
        del message
        return None

    def is_waiting_to_be_opened(self, message: str, *, certainly: bool = False) -> bool:
        """Whether the source has the message and no lease holds it: it was never opened, or was returned. Of a message that
        was never opened it may be that only a server can tell whether it exists: then `certainly` it is not waiting.
        """
        del message, certainly
        return False

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The txids of those batches whose slices reach furthest into the source."""
        del txns
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
