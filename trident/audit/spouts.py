"""`GroupEvidence`: the records of several spouts' sources, as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from stormproof.core.errors import Json, UsageError
from stormproof.core.pending.audit import Finding, Kept
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.group import SpoutPart, combined, parts_of
from stormproof.core.source.protocol import Backlog
from stormproof.core.source.spouts import shown, unshown
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.ledger.rows import Txn


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
