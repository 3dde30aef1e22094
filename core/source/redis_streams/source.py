"""`RedisStreamSource`: the entries of a Redis stream as messages. An entry's fields become a payload when it is read."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal, Self, Unpack

import pyarrow as pa

from stormproof.core.base import arguments
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.capabilities import REDIS_STREAM
from stormproof.core.contract.payload import Unit, all_sealed, all_unsealed, bytes_of, decoder_for, sealed, unsealed
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, ContinuityLook, OnGap, OnNewStream, Rules
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import RedeliveringArguments, RedeliveringSource
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.postgres.database import Database
from stormproof.core.source.metadata import Fact, KeepsMetadata, MarkedDecoder, Metadata
from stormproof.core.source.redis_streams.client import (
    ANEW,
    CONSUMER,
    Counted,
    Group,
    StreamCounts,
    StreamEntry,
    dataset_at,
)

log = logging.getLogger("stormproof.source")

LOOK_FOR_HELD_S: Final = 1.0
"""How often it is asked what other consumers hold: a driver that was replaced may have read entries meanwhile."""


class RedisStreamSource(KeepsMetadata, RedeliveringSource):
    """The entries of a Redis stream, read by a consumer group.

    Each topology has a group of its own, so each reads every entry. What a driver that died was given and has not
    confirmed is taken over by the next one (XCLAIM), at once.

    Guarantee: an entry is known by its id for `horizon_s` seconds after it was resolved, whatever the server forgets in a
    crash. A stream that was deleted and made again, and one that lost entries before they were read, stop the run by name.

    Not guaranteed: a server that is killed may lose the entries that it has not written to its disk (`appendfsync`).
    Entries deleted one by one (XDEL) before they are read were withdrawn by whoever did it.
    """

    KIND: ClassVar[str] = "redis"
    capabilities = REDIS_STREAM
    """Ids of the server; a set of entries can be read again, but one journal serves all servers that deliver."""
    BEFORE_ID: ClassVar[str] = "/"
    NOUN: ClassVar[str] = "Redis stream"

    def __init__(
        self,
        stream: str,
        *,
        url: str = "redis://127.0.0.1:6379",
        schema: str = "line string",
        field: str | None = None,
        unit: Unit | None = None,
        metadata: Sequence[str] | Mapping[str, str] = (),
        group: str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_gap: OnGap = "fail",
        on_new_stream: OnNewStream = "fail",
        claim_idle_s: float = 0.0,
        name: str | None = None,
        **pending: Unpack[RedeliveringArguments],
    ) -> None:
        """`field` holds the payload; without it, the fields that the schema's columns name do.

        Where an entry has a single field, and no column has its name, that field is the payload.

        `group`: a consumer group that is there already, or is to be made by this name; by default "stormproof:" and the
        topology's incarnation. Only entries that another consumer has held for `claim_idle_s` are taken over.
        `start`: where a group that is made begins. `on_gap`: what entries that were removed before they were read lead
        to. `on_new_stream`: what a stream that was deleted and made again leads to; or, with "same", only its group was
        deleted, and entries that were read before are the same ones. `name`: under which messages are pending; by
        default the stream's. `metadata` names fields to add behind the schema's: id, timestamp (of the id), and fields, all
        that the entry has. `RedeliveringArguments` and `PendingArguments` have further arguments.
        """
        arguments.require_text(self.NOUN, "stream", stream, "orders")
        where = f"{self.NOUN} {stream}"
        arguments.require_text(where, "url", url, "redis://HOST:PORT")
        arguments.require_text_if_given(where, "field", field, "payload")
        arguments.require_text_if_given(where, "group", group, "billing")
        arguments.require_text_if_given(where, "name", name, stream)
        arguments.require_choice(where, "start", start, ("earliest", "latest"))
        arguments.require_seconds(where, "claim_idle_s", claim_idle_s)
        super().__init__(name or stream, schema=schema, unit=unit, **pending)
        with arguments.error_prefix(where):
            decoded = decoder_for(schema, unit).schema
        self._payload = payload_by(decoded, field, unit=unit is not None)
        self._decoder = EntryDecoder(self._decoder, repr(field) if field else f"of {', '.join(decoded.names)}")
        self._metadata = EntryMetadata.chosen(where, metadata, decoded)
        self._decoder = self._metadata.decoder(self._decoder)
        self._stream = stream
        self._url = url
        self._group_name = group
        self._start = {"earliest": "0", "latest": "$"}[start]
        self._rules = Rules(where, self.name, "keep more entries in the stream", ANEW, on_gap, on_new_stream)
        self._claim_idle_ms = int(claim_idle_s * 1_000)
        self._group: Group | None = None
        self._identity = ""
        self._counted = Counted()
        self._forget_connection()

    def __repr__(self) -> str:
        return f"RedisStreamSource({self._stream!r})"  # the url may have a password

    def datasets(self) -> tuple[DatasetName, ...]:
        """The stream at its server, in its database."""
        return (dataset_at(self._url, self._stream),)

    def for_run(self, database: Database) -> Self:
        """The same source for one run, with connections of its own."""
        view = super().for_run(database)
        view._group = None
        view._identity = ""
        view._forget_connection()
        return view

    def _forget_connection(self) -> None:
        """What was asked and not answered is with a consumer that is not ours any more: it is taken over from it."""
        self._consumer = CONSUMER + uuid.uuid4().hex
        self._looked_s = -math.inf

    # ---- which stream it is

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription; its consumer group is made where it is missing."""
        self._subscription = subscription  # the group's name has it
        self._group = None
        self._forget_seen()
        super().subscribe(subscription, epoch)

    @property
    def _here(self) -> Group:
        if self._group is None:
            name = self._group_name or f"stormproof:{self._subscription}"
            self._group = Group(self._url, self._stream, name, self.where)
        return self._group

    def start(self, cursor: Any) -> At:
        """In front of the first message, with the identity of the group."""
        identity, counted = self._here.make(self._start, uuid.uuid4().hex)
        return {**super().start(cursor), "stream": identity, **counted.to_json()}

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Remember which stream it has to be, and how much of it is accounted for."""
        if not self._identity:
            self._identity, self._counted = str(position.get("stream", "")), Counted.of(position)
            found = self._here.identity()
            if found != self._identity:
                self._another(found)
            what = f"the consumer group {self._here.name}"
            self._refuse_sharing(who, cursor, what, "stream", self._identity, "group")
        return {**position, "stream": self._identity}

    def _another(self, found: str | None) -> None:
        """Read the stream that is there now.

        Raises:
            PositionMismatch: it is not to be read in place of the one before.
        """
        if self._rules.on_new_stream == "same" and found is None:
            log.warning("%s: the consumer group was deleted; it reads the same stream from its start again", self.where)
            self._here.make("0", self._identity)
            return
        if self._rules.on_new_stream == "fail":
            self._identity = ""
            raise self._here.gone()
        text = "the stream or its group was made again; the entries that are there are taken for new messages"
        self._read_as_new(ContinuityLook(Continuity.ANOTHER, text), anew=False)

    def _read_as_new(self, look: ContinuityLook, *, anew: bool) -> None:
        self.saw(look)
        self._identity, self._counted = self._here.make("0", uuid.uuid4().hex, anew=anew)
        self.saw(stream=self._identity, **self._counted.to_json())

    # ---- what the journal asks for

    def receive(self, limit: int) -> Sequence[Delivery]:
        """New entries; and now and then, those that another consumer was given and has not confirmed."""
        try:
            now_s = self._clock.monotonic_s()
            if now_s - self._looked_s >= LOOK_FOR_HELD_S:
                held = self._taken_over(limit)
                if held:
                    return self._deliveries(held)
                self._looked_s = now_s
            return self._deliveries(self._new(limit))
        except StoreUnavailable:
            self._forget_connection()
            raise
        except PositionMismatch:
            found = self._here.identity()
            if found == self._identity:  # it is the same stream, and `_rules` refuse what it has
                raise
            self._another(found)
            return ()

    def _new(self, limit: int) -> list[StreamEntry]:
        """Entries that nobody was given. What was removed before them is decided on first."""
        looked = False
        while True:
            known = None if self._is_shared else self._counted
            entries, facts = self._here.read(self._consumer, limit, self._identity, known, looked=looked)
            ids = None if entries is None else [one.id for one in entries]
            look, counted = self._looked(facts, ids, is_all=ids is not None and len(ids) < limit)
            if look.verdict is Continuity.REWOUND and self._rules.on_new_stream == "adopt":
                self._read_as_new(look, anew=True)
                return []
            self.saw(look, **counted.to_json())
            self._counted, looked = counted, True
            self._left = None if counted.read < 0 else max(0, facts.added - counted.read)
            if entries is not None:
                return entries

    @property
    def _is_shared(self) -> bool:
        """Whether other programs read by the group, too: what they were given is not seen here."""
        return self._claim_idle_ms > 0

    def _looked(
        self, facts: StreamCounts, ids: Sequence[str] | None, *, is_all: bool
    ) -> tuple[ContinuityLook, Counted]:
        """What the look has shown. Another driver may have been given entries meanwhile: they are taken over from it."""
        if self._is_shared:
            return Counted(facts.group_read, facts.group_last).looked(facts, ids, is_all=False)
        look, counted = self._counted.looked(facts, ids, is_all=is_all)
        if look is CONTINUOUS and counted.withdrawn == self._counted.withdrawn:
            return look, counted
        mine = set(ids or ())
        held = [one for one in self._here.given_behind(self._counted.last) if one not in mine]
        return self._counted.given(held).looked(facts, ids, is_all=is_all) if held else (look, counted)

    def _deliveries(self, entries: Sequence[StreamEntry]) -> Sequence[Delivery]:
        ids = [entry.id for entry in entries]
        kept = [stored_entry(entry.fields) for entry in entries]
        payloads = [payload for payload, _ in kept]
        stored = all_sealed(payloads, ("id", "field"), (ids, [field for _, field in kept]))
        return list(map(Delivery, map(self._stable_id, ids), ids, payloads, stored))

    def unpack(self) -> Callable[[Sequence[bytes]], Sequence[pa.Array]]:
        """What makes payloads of stored entries, by the fields that are wanted."""
        return partial(_loaded, self._payload, self._metadata)

    @classmethod
    def edited(cls, old: bytes, payload: bytes) -> bytes:
        """The new value of an entry's single field, or its new fields as a JSON object.

        Raises:
            UsageError: it is none.
        """
        _, facts = unsealed(old)
        fields_in(payload, facts)
        return sealed(payload, facts)

    def _stable_id(self, entry: str) -> str:
        return f"{self._identity}/{entry}"

    def _taken_over(self, limit: int) -> list[StreamEntry]:
        """Entries that others hold. Of those that are not in the stream any more, the journal must have the payload."""
        ids = self._here.held_by_others(self._consumer, limit, self._claim_idle_ms)
        if not ids:
            return []
        self._counted = self._counted.given(self._here.given_behind(self._counted.last))
        self.saw(**self._counted.to_json())
        gone = self._here.removed(ids)
        if gone:
            with self.rows() as rows:
                known = self._journal(rows.cursor).known(self._stable_id(id_) for id_ in gone)
            lost = [id_ for id_ in gone if self._stable_id(id_) not in known]
            if lost:
                text = (
                    f"{len(lost)} entries between {lost[0]} (given to a driver) and {lost[-1]} were removed from the stream "
                    "before they were written down"
                )
                self.saw(ContinuityLook(Continuity.REMOVED, text, len(lost), lost[0], lost[-1]))
            self._here.confirm(gone)
        left = set(gone)
        return self._here.claim(self._consumer, [id_ for id_ in ids if id_ not in left], self._claim_idle_ms)

    def left_at_server(self) -> int | None:
        """What was added and is not accounted for; entries that another consumer was given are not in it."""
        return self._left

    @classmethod
    def notes(cls, position: At) -> tuple[str, ...]:
        """Entries that were withdrawn."""
        withdrawn = Counted.of(position).withdrawn
        return (f"{withdrawn} entries were deleted one by one (XDEL) before they were read",) if withdrawn else ()

    def acknowledge(self, handles: Sequence[Any]) -> None:
        """XACK: by id, so a repetition does no harm."""
        try:
            self._here.confirm(handles)
        except StoreUnavailable:
            self._forget_connection()
            raise

    def give_back(self, handles: Sequence[Any]) -> None:
        """Nothing to do: the next driver takes over what this one holds."""

    def maintain(self) -> None:
        """Also remove consumers of drivers that are gone."""
        forgot_s = self._forgot_s
        super().maintain()
        if self._forgot_s != forgot_s:
            self._here.sweep()

    def drop_connections(self) -> None:
        """Let connections go; the next call makes others."""
        super().drop_connections()
        if self._group is not None:
            self._group.close()


def _loaded(payload: Payload, metadata: Metadata, stored: Sequence[bytes]) -> list[pa.Array]:
    payloads, facts = all_unsealed(stored)
    fields = [fields_in(one or b"", said) for one, said in zip(payloads, facts, strict=True)]
    entries = [StreamEntry(said["id"], one) for said, one in zip(facts, fields, strict=True)] if metadata else ()
    return [metadata.given(list(map(payload, fields)), entries)]


# ---- how an entry is stored, and how its fields become a payload

_UNREADABLE: Final = b"\0stormproof: no such field\0"
"""Begins the payload of an entry that has not the field; what follows are the names of those that it has."""

Fields = Mapping[bytes, bytes]
Payload = Callable[[Fields], bytes]


def stored_entry(fields: Fields) -> tuple[bytes, str | None]:
    """Payload to be stored, and the name of its field: a single field's value, or a JSON object of all fields, as they came.

    Bytes that are no UTF-8 stay as they are.
    """
    if len(fields) == 1:
        ((name, value),) = fields.items()
        return value, _readable(name)
    text = {_readable(name): _readable(value) for name, value in fields.items()}
    return bytes_of(json.dumps(text, ensure_ascii=False)), None


def fields_in(payload: bytes, facts: Mapping[str, str | None]) -> Fields:
    """The fields again.

    Raises:
        UsageError: it is no JSON object of texts.
    """
    field = facts.get("field")
    if field is not None:
        return {bytes_of(field): payload}
    try:
        found = json.loads(_readable(payload))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found or not all(isinstance(value, str) for value in found.values()):
        raise UsageError("an entry of several fields is given as a JSON object of its fields, each of them a text")
    return {bytes_of(name): bytes_of(value) for name, value in found.items()}


def _readable(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def payload_by(schema: pa.Schema, field: str | None, *, unit: bool) -> Payload:
    """What makes payloads of entries: of one field, if it is named; else of the fields that the schema's columns name.

    Of an entry with a single field that no column is named after, it is that field.
    """
    if field is not None:
        return partial(_field, field.encode())
    if unit or (len(schema) == 1 and not _is_json(schema.field(0).type)):
        return partial(_field_of_column, schema.names[0].encode())
    quoted = {column.name.encode(): _is_quoted(column.type) for column in schema}
    return partial(_object, quoted)


def _is_json(type_: pa.DataType) -> bool:
    """Whether the decoder takes a single column of the type as a key of a JSON object, and not as the whole payload."""
    return not (pa.types.is_string(type_) or pa.types.is_binary(type_))


def _field(name: bytes, fields: Fields) -> bytes:
    value = fields.get(name)
    return _unreadable(fields) if value is None else value


def _field_of_column(name: bytes, fields: Fields) -> bytes:
    if len(fields) == 1:
        return next(iter(fields.values()))
    return _field(name, fields)


def _object(quoted: Mapping[bytes, bool], fields: Fields) -> bytes:
    if len(fields) == 1 and not fields.keys() & quoted.keys():
        return next(iter(fields.values()))
    parts = [
        json.dumps(name.decode()).encode() + b": " + _json(fields[name], quotes=is_quoted)
        for name, is_quoted in quoted.items()
        if name in fields
    ]
    return b"{" + b", ".join(parts) + b"}" if parts else _unreadable(fields)


def _is_quoted(type_: pa.DataType) -> bool:
    """Whether the decoder takes the type's values as JSON text, and not as a JSON literal."""
    return bool(pa.types.is_string(type_) or pa.types.is_decimal(type_) or pa.types.is_temporal(type_))


def _json(value: bytes, *, quotes: bool) -> bytes:
    if not quotes:
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            pass  # as text, which the decoder refuses by the column's name
        else:
            return value
    # Bytes that are no UTF-8 stay as they are: the decoder says where.
    return bytes_of(json.dumps(_readable(value), ensure_ascii=False))


def _unreadable(fields: Fields) -> bytes:
    names = ", ".join(storable_text(name.decode("utf-8", "replace")) for name in list(fields)[:20])
    return _UNREADABLE + names.encode()


class EntryDecoder(MarkedDecoder):
    """Fails messages whose entry has not the field; the rest is `inner`'s."""

    __slots__ = ()
    MARK = _UNREADABLE

    def error(self, rest: bytes) -> str:
        """Names the field, and those that the entry has."""
        return f"the entry has no field {self.wanted}; it has: {rest.decode()}"


# ---- what Redis knows of an entry beside its payload

_YEAR_10000_MS: Final = 253_402_300_800_000


def _timestamp(entry: StreamEntry) -> int | None:
    """Microseconds; None where an id of the producer's own is no time."""
    found = int(entry.id.partition("-")[0])
    return found * 1_000 if found < _YEAR_10000_MS else None


def _fields(entry: StreamEntry) -> list[dict[str, str | bytes]]:
    return [{"name": name.decode("utf-8", "replace"), "value": value} for name, value in entry.fields.items()]


class EntryMetadata(Metadata):
    """`timestamp` is the first part of the id: the server's time in ms, where the producer gave no id of its own."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {
        "id": (pa.string(), lambda entry: entry.id),
        "timestamp": (pa.timestamp("us", "UTC"), _timestamp),
        "fields": (pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])), _fields),
    }
