"""What the audit needs to know of a Kafka source: ranges of offsets by partition, and what retention took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stormproof.core.base.errors import UsageError
from stormproof.core.pending.audit import Finding, OpenedSlice, SliceAudit
from stormproof.core.pending.continuity import Continuity
from stormproof.core.pending.rows import At
from stormproof.core.source.kafka.offsets import OffsetRange, place_and_offset, ranges_or_none
from stormproof.core.source.kafka.position import KafkaPosition, Place


class KafkaAudit(SliceAudit):
    """One subscription of a Kafka source, by what the store knows of it; the cluster is not asked."""

    def can_read(self, at: At) -> bool:
        """Whether it is ranges of offsets."""
        return ranges_or_none(at) is not None

    def reach(self, at: At) -> int:
        """How many offsets of all partitions were opened up to this slice: it only grows."""
        return sum(_reach(at))

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether one of the ranges has a message with this offset."""
        place, offset = place_and_offset(id_)
        return any(
            one.place == place and bool(np.isin(offset, one.offsets))
            for one in ranges_or_none(at) or ()
            if one.start <= offset < one.stop
        )

    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the offset lies behind the position in its partition."""
        place, offset = place_and_offset(id_)
        places = KafkaPosition.of(position).places
        return place >= len(places) or offset >= places[place].next

    def unopened(self, position: At) -> tuple[int, float | None]:
        """The lag when a slice was last opened; offsets without a message are counted, too."""
        return (KafkaPosition.of(position).lag if position else 0), None

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """In each partition, the ranges that were taken and those that were lost must cover all that was handed out."""
        try:
            now = KafkaPosition.of(position) if position else None
        except UsageError as error:
            return [Finding(f"the position of source {self._who.source} cannot be read: {error.message}")]
        known: dict[int, int] = defaultdict(int)
        for at in trusted:
            for number, reached in enumerate(_reach(at)):
                known[number] = max(known[number], reached)
        pieces: dict[int, list[tuple[OffsetRange, OpenedSlice]]] = defaultdict(list)
        for one in held:
            for part in ranges_or_none(one.at) or () if one.taken else ():
                pieces[part.place].append((part, one))
        findings: list[Finding] = []
        places = now.places if now is not None else ()
        for number in sorted({*pieces, *range(len(places))}):
            place = places[number] if number < len(places) else None
            lost = [
                (int(one.behind) + 1, int(one.before))
                for one in (now.looks if now is not None else ())
                if one.place == number and one.verdict is Continuity.REMOVED
            ]
            findings += self._of_place(place, pieces[number], known[number], lost)
        return findings

    def _of_place(
        self,
        place: Place | None,
        pieces: Sequence[tuple[OffsetRange, OpenedSlice]],
        known: int,
        lost: Sequence[tuple[int, int]],
    ) -> list[Finding]:
        findings: list[Finding] = []
        covered = place.first if place is not None else 0
        spans = [(part.start, part.stop, one) for part, one in pieces]
        ordered: list[tuple[int, int, OpenedSlice | None]] = [*spans, *((start, stop, None) for start, stop in lost)]
        for start, stop, one in sorted(ordered, key=lambda span: span[:2]):
            end = max(covered, known)
            holder = "a lost range" if one is None else one.holder
            txid = None if one is None else one.txid
            if start < covered:
                findings.append(
                    Finding(f"{holder} holds offsets of {_where(place)} that another batch holds, too", txid)
                )
            elif start > end:
                findings.append(self._missed(place, end, start, f"before {holder}", txid))
            covered = max(covered, stop)
        end = max(covered, known)
        if place is not None and end < place.begin:
            findings.append(self._missed(place, end, place.begin, "behind the last batch", None))
        return findings

    def _missed(self, place: Place | None, start: int, stop: int, where: str, txid: int | None) -> Finding:
        return Finding(
            f"source {self._who.source}: offsets {start} to {stop - 1} of {_where(place)} {where} were handed out to no "
            "batch",
            txid,
        )


def _where(place: Place | None) -> str:
    return "an unknown partition" if place is None else f"topic {place.topic}, partition {place.partition}"


def _reach(at: At) -> list[int]:
    """The offset behind what was opened up to a slice, by place."""
    reach = at.get("reach")
    return [one for one in reach if isinstance(one, int)] if isinstance(reach, list) else []
