"""What a file source's tables say of its messages, read in the ledger's own transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.evidence import EDIT_HASHES_SQL, DeadMessage, Finding, WaitingMessage, is_taken
from stormproof.trident.ledger.rows import Txn

_SHOWN: Final = re.compile(r"(\d+)-(\d+)")
_MINE: Final = "source = :source and subscription = :subscription"


def find_files(connection: sa.Connection, subscriptions: Sequence[str], source: str) -> FileEvidence | None:
    """The file source that has one of these subscriptions, the first named one rather than the next; `source` first."""
    if connection.execute(sa.text("select to_regclass('stormproof.file_subscription')")).scalar_one() is None:
        return None
    row = connection.execute(
        sa.text(
            "select source, subscription from stormproof.file_subscription where subscription = any(:subscriptions)"
            " order by source = :source desc, array_position(:subscriptions, subscription) limit 1"
        ),
        {"subscriptions": list(subscriptions), "source": source},
    ).one_or_none()
    return None if row is None else FileEvidence(connection, row.source, row.subscription)


class FileEvidence:
    """One subscription of a file source. Messages have numbers without gaps, so a slice is a range of them."""

    def __init__(self, connection: sa.Connection, source: str, subscription: str) -> None:
        self._connection = connection
        self._key = {"source": source, "subscription": subscription}

    @property
    def name(self) -> str:
        """The source."""
        return self._key["source"]

    @property
    def subscription(self) -> str:
        """The topology's subscription to it."""
        return self._key["subscription"]

    def backlog(self) -> Backlog:
        """What is left of the files that are registered."""
        (row,) = self._rows(
            "select (select coalesce(max(first_id + rows), 0) from stormproof.file_entry"
            f" where {_MINE}) - (select next_id from stormproof.file_subscription where {_MINE}) as unopened,"
            " coalesce(sum(messages) filter (where state = 'returned' and first_id is not null), 0)::bigint as returned,"
            " coalesce(sum(messages) filter (where state = 'returned' and first_id is null), 0)::bigint as retries,"
            " coalesce(sum(messages) filter (where state <> 'returned'), 0)::bigint as pending,"
            f" (select count(*) from stormproof.file_retry where {_MINE} and slice is null) as waiting,"
            f" (select count(*) from stormproof.file_dead_letter where {_MINE} and disposal is null) as dead"
            f" from stormproof.file_slice where {_MINE}"
        )
        return Backlog(
            ready=row.unopened + row.returned, pending=row.pending, waiting=row.waiting + row.retries, dead=row.dead
        )

    def lowest_unresolved(self) -> int:
        """The number below which every message is resolved, waits with its payload, or is dead."""
        (row,) = self._rows(
            f"select least((select next_id from stormproof.file_subscription where {_MINE}),"
            f" (select min(first_id) from stormproof.file_slice where {_MINE})) as number"
        )
        return int(row.number)

    def waiting(self) -> Mapping[str, WaitingMessage]:
        """The source's retry rows."""
        rows = self._rows(
            "select r.file, r.id, r.times_failed, r.not_before, s.owner from stormproof.file_retry r"
            " left join stormproof.file_slice s on s.id = r.slice"
            " where r.source = :source and r.subscription = :subscription order by r.id"
        )
        return {
            f"{row.file}-{row.id}": WaitingMessage(f"{row.file}-{row.id}", row.times_failed, row.not_before, row.owner)
            for row in rows
        }

    def dead(self) -> Sequence[DeadMessage]:
        """The source's dead letters."""
        rows = self._rows(
            "select file, id, reason, error, times_failed, dead_at, disposal, disposed_by, disposed_why, disposed_at,"
            f" {EDIT_HASHES_SQL} from stormproof.file_dead_letter where {_MINE} order by number"
        )
        return [
            DeadMessage(
                message=f"{row.file}-{row.id}",
                reason=row.reason,
                error=row.error,
                times_failed=row.times_failed,
                dead_at=row.dead_at,
                disposal=row.disposal,
                by=row.disposed_by,
                why=row.disposed_why,
                disposed_at=row.disposed_at,
                payload_sha256=row.payload_sha256,
                new_payload_sha256=row.new_payload_sha256,
            )
            for row in rows
        ]

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice's range encloses the message, and it is the file's."""
        found = range_of(position)
        file, number = _place_of(message)
        return found is not None and number in found and self._is_of(file, number)

    def is_waiting_to_be_opened(self, message: str) -> bool:
        """Whether a registered file has it, and it is in a returned slice or was never opened."""
        file, number = _place_of(message)
        if not self._is_of(file, number):
            return False
        (row,) = self._rows(
            f"select :number >= (select next_id from stormproof.file_subscription where {_MINE}) or exists ("
            f"select from stormproof.file_slice where {_MINE} and state = 'returned'"
            " and first_id <= :number and :number < stop_id) as waits",
            number=number,
        )
        return bool(row.waits)

    def _is_of(self, file: int, number: int) -> bool:
        return bool(
            self._rows(
                f"select 1 from stormproof.file_entry where {_MINE} and number = :file"
                " and first_id <= :number and :number < first_id + rows",
                file=file,
                number=number,
            )
        )

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The batch whose range ends last."""
        stops = [(found.stop, txn.txid) for txn in txns if (found := range_of(txn.position)) is not None]
        return (max(stops)[1],) if stops else ()

    def slice_findings(self, txns: Sequence[Txn]) -> list[Finding]:
        """Ranges of taken batches and of the source's own leases must cover, once, all that was handed out."""
        return self.slice_findings_behind(txns, ())

    def slice_findings_behind(self, txns: Sequence[Txn], forgotten: Sequence[Txn]) -> list[Finding]:
        """The same, behind the furthest range of the forgotten batches; before it nothing may be there twice."""
        trusted = max((r.stop for txn in forgotten if (r := range_of(txn.position)) is not None), default=0)
        pieces: list[tuple[int, int, str, int | None]] = []
        for txn in txns:
            found = range_of(txn.position)
            if found is None:
                if txn.position.get("replayed") is None:
                    return [Finding(f"txid {txn.txid}: its position in {self.name} cannot be read", txn.txid)]
                continue
            if is_taken(txn):
                pieces.append((found.start, found.stop, f"txid {txn.txid} ({txn.state})", txn.txid))
        for row in self._rows(
            f"select first_id, stop_id, state, owner from stormproof.file_slice where {_MINE} and first_id is not null"
        ):
            holder = f"the source's {row.state} slice{f' of {row.owner}' if row.owner else ''}"
            pieces.append((row.first_id, row.stop_id, holder, None))
        (subscription,) = self._rows(f"select next_id from stormproof.file_subscription where {_MINE}")
        findings: list[Finding] = []
        covered = 0
        for start, stop, holder, txid in sorted(pieces, key=lambda piece: piece[:2]):
            if start < covered:
                findings.append(Finding(f"{holder} holds messages that another batch holds, too", txid))
            elif start > max(covered, trusted):
                findings.append(self._missed(start - max(covered, trusted), f"before {holder}", txid))
            covered = max(covered, stop)
        covered = max(covered, trusted)
        if covered < subscription.next_id:
            findings.append(self._missed(subscription.next_id - covered, "behind the last batch", None))
        return findings + self._retry_findings()

    def _missed(self, messages: int, where: str, txid: int | None) -> Finding:
        return Finding(f"{messages} messages of source {self.name} {where} were handed out to no batch", txid)

    def _retry_findings(self) -> list[Finding]:
        """A retry that belongs to a slice which is not there would never be opened again."""
        rows = self._rows(
            "select coalesce(s.id, r.slice) as id, s.messages as expected, count(r.id) as found"
            f" from (select * from stormproof.file_slice where {_MINE} and first_id is null) s"
            f" full join (select * from stormproof.file_retry where {_MINE} and slice is not null) r on r.slice = s.id"
            " group by s.id, r.slice, s.messages having s.messages is distinct from count(r.id) order by 1"
        )
        return [
            Finding(
                f"{row.found} retries of source {self.name} belong to slice {row.id}, which "
                + ("is not there" if row.expected is None else f"was made of {row.expected}")
            )
            for row in rows
        ]

    def _rows(self, statement: str, **parameters: object) -> Sequence[Any]:
        return self._connection.execute(sa.text(statement), {**self._key, **parameters}).all()


def range_of(position: Mapping[str, Json]) -> range | None:
    """The messages' numbers in a position of a file source; None where it is of retries, or of something else."""
    match position.get("range"):
        case [int(first), int(stop)]:
            return range(first, stop)
        case _:
            return None


def _place_of(message: str) -> tuple[int, int]:
    match = _SHOWN.fullmatch(message)
    if match is None:
        raise UsageError(f"{message!r} is not a message of a file source; ids look like FILE-NUMBER", message=message)
    return int(match[1]), int(match[2])
