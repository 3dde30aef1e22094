"""Several sources as one: what coordinator and ledger see of a topology with several spouts.

A batch holds messages of one spout or of several. Each spout's part is an ordinary slice of its own source, and all
parts have the same lease. How the spouts' messages are told apart: `stormproof.core.source.spouts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa

from stormproof.core.base.errors import Fenced, Json, PositionMismatch, TopologyError, UsageError
from stormproof.core.base.message import Guarantee, MessageFailure, MessageId
from stormproof.core.contract.source import (
    WEAKEST_FIRST,
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    ShownIds,
    Slice,
    SliceReader,
    Source,
    SourceKind,
    SourcePreview,
)
from stormproof.core.postgres.database import Database
from stormproof.core.source.spouts import (
    SPOUTS_MAX,
    SpoutIds,
    group_name,
    id_of,
    is_spout_name,
    key_of,
    keys_of,
    member_subscription,
    seed_of,
    shown,
    unshown,
)
from stormproof.core.start.preflight import Probe
from stormproof.core.tracking.share import xor_signed


@dataclass(frozen=True, slots=True)
class SpoutReader:
    """A part of one spout's slice: what the source's own reader gives, with keys for ids. Picklable where that reader is.

    `spout` says whose decoder reads the payloads, and where their tuples enter the topology.
    """

    spout: str
    index: int
    reader: SliceReader

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, with tokens by the spout's own seed; `excluded` are keys.

        Raises:
            UsageError: an id is too large for a key.
        """
        mine = frozenset(id_ for index, id_ in map(id_of, excluded) if index == self.index)
        for rows in self.reader.read(seed_of(seed, self.index), mine, batch_rows):
            keys = keys_of(rows.column("id").to_numpy(), self.index, self.spout)
            yield rows.set_column(0, rows.schema.field(0), pa.array(keys))


@dataclass(slots=True, eq=False)
class _Member:
    """One spout's source.

    `wanted` is how many messages it is expected to have for the next batch, by what it gave for the last one. `parts` is
    how many of its next slices are opened without other spouts' messages: they are the parts of a slice that was split.
    """

    spout: str
    index: int
    source: Source
    wanted: int = 0
    parts: int = 0

    def shown(self, inner: Iterable[str]) -> tuple[str, ...]:
        return tuple(shown(self.spout, one) for one in inner)


def _by_index(keys: Iterable[int]) -> dict[int, list[int]]:
    """The ids of messages by the index of their spout, from their keys."""
    found: dict[int, list[int]] = {}
    for index, id_ in map(id_of, keys):
        found.setdefault(index, []).append(id_)
    return found


class SourceGroup(Source):
    """The sources of several spouts as one source.

    Guarantee:
        Each source keeps its own promises. A batch holds either retries or messages that never failed, not both. Messages
        of two sources have different tokens, and the expectation covers all of them. A slice that is split is opened
        again spout by spout, then in the parts that the source made of it; a slice on which a driver died stands alone.

    Not guaranteed:
        A batch need not hold messages of every spout. A call takes effect on all sources or on none only inside a
        transaction that all of them join. Outside of one, a call that failed half-way is repeated, and then completes,
        since each source's confirm and abort may be repeated. `times_opened` also counts slices that were returned
        because they could not share a batch with those of another spout.

    `pin` and `extend` work only on the object that opened or recovered the lease. Nothing else depends on what the object
    remembers.

    Threads: one that opens, confirms and recovers; others may `extend` meanwhile.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        if not 2 <= len(sources) <= SPOUTS_MAX:
            raise TopologyError(
                f"a group of sources has 2 to {SPOUTS_MAX} spouts, not {len(sources)}: split the topology, or give several "
                "spouts one queue"
            )
        objects: dict[int, str] = {}
        for spout, source in sources.items():
            if not is_spout_name(spout):
                raise TopologyError(f"spout name {spout!r}: use letters, digits, '_', '.' and '-'", component=spout)
            if isinstance(source, SourceGroup):
                raise TopologyError(
                    f"spout {spout!r}: its source is a group itself; name all sources in one", component=spout
                )
            other = objects.setdefault(id(source), spout)
            if other != spout:
                raise TopologyError(
                    f"spouts {other!r} and {spout!r} have the same source object; let several bolts subscribe to one "
                    "spout, or make each spout a source of its own",
                    component=spout,
                )
        self.name = group_name({spout: source.name for spout, source in sources.items()})
        self._members = tuple(_Member(spout, i, source) for i, (spout, source) in enumerate(sources.items()))
        self._by_spout = {member.spout: member for member in self._members}
        self._holders: dict[str, tuple[_Member, ...]] = {}
        self._recovered = frozenset[str]()
        self._turn = 0

    @property
    def sources(self) -> Mapping[str, Source]:
        """Each spout's source, in the order of their keys."""
        return {member.spout: member.source for member in self._members}

    @property
    def decoders(self) -> Mapping[str, Decoder]:
        """The decoder of each spout, by its name; see `SpoutReader.spout`."""
        return {member.spout: member.source.decoder for member in self._members}

    @property
    def decoder(self) -> Decoder:
        """Refused: each spout has a decoder of its own.

        Raises:
            UsageError: always; see `decoders`.
        """
        raise UsageError(f"sources {self.name}: each spout has a decoder of its own; see `decoders`")

    @property
    def kind(self) -> SourceKind:
        """The weakest of its sources' kinds."""
        kinds = {member.source.kind for member in self._members}
        return next(kind for kind in WEAKEST_FIRST if kind in kinds)

    def serves(self, guarantee: Guarantee) -> str | None:
        """None where every source can serve the guarantee."""
        reasons = ((member.spout, member.source.serves(guarantee)) for member in self._members)
        return next((f"spout {spout!r}: {reason}" for spout, reason in reasons if reason is not None), None)

    def shown_id(self, message: int, origin: int) -> str:
        """``SPOUT:`` and the id as the spout's source shows it."""
        member, id_ = self._of(message)
        return shown(member.spout, member.source.shown_id(id_, origin))

    def shown_ids(self) -> ShownIds | None:
        """The same for whole columns, where every spout's source has it."""
        members = [(member.spout, member.source.shown_ids()) for member in self._members]
        known = tuple((spout, ids) for spout, ids in members if ids is not None)
        return SpoutIds(known) if len(known) == len(members) else None

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """The next messages of every spout that can be read so, each up to the limit; `why` names the others."""
        readers, messages, why, refused = list[SliceReader](), 0, list[str](), False
        for member in self._members:
            own = None if subscription is None else member_subscription(subscription, member.spout)
            found = member.source.preview(own, limit, database)
            readers += [SpoutReader(member.spout, member.index, reader) for reader in found.readers]
            messages, refused = messages + found.messages, refused or found.refused
            why += [f"spout {member.spout!r}: {found.why}"] if found.why else []
        return SourcePreview(tuple(readers), messages, "; ".join(why), refused)

    def probes(self) -> tuple[Probe, ...]:
        """What the spouts' readers need inside executors."""
        return tuple(probe for member in self._members for probe in member.source.probes())

    def for_run(self, database: Database) -> SourceGroup:
        """The same group for one run, of what each source gives for it."""
        return SourceGroup({member.spout: member.source.for_run(database) for member in self._members})

    def begin(self, guarantee: Guarantee) -> None:
        """Tell every source."""
        for member in self._members:
            member.source.begin(guarantee)

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Subscribe to every source, under `member_subscription`."""
        for member in self._members:
            member.source.subscribe(member_subscription(subscription, member.spout), epoch)

    # -- slices ------------------------------------------------------------------------------------------------------

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """A slice with messages of as many spouts as have some, within the limit.

        The spouts take turns in being asked first. The first one decides whether the batch holds retries, and gets the
        part of the limit that the others are not expected to fill. Mates of its messages come from the other spouts, all of
        them. Else another spout's slice is returned where it holds the other kind of messages, or where a driver died on it:
        such a slice stands alone.
        """
        order = (*self._members[self._turn :], *self._members[: self._turn])
        opened = self._alone(order, lease, limit, seed, tx) or self._together(order, lease, limit, seed, tx)
        if not opened:
            return None
        self._turn = (self._turn + 1) % len(self._members)
        opened.sort(key=lambda pair: pair[0].index)
        self._holders[lease.owner] = tuple(member for member, _ in opened)
        return _joined(opened)

    def _alone(
        self, order: Sequence[_Member], lease: Lease, limit: Limit, seed: int, tx: object | None
    ) -> list[tuple[_Member, Slice]]:
        """The next part of a slice that was split, if there is one."""
        for member in order:
            if member.parts:
                slice_ = member.source.open(lease, limit, seed_of(seed, member.index), tx)
                if slice_ is not None:
                    member.parts -= 1
                    return [(member, slice_)]
                member.parts = 0
        return []

    def _together(
        self, order: Sequence[_Member], lease: Lease, limit: Limit, seed: int, tx: object | None
    ) -> list[tuple[_Member, Slice]]:
        opened: list[tuple[_Member, Slice]] = []
        most = left = max(1, limit.messages)
        left_bytes = limit.bytes
        asked = [*order]
        for place, member in enumerate(asked):
            wanted = _mates_of(opened[0][1], limit) if opened else None
            # Only where partners come whole may a batch grow beyond its limit.
            grows = wanted if limit.whole else opened and opened[0][1].mates
            if opened and not grows and (left < 1 or left_bytes < 1):
                member.wanted = most  # not asked, so not known; its turn to be first comes
                continue
            reserved = sum(min(later.wanted, most // len(order)) for later in asked[place + 1 :])
            share = max(1, left - reserved)
            share_bytes = max(1, left_bytes * share // max(1, left))
            slice_ = member.source.open(
                lease, replace(limit, messages=share, bytes=share_bytes, mates=wanted), seed_of(seed, member.index), tx
            )
            if slice_ is None:
                member.wanted = 0
                continue
            full = slice_.expected.messages >= share or 2 * slice_.bytes >= share_bytes
            member.wanted = most if full else slice_.expected.messages
            alone = slice_.deaths > 0 and not slice_.mates
            unfit = opened and (slice_.retry != opened[0][1].retry or alone or slice_.bytes > left_bytes)
            if unfit and (wanted is None or wanted.isdisjoint(slice_.mates)):
                member.source.abort(lease, tx)
                continue
            if not opened and slice_.mates:
                asked += order[:place]  # they may have its mates, though nothing that was due
            opened.append((member, slice_))
            if alone:
                break
            left -= slice_.expected.messages
            left_bytes -= slice_.bytes
        return opened

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position.

        Raises:
            PositionMismatch: it holds messages of a spout that the topology has no more.
        """
        return replace(_joined(self._attached(position)), position=position, expected=expected)

    def _attached(self, position: Mapping[str, Json]) -> list[tuple[_Member, Slice]]:
        """Each spout's part of a slice, in the order of the spouts."""
        found: list[tuple[_Member, Slice]] = []
        for spout, part in parts_of(position).items():
            member = self._by_spout.get(spout)
            if member is None:
                raise PositionMismatch(
                    f"a batch holds messages of spout {spout!r}, which the topology does not have any more (it has "
                    f"{', '.join(self._by_spout)}): run it once with that spout",
                    spout=spout,
                )
            slice_ = member.source.attach(part.position, part.expected)
            found.append((member, replace(slice_, bytes=part.bytes)))
        return sorted(found, key=lambda pair: pair[0].index)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages (named by their keys) left out."""
        out = _by_index(excluded)
        return _total(
            member.source.expect(part, seed_of(seed, member.index), frozenset(out.get(member.index, ())), tx)
            for member, part in self._attached(slice_.position)
        )

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as disjoint parts, each of one spout; the more messages a spout has, the more parts it gets.

        There are `parallelism` parts, or one for each spout of the slice where that is more.
        """
        parts = self._attached(slice_.position)
        number = [1] * len(parts)
        for _ in range(parallelism - len(parts)):
            loads = [part.expected.messages / n for (_, part), n in zip(parts, number, strict=True)]
            number[loads.index(max(loads))] += 1
        return tuple(
            SpoutReader(member.spout, member.index, reader)
            for (member, part), n in zip(parts, number, strict=True)
            for reader in member.source.readers(part, n)
        )

    def payloads_of(self, slice_: Slice, ids: Collection[int]) -> Mapping[int, bytes]:
        """The payloads of some of the slice's messages (by their keys), as their spouts' sources store them."""
        mine = _by_index(ids)
        return {
            key_of(id_, member.index, member.spout): payload
            for member, part in self._attached(slice_.position)
            if member.index in mine
            for id_, payload in member.source.payloads_of(part, mine[member.index]).items()
        }

    # -- leases ------------------------------------------------------------------------------------------------------

    def pin(self, lease: Lease, tx: object | None = None) -> None:
        """Open to pinned, in every source of the slice.

        Raises:
            Fenced: a source refuses, or this object neither opened nor recovered the lease.
        """
        for member in self._holding(lease):
            member.source.pin(lease, tx)

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry, in every source of the slice; raises Fenced as `pin` does."""
        for member in self._holding(lease):
            member.source.extend(lease)

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named, in every source.

        Raises:
            Fenced: the lease belongs to another epoch now.
            UsageError: a failed message is of a spout that has no messages in the slice.
        """
        mine: dict[int, list[MessageFailure]] = {}
        for failure in failed:
            index, id_ = id_of(failure.id)
            mine.setdefault(index, []).append(replace(failure, id=MessageId(id_)))
        # Of a lease that was recovered, a source that confirmed before holds nothing any more.
        known = self._members if lease.owner in self._recovered else self._holders.get(lease.owner, self._members)
        strangers = sorted(mine.keys() - {member.index for member in known})
        if strangers:
            raise UsageError(
                f"sources {self.name}: {lease.owner} does not hold the failed message {mine[strangers[0]][0].id} of spout "
                f"number {strangers[0]}"
            )
        retried: list[str] = []
        dead: list[str] = []
        for member in self._members:
            found = member.source.confirm(lease, mine.get(member.index, ()), tx)
            retried += member.shown(found.retried)
            dead += member.shown(found.dead)
        self._holders.pop(lease.owner, None)
        return Resolution(tuple(retried), tuple(dead))

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages, in every source."""
        for member in self._members:
            member.source.abort(lease, tx)
        self._holders.pop(lease.owner, None)

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease of every source, mine from here on; returns their owner keys."""
        holders: dict[str, tuple[_Member, ...]] = {}
        for member in self._members:
            for owner in member.source.recover(epoch, tx):
                holders[owner] = (*holders.get(owner, ()), member)
        self._holders, self._recovered = holders, frozenset(holders)
        return tuple(holders)

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Return the lease's messages in parts: one for each spout; where it holds one spout only, that source's parts.

        A spout with messages that `alone` names is split further at once.
        """
        attached = self._attached(slice_.position)
        suspects = _by_index(alone)
        known = self._holders.get(lease.owner, ())
        for member, part in attached:
            mine = suspects.get(member.index, ())
            if mine or len(attached) == 1:
                member.source.split(part, lease, mine, tx, parts)
            else:
                member.source.abort(lease, tx)
            if member in known:  # else the call is a repetition
                member.parts += 2 * len(mine) + 1 if mine or len(attached) > 1 else parts
        self._holders.pop(lease.owner, None)

    def _holding(self, lease: Lease) -> tuple[_Member, ...]:
        found = self._holders.get(lease.owner)
        if found is None:
            raise Fenced(
                f"sources {self.name}: the lease of {lease.owner} was returned, or was not opened or recovered here",
                source=self.name,
                owner=lease.owner,
            )
        return found

    # -- the rest ----------------------------------------------------------------------------------------------------

    def backlog(self) -> Backlog:
        """What is left, of all sources together."""
        return combined([member.source.backlog() for member in self._members])

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in the store of every source."""
        return all(member.source.joins(tx) for member in self._members)

    def maintain(self) -> None:
        """Each source's housekeeping."""
        for member in self._members:
            member.source.maintain()

    def drop_connections(self) -> None:
        """Close the connections of all sources, also where one of them raises; the next call makes others."""
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.source.drop_connections)

    def close(self) -> None:
        """Close all sources, also where one of them raises."""
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.source.close)

    def undecided_among(self, ids: Collection[str]) -> frozenset[str]:
        """Those of these messages that are dead letters which wait for a decision."""
        named = [pair for pair in map(unshown, ids) if pair is not None]
        return frozenset(
            one
            for member in self._members
            if (mine := [inner for spout, inner in named if spout == member.spout])
            for one in member.shown(member.source.undecided_among(mine))
        )

    def _of(self, key: int) -> tuple[_Member, int]:
        index, id_ = id_of(key)
        if index >= len(self._members):
            raise UsageError(
                f"sources {self.name}: message {key} is of spout number {index}, and there is no such spout"
            )
        return self._members[index], id_


@dataclass(frozen=True, slots=True)
class SpoutPart:
    """One spout's part of a group's position."""

    position: dict[str, Json]
    expected: Expectation
    bytes: int


def _mates_of(first: Slice, limit: Limit) -> frozenset[str] | None:
    """What may share a batch with the slice that was opened first; None: that does not matter."""
    if first.mates or first.retry:
        return first.mates | ({""} if first.retry else frozenset())
    return frozenset() if limit.whole else None


def parts_of(position: Mapping[str, Json]) -> dict[str, SpoutPart]:
    """The parts of a group's position, by spout.

    Raises:
        UsageError: it is not the position of a group.
    """
    spouts = position.get("spouts")
    if not isinstance(spouts, dict):
        raise UsageError(f"not a position of several spouts: {sorted(position)}")
    found: dict[str, SpoutPart] = {}
    for spout, part in spouts.items():
        match part:
            case {"position": dict(inner), "messages": int(messages), "xor": int(xor), "bytes": int(size)}:
                found[spout] = SpoutPart(inner, Expectation(messages, xor), size)
            case _:
                raise UsageError(f"not a position of several spouts: spout {spout!r} has {part!r:.200}")
    return found


def combined(backlogs: Sequence[Backlog]) -> Backlog:
    """The sums over several sources; of the times, the nearest retry and the oldest message."""
    retries = [b.next_retry_in_s for b in backlogs if b.next_retry_in_s is not None]
    ages = [b.oldest_ready_age_s for b in backlogs if b.oldest_ready_age_s is not None]
    at_server = [b.at_server for b in backlogs]
    return Backlog(
        ready=sum(b.ready for b in backlogs),
        pending=sum(b.pending for b in backlogs),
        waiting=sum(b.waiting for b in backlogs),
        dead=sum(b.dead for b in backlogs),
        next_retry_in_s=min(retries, default=None),
        oldest_ready_age_s=max(ages, default=None),
        at_server=None if None in at_server else sum(number for number in at_server if number is not None),
    )


def _joined(opened: Sequence[tuple[_Member, Slice]]) -> Slice:
    """The parts of several spouts as one slice."""
    spouts: dict[str, Json] = {
        member.spout: {
            "position": part.position,
            "messages": part.expected.messages,
            "xor": part.expected.xor,
            "bytes": part.bytes,
        }
        for member, part in opened
    }
    return Slice(
        position={"spouts": spouts},
        expected=_total(part.expected for _, part in opened),
        bytes=sum(part.bytes for _, part in opened),
        retry=any(part.retry for _, part in opened),
        deaths=max(part.deaths for _, part in opened),
        mates=frozenset(mate for _, part in opened for mate in part.mates),
        replayed=tuple(
            (key_of(id_, member.index, member.spout), origin)
            for member, part in opened
            for id_, origin in part.replayed
        ),
    )


def _total(expected: Iterable[Expectation]) -> Expectation:
    """What is expected of several disjoint sets of messages."""
    parts = list(expected)
    return Expectation(sum(e.messages for e in parts), xor_signed(e.xor for e in parts))
