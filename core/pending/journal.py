"""The journal of what a server delivered: each message once, by the id that the server knows it by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.payload import PAYLOAD_SQL
from stormproof.core.pending.batches import batches_of
from stormproof.core.pending.connector import Finding, Kept
from stormproof.core.pending.postgres import fetched
from stormproof.core.pending.postgres_rows import MINE
from stormproof.core.pending.rows import Subscriber
from stormproof.core.pending.tables import SCHEMA
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.rights import note_statement
from stormproof.core.postgres.store import query

STABLE_ID_MAX: Final = 1_000
"""Characters of a stable id."""
INDEXED_MAX: Final = 600
"""Characters of an id that stand in the index as they are: of four bytes each, Postgres takes them (2,704 bytes)."""
PAYLOAD_KEPT_S: Final = 3_600
"""Seconds for which payloads stay once their messages are resolved: at-most-once confirms a slice before it is read."""

_TABLE: Final = f"{SCHEMA}.pending_message"
_RANGES: Final = "unnest(%s::bigint[], %s::bigint[]) as r (low, high)"
"""Numbers as `_ranges` gives them: a batch's are one range, or a few, where a list would be looked up number by number."""
_COPIED: Final = pa.schema(
    [
        ("subscription", pa.int64()),
        ("number", pa.int64()),
        ("stable_id", pa.string()),
        ("payload", pa.binary()),
        ("digest", pa.binary()),
    ]
)
"""What a message is written down with."""


class Delivery(NamedTuple):
    """A message as a server delivered it.

    `stable_id` is the same each time the message comes, and no other message's. `handle` is what the server wants for its
    confirmation; it is for this delivery alone. `stored` is what is kept in place of the payload, where that is more than
    the payload: what the server says of this delivery may differ each time, and the first one's is kept.
    """

    stable_id: str
    handle: Any
    payload: bytes
    stored: bytes | None = None


def indexed_id(id_: str) -> str:
    """What a stable id is written down as: itself, or its beginning and its SHA-256 where it is too long for an index."""
    if len(id_) <= INDEXED_MAX or len(id_) > STABLE_ID_MAX:  # what is longer than that is refused
        return id_
    return f"{id_[:100]}... sha256 {hashlib.sha256(id_.encode('utf-8', 'surrogatepass')).hexdigest()}"


class ReusedId(UsageError):
    """An id came with two different payloads."""


@dataclass(frozen=True, slots=True)
class JournalCounts:
    """What a journal holds.

    `messages`: all that are known by their ids, those included that were resolved. `unresolved`: those that were not opened,
    or are pending in their first slice. `owed`: messages that are confirmed here and, for all that is known, not to their
    server. `suppressed`: deliveries of messages that were confirmed here before.
    """

    messages: int
    owed: int
    suppressed: int
    unresolved: int = 0


class Journal:
    """The messages of one subscription, inside one transaction that has locked the subscription."""

    def __init__(self, cursor: psycopg.Cursor[Any], who: Subscriber, where: str) -> None:
        self._cursor = cursor
        self._who = who
        self._where = where

    def _run(self, statement: str, *parameters: object) -> psycopg.Cursor[Any]:
        return query(self._cursor, statement, *parameters)

    def stop(self) -> int:
        """The number behind the last message."""
        found = self._run(f"select coalesce(max(number) + 1, 0) from {_TABLE} where {MINE}", *self._who).fetchone()
        return 0 if found is None else int(found[0])

    def write(self, received: Sequence[Delivery], *, owed: bool = True) -> list[int]:
        """Write down messages that are new; gives the number of each, new or known.

        One that comes again after it was resolved is counted as suppressed, and with `owed` is owed a confirmation again.

        Raises:
            UsageError: an id is none; nothing was written.
            ReusedId: an id came before, or comes here, with another payload; nothing was written.
        """
        self._check([message.stable_id for message in received])
        first_of: dict[str, Delivery] = {}
        for message in received:
            if first_of.setdefault(message.stable_id, message).payload != message.payload:
                raise self._reused(message.stable_id)
        first = self.stop()
        known: dict[str, int] = {}
        if not self._are_new(list(first_of.values()), first):
            known = self._known({id_: message.payload for id_, message in first_of.items()})
            self._insert([message for id_, message in first_of.items() if id_ not in known], first)
        new = [id_ for id_ in first_of if id_ not in known]
        numbers = {**known, **{id_: first + place for place, id_ in enumerate(new)}}
        again = [numbers[message.stable_id] for message in received if message.stable_id in known]
        if again:
            self._run(
                f"update {_TABLE} m set owed = %s, suppressed = suppressed + a.times"
                " from (select number, count(*) as times from unnest(%s::bigint[]) as n (number) group by 1) a"
                f" where m.{MINE} and m.number = a.number and m.resolved_at is not null",
                owed,
                again,
                *self._who,
            )
        return [numbers[message.stable_id] for message in received]

    def _are_new(self, messages: Sequence[Delivery], first: int) -> bool:
        """Insert them all, where none was received before; else nothing. Messages that come again are few, so this is tried
        before anything is looked up.
        """
        try:
            with self._cursor.connection.transaction():
                self._insert(messages, first)
        except psycopg.errors.UniqueViolation:
            return False
        return True

    def _insert(self, messages: Sequence[Delivery], first: int) -> None:
        """Insert messages, numbered from `first` on."""
        if not messages:
            return
        found = self._run(
            f"select id from {SCHEMA}.pending_subscription where kind = %s and source = %s and subscription = %s",
            *self._who,
        ).fetchone()
        assert found is not None
        rows = pa.record_batch(
            [
                pa.array(np.full(len(messages), found[0], np.int64)),
                pa.array(np.arange(first, first + len(messages), dtype=np.int64)),
                pa.array([one.stable_id for one in messages], pa.string()),
                pa.array([one.payload if one.stored is None else one.stored for one in messages], pa.binary()),
                pa.array([hashlib.sha256(one.payload).digest() for one in messages], pa.binary()),
            ],
            schema=_COPIED,
        )
        encoder = ArrowToPostgresBinaryEncoder(_COPIED)
        statement = f"copy {_TABLE} ({', '.join(_COPIED.names)}) from stdin with (format binary)"
        try:
            with self._cursor.copy(statement.encode()) as copy:
                copy.write(encoder.write_header())
                copy.write(encoder.write_batch(rows))
                copy.write(encoder.finish())
        except psycopg.errors.InsufficientPrivilege as error:
            note_statement(error, statement)
            raise

    def _known(self, payloads: Mapping[str, bytes]) -> dict[str, int]:
        """The numbers of those that were received before."""
        known: dict[str, int] = {}
        found = self._run(
            f"select stable_id, number, digest from {_TABLE} where {MINE} and stable_id = any(%s)",
            *self._who,
            list(payloads),
        )
        for id_, number, digest in found:
            if bytes(digest) != hashlib.sha256(payloads[id_]).digest():
                raise self._reused(id_)
            known[id_] = number
        return known

    def digests(self, ids: Iterable[str]) -> dict[str, bytes]:
        """The SHA-256 of the payloads of those of these stable ids that were written down."""
        found = self._run(
            f"select stable_id, digest from {_TABLE} where {MINE} and stable_id = any(%s)", *self._who, list(ids)
        )
        return {id_: bytes(digest) for id_, digest in found}

    def known(self, ids: Iterable[str]) -> set[str]:
        """Those of these stable ids that were written down."""
        found = self._run(f"select stable_id from {_TABLE} where {MINE} and stable_id = any(%s)", *self._who, list(ids))
        return {id_ for (id_,) in found}

    def server_ids(self, numbers: Sequence[int], before: str) -> dict[int, str]:
        """What the server calls messages: what their stable ids have behind `before` (see `Connector.BEFORE_ID`)."""
        query = f"select number, stable_id from {_TABLE} where {MINE} and number = any(%s)"
        found = self._run(query, *self._who, list(numbers)).fetchall()
        if before == "/":
            return {number: id_.rpartition("/")[2] for number, id_ in found}
        return {number: id_.removeprefix(before) for number, id_ in found if id_.startswith(before)}

    def number_of(self, id_: str, before: str) -> int | None:
        """The number of a message by its server's id, or by its stable id; of several, the newest. None: it is not known."""
        query = f"select max(number) from {_TABLE} where {MINE} and "
        whole = [id_] if before == "/" else [id_, indexed_id(before + id_)]
        found = self._run(query + "stable_id = any(%s)", *self._who, whole).fetchone()
        if before == "/" and (found is None or found[0] is None):
            found = self._run(query + "right(stable_id, %s) = %s", *self._who, len(id_) + 1, f"/{id_}").fetchone()
        return None if found is None or found[0] is None else int(found[0])

    def last(self) -> int | None:
        """The highest number; None where nothing is written down."""
        found = self._run(f"select max(number) from {_TABLE} where {MINE}", *self._who).fetchone()
        return None if found is None or found[0] is None else int(found[0])

    def behind(self, prefix: str, number: int) -> list[tuple[int, int]]:
        """Of the stable ids ``PREFIX`` ``TIME/NUMBER``: number and time, where the number is above one."""
        found = self._run(
            "select split_part(rest, '/', 2)::bigint, split_part(rest, '/', 1)::bigint from"
            f" (select substr(stable_id, %s) as rest from {_TABLE} where {MINE} and starts_with(stable_id, %s)) m"
            " where split_part(rest, '/', 2)::bigint > %s",
            len(prefix) + 1,
            *self._who,
            prefix,
            number,
        )
        return found.fetchall()

    def _check(self, ids: Sequence[str]) -> None:
        if all(ids) and all(map(str.isprintable, ids)) and max(map(len, ids), default=0) <= STABLE_ID_MAX:
            return
        id_ = next(one for one in ids if not one.isprintable() or not 0 < len(one) <= STABLE_ID_MAX)
        raise UsageError(
            f"{self._where}: the server gave a message the id {id_[:50]!r}; a stable id has 1 to {STABLE_ID_MAX} "
            "printable characters. Have the publisher set one for each message",
            stable_id=id_[:50],
        )

    def _reused(self, id_: str) -> ReusedId:
        return ReusedId(
            f"{self._where}: the id {id_!r} came with two different payloads; of messages with one id all but the first "
            "would be lost. Have the publisher give each message an id of its own",
            stable_id=id_,
        )

    def settle(self, first: int, stop: int, now: datetime, *, owed: bool = True) -> None:
        """These messages left their first slice; `owed`: the server is owed a confirmation of each.

        `now` is the driver's time, here and below. Of two clocks the later one says when a message was resolved, and the
        earlier one how long ago that is: where one of them is wrong, messages are known for longer, and never too short.
        """
        self._run(
            f"update {_TABLE} set resolved_at = greatest(clock_timestamp(), %s), owed = %s"
            f" where {MINE} and number >= %s and number < %s",
            now,
            owed,
            *self._who,
            first,
            stop,
        )

    def owed(self, numbers: Sequence[int]) -> list[int]:
        """Those of these messages whose server waits for a confirmation, ascending."""
        found = self._run(
            f"select coalesce(array_agg(number order by number), '{{}}') from {_TABLE}, {_RANGES}"
            f" where {MINE} and owed and number >= low and number < high",
            *_ranges(numbers),
            *self._who,
        ).fetchone()
        return [] if found is None else list(found[0])

    def paid(self, numbers: Sequence[int]) -> None:
        """The server has the confirmations of these messages."""
        self._run(
            f"update {_TABLE} set owed = false from {_RANGES} where {MINE} and number >= low and number < high",
            *_ranges(numbers),
            *self._who,
        )

    def sizes(self, first: int, stop: int) -> list[int]:
        """The bytes of messages, ascending by number."""
        found = self._run(
            f"select octet_length(payload) from {_TABLE} where {MINE} and number >= %s and number < %s order by number",
            *self._who,
            first,
            stop,
        )
        return [size for (size,) in found.fetchall()]

    def payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Payloads by number."""
        found = self._run(
            f"select number, payload from {_TABLE} where {MINE} and number = any(%s) and payload is not null",
            *self._who,
            list(numbers),
        )
        return {number: bytes(payload) for number, payload in found}

    def counts(self) -> JournalCounts:
        """How much there is of what."""
        found = self._run(
            "select count(*), count(*) filter (where owed), coalesce(sum(suppressed), 0)::bigint,"
            " count(*) filter (where resolved_at is null)"
            f" from {_TABLE} where {MINE}",
            *self._who,
        ).fetchone()
        assert found is not None
        return JournalCounts(*found)

    def unopened(self, next_number: int) -> tuple[int, float | None]:
        """How many messages were never opened, and how many seconds ago the oldest of them was received."""
        found = self._run(
            "select count(*), extract(epoch from clock_timestamp() - min(received_at))::float8"
            f" from {_TABLE} where {MINE} and number >= %s",
            *self._who,
            next_number,
        ).fetchone()
        assert found is not None
        return int(found[0]), found[1]

    def faults(self, next_number: int, slices: Sequence[range]) -> list[str]:
        """What contradicts the subscription's position and its unresolved first slices; nothing where all is right.

        A message that its server is owed a confirmation of is no fault: it is paid when the message comes again.
        """
        found = self._run(
            "with mine as materialized ("
            "  select number, payload is not null as has_payload, resolved_at is not null as is_resolved, owed,"
            "    exists (select from unnest(%s::bigint[], %s::bigint[]) s (low, high)"
            "      where number >= low and number < high) as is_held"
            f"  from {_TABLE} where {MINE} and (resolved_at is null or owed or number >= %s or number ="
            f"    (select max(number) from {_TABLE} where {MINE}) or exists ("
            "      select from unnest(%s::bigint[], %s::bigint[]) s (low, high) where number >= low and number < high)))"
            " select max(number), count(*) filter (where number >= %s),"
            "  count(*) filter (where number >= %s and is_resolved),"
            "  count(*) filter (where number < %s and not is_resolved and not is_held),"
            "  count(*) filter (where owed and not is_resolved),"
            "  count(*) filter (where is_held and is_resolved),"
            "  count(*) filter (where is_held and has_payload) from mine",
            [one.start for one in slices],
            [one.stop for one in slices],
            *self._who,
            next_number,
            *self._who,
            [one.start for one in slices],
            [one.stop for one in slices],
            next_number,
            next_number,
            next_number,
        ).fetchone()
        if found is None or found[0] is None:
            return []
        newest, behind, again, nowhere, early, resolved, readable = map(int, found)
        held = sum(map(len, slices))
        faults = {
            "were written down behind the position and are gone: they would never be opened": max(
                0, newest + 1 - next_number - behind
            ),
            "were resolved and stand behind the position: they would be opened again": again,
            "were opened, and are neither resolved nor in a slice: their server is never told of them": nowhere,
            "are owed to the server as confirmed, and are not resolved": early,
            "are in a slice that is not resolved, and are resolved": resolved,
            "are in a slice that is not resolved, and their payloads are gone": max(0, held - readable),
        }
        texts = [
            f"{number} messages of the journal of {self._where} {what}" for what, number in faults.items() if number
        ]
        if newest + 1 < next_number:
            texts.append(
                f"the journal of {self._where} ends before its position ({newest + 1} of {next_number}): new messages would "
                "get numbers that are never opened"
            )
        return texts

    def kept(self) -> Kept:
        """Compare the resolved messages whose payloads are still kept with their digests. Numbers have no gaps, and payloads
        go from the lowest number on. What a server said beside a payload has no digest.
        """
        (removed, emptied, kept) = self._run(
            "with mine as (select number, payload is null as is_empty, resolved_at is not null as is_resolved"
            f" from {_TABLE} where {MINE}) select coalesce(max(number) - min(number) + 1 - count(*), 0), count(*) filter"
            " (where is_empty and number > (select min(number) from mine where not is_empty)),"
            " count(*) filter (where is_resolved and not is_empty) from mine",
            *self._who,
        ).fetchone() or (0, 0, 0)
        found = self._run(
            f"select number from {_TABLE} where {MINE} and resolved_at is not null and payload is not null"
            f" and digest <> sha256({PAYLOAD_SQL.format('payload')}) and digest <> sha256(payload) order by number",
            *self._who,
        )
        altered = [number for (number,) in found]
        texts = [
            f"message {number} of the journal of {self._where} is not the one that was received" for number in altered
        ]
        if removed or emptied:
            texts.append(
                f"{removed + emptied} messages of the journal of {self._where} were removed from between others"
            )
        same = kept - len(altered)
        return Kept(same, f"the payloads of {same} messages that the journal still keeps", tuple(map(Finding, texts)))

    def is_in_use(self, horizon_s: float, now: datetime) -> bool:
        """Whether a message is not resolved, or was within the horizon."""
        return self._first_younger(horizon_s, now) is not None

    def forget(self, horizon_s: float, now: datetime) -> None:
        """Forget messages that were resolved longer ago than the horizon, and payloads that nobody reads any more.

        Both go from the lowest number on, up to the first message that is kept: what stands behind one that is not resolved
        waits for it. The newest message stays: the next one is numbered behind it.
        """
        newest, kept = self.stop() - 1, self._first_younger(horizon_s, now)
        self._run(
            f"delete from {_TABLE} where {MINE} and number < %s",
            *self._who,
            newest if kept is None else min(newest, kept),
        )
        kept = self._first_younger(min(PAYLOAD_KEPT_S, horizon_s), now, " and payload is not null")
        self._run(
            f"update {_TABLE} set payload = null where {MINE} and payload is not null and number < %s",
            *self._who,
            newest + 1 if kept is None else kept,
        )

    def _first_younger(self, age_s: float, now: datetime, more: str = "") -> int | None:
        """The first message that is not resolved, or was not so long ago. Asked by itself: with the number as a constant
        the planner knows how few rows lie below it.
        """
        found = self._run(
            f"select number from {_TABLE} where {MINE} and (resolved_at is null or resolved_at >="
            f" least(clock_timestamp(), %s) - make_interval(secs => %s)){more} order by number limit 1",
            *self._who,
            now,
            age_s,
        ).fetchone()
        return None if found is None else int(found[0])


def _ranges(numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers as ranges: the first of each, and the one behind its last."""
    found = np.unique(np.asarray(numbers, np.int64))
    cuts = np.flatnonzero(np.diff(found) > 1) + 1
    pieces = [piece for piece in np.split(found, cuts) if len(piece)]
    return [int(piece[0]) for piece in pieces], [int(piece[-1]) + 1 for piece in pieces]


@dataclass(frozen=True, slots=True)
class JournalReader:
    """A range of a journal's messages. As secret as the database's password."""

    database: Database
    who: Subscriber
    first: int
    stop: int
    unpack: Callable[[Sequence[bytes]], Any] | None = None

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages, in the order in which they were received.

        Raises:
            StoreUnavailable: the database could not be reached or did not answer.
        """
        if self.first >= self.stop:
            return
        found = fetched(
            self.database,
            "a slice of a journal",
            f"select number, payload from {_TABLE} where {MINE} and number >= %s and number < %s"
            " and payload is not null and number <> all(%s::bigint[]) order by number",
            *self.who,
            self.first,
            self.stop,
            sorted(excluded),
        )
        ids, payloads = [row[0] for row in found], [bytes(row[1]) for row in found]
        yield from batches_of(ids, [0] * len(ids), payloads, seed, batch_rows, self.unpack)
