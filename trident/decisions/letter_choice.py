"""The dead letters of a topology: messages that failed too often, and those that one sink rejected; which are meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.dead_letter import DeadLetter, Disposal, LetterHead
from stormproof.core.pending.letters import DeadLetters
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.registry import connector_of
from stormproof.core.source.files.rows import shown_payload
from stormproof.core.source.spouts import shown, sources_in, unshown
from stormproof.trident.audit.source import PendingEvidence, recorded_ids, server_ids, spout_sources, stored_source
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Reject, record_of
from stormproof.trident.terms.transaction_states import RejectState
from stormproof.trident.terms.wording import parse_time

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import AuditLedger, TopologyRow
    from stormproof.trident.decisions.stores import Stores


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Each field that is not None must hold: texts must be equal, and `match` be found in the error or the payload.

    `sink`, `first` and `last` admit only what a sink rejected: there, and from one txid to another. `error_class` admits an
    SQLSTATE also by its first two characters; the component of what a sink rejected is the sink.
    """

    source: str | None = None
    reason: str | None = None
    component: str | None = None
    error_class: str | None = None
    match: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    sink: str | None = None
    first: int | None = None
    last: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every dead letter passes."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def is_of_sinks(self) -> bool:
        """Whether only what a sink rejected passes."""
        return (self.sink, self.first, self.last) != (None, None, None)

    @property
    def without_sink(self) -> LetterFilter:
        """The same at any sink."""
        return replace(self, sink=None)

    def admits(self, head: LetterHead) -> bool:
        """Whether a dead letter of a source passes by all but `source` and `match`."""
        return (
            not self.is_of_sinks
            and (self.reason is None or self.reason == head.reason)
            and (self.component is None or self.component == head.component)
            and (self.error_class is None or self.error_class == head.error_class)
            and (self.since is None or head.dead_at >= self.since)
            and (self.until is None or head.dead_at < self.until)
        )

    def admits_source(self, names: Sequence[str]) -> bool:
        """Whether those of a source may pass; `names` are its name and, of several spouts, its spout's."""
        return self.source is None or self.source in names

    def matches(self, letter: DeadLetter) -> bool:
        """Whether `match` is in the error or the payload."""
        return self.match is None or self.match in letter.error or self.match in shown_payload(letter.payload)


def filter_of(**given: object) -> LetterFilter:
    """The filter that a person's values name.

    Raises:
        UsageError: a time or a txid cannot be read.
    """
    values: dict[str, Any] = {
        name: _READ[name](name, str(value)) if name in _READ else str(value)
        for name, value in given.items()
        if value is not None
    }
    return LetterFilter(**values)


def _time(_name: str, text: str) -> datetime | None:
    return parse_time(text, SystemClock().now())


def _txid(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{name}: {text[:40]!r} is no txid")
    return int(text)


_READ: Final[Mapping[str, Callable[[str, str], object]]] = {
    "since": _time,
    "until": _time,
    "first": _txid,
    "last": _txid,
}


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, under its id in the topology (with the spout, if there are several).

    With a `sink` it is one of that sink, which rejected the message: the other sinks hold it. Without an `id` it is a row of
    no single message there.
    """

    topology: str
    id: str | None
    reason: str
    error_class: str
    component: str
    error: str
    payload: bytes | None
    dead_at: datetime
    disposal: Disposal | None
    by: str | None
    why: str | None
    disposed_at: datetime | None
    source: str | None = None
    times_opened: int | None = None
    times_failed: int | None = None
    history: tuple[dict[str, Json], ...] = ()
    new_payload: bytes | None = None
    sink: str | None = None
    txid: int | None = None
    """The batch in which the sink rejected it."""
    row: str | None = None
    """The refused row, as JSON."""
    rows: int | None = None
    """How many rows the sink does not hold."""
    requeued_in: int | None = None
    """The batch that wrote it anew to the sink, or in which the sink rejected it again."""

    @property
    def shown_id(self) -> str | None:
        """The id, as in a `LetterHead`."""
        return self.id

    @property
    def state(self) -> str:
        """What an operator decided, or `undecided`."""
        return "undecided" if self.disposal is None else _DECIDED[self.disposal]

    @staticmethod
    def of_source(topology: str, id_: str, source: str, letter: DeadLetter) -> Letter:
        """A message that failed too often."""
        head = LetterHead.of(letter)
        return record_of(
            Letter,
            letter,
            topology=topology,
            id=id_,
            error_class=head.error_class,
            component=head.component,
            source=source,
            **dict.fromkeys(("sink", "txid", "row", "rows", "requeued_in")),
        )

    @staticmethod
    def of_sink(topology: str, one: Reject) -> Letter:
        """A message, or a row of none, that a sink rejected."""
        assert one.at is not None
        return record_of(
            Letter,
            one,
            topology=topology,
            id=one.message,
            reason=_REFUSED,
            error_class=one.reason,
            component=one.sink,
            dead_at=one.at,
            disposal=_DISPOSALS[one.state],
            disposed_at=one.decided_at,
            history=(),
            requeued_in=one.retried_in,
            **dict.fromkeys(("source", "times_opened", "times_failed", "new_payload")),
        )


_DECIDED: Final = {Disposal.REQUEUE: "requeued", Disposal.EDIT: "edited", Disposal.DROP: "dropped"}
_REFUSED: Final = "refused"
_DISPOSALS: Final[Mapping[RejectState, Disposal | None]] = {
    RejectState.OPEN: None,
    RejectState.RETRYING: Disposal.REQUEUE,
    RejectState.RETRIED: Disposal.REQUEUE,
    RejectState.DROPPED: Disposal.DROP,
}


@dataclass(frozen=True, slots=True)
class Letters:
    """The dead letters of a topology: of its source, or of the sources of its spouts, whose names then begin the ids; and
    those of its sinks.
    """

    row: TopologyRow
    sources: Mapping[str | None, DeadLetters]
    ledger: AuditLedger
    elsewhere: tuple[str, ...] = ()
    """Spouts, or the one source, that are not in the ledger's database: their dead letters are out of reach."""

    @property
    def topology(self) -> str:
        """The topology's name."""
        return self.row.name

    @property
    def out_of_reach(self) -> str:
        """Whose dead letters are not shown, for people."""
        names = ", ".join(self.elsewhere)
        return f"stormproof: dead letters of {names} are not in the ledger's database, and not shown"

    def each(self, where: LetterFilter, *, undecided: bool = False) -> Generator[Letter]:
        """The dead letters that the filter admits, whole: source by source, then those of sinks; each oldest first.

        Those of sources come a few at a time. Those of sinks have no payload.
        """
        yield from self._each_of_sources(where, undecided=undecided)
        for one in self.rejects(where, undecided=undecided, texts=True):
            yield Letter.of_sink(self.topology, one)

    def _each_of_sources(self, where: LetterFilter, *, undecided: bool) -> Generator[Letter]:
        for spout, source in self._admitted(where):
            with closing(source.each()) as found:
                for letter in found:
                    if (
                        not (undecided and letter.disposal is not None)
                        and where.admits(LetterHead.of(letter))
                        and where.matches(letter)
                    ):
                        yield Letter.of_source(self.topology, _shown(spout, letter.shown_id), source.name, letter)

    def heads(self, where: LetterFilter, *, undecided: bool = False) -> Generator[LetterHead | Letter]:
        """The same without payloads, errors and histories; only a filter by `match` reads these. The ids name the spout."""
        yield from self._heads_of_sources(where, undecided=undecided)
        for one in self.rejects(where, undecided=undecided):
            yield Letter.of_sink(self.topology, one)

    def _heads_of_sources(self, where: LetterFilter, *, undecided: bool) -> Generator[LetterHead | Letter]:
        if where.match is not None:
            yield from self._each_of_sources(where, undecided=undecided)
            return
        for spout, source in self._admitted(where):
            with closing(source.heads(undecided=undecided)) as found:
                for head in found:
                    if where.admits(head):
                        yield head if spout is None else replace(head, shown_id=_shown(spout, head.shown_id))

    def rejects(
        self,
        where: LetterFilter,
        *,
        ids: Collection[str] = (),
        undecided: bool = False,
        texts: bool = False,
        payloads: bool = False,
    ) -> list[Reject]:
        """What sinks rejected and the filter admits, oldest first; of these messages alone, if some are named."""
        c = t.reject.c
        conditions = self._conditions(where)
        if undecided:
            conditions.append(c.state == sa.literal_column(f"'{RejectState.OPEN.value}'"))  # as the index has it
        if ids:
            conditions.append(c.message == sa.any_(sa.literal([*ids], ARRAY(sa.Text))))
        with self.ledger.snapshot() as snapshot:
            return snapshot.rejects(
                self.row.incarnation,
                first=where.first,
                last=where.last,
                sink=where.sink,
                conditions=conditions,
                texts=texts,
                payloads=payloads,
            )

    def _conditions(self, where: LetterFilter) -> list[sa.ColumnElement[bool]]:
        c = t.reject.c
        found: list[sa.ColumnElement[bool]] = []
        if where.source is not None:
            spouts = sources_in(self.row.source)
            named = [
                c.message.startswith(shown(one, ""), autoescape=True)
                for one in spouts
                if where.source in (one, spouts[one])
            ]
            found.append(sa.or_(sa.literal(where.source == self.row.source), *named))
        if where.reason not in (None, _REFUSED):
            found.append(c.sqlstate == where.reason)
        if where.component is not None:
            found.append(c.sink == where.component)
        if where.error_class is not None:
            name = sa.func.coalesce(c.sqlstate, _REFUSED)
            found.append(sa.or_(name == where.error_class, sa.func.substr(c.sqlstate, 1, 2) == where.error_class))
        if where.match is not None:
            found.append(
                sa.or_(c.error.contains(where.match, autoescape=True), c.row.contains(where.match, autoescape=True))
            )
        if where.since is not None:
            found.append(c.at >= where.since)
        if where.until is not None:
            found.append(c.at < where.until)
        return found

    def choose(self, where: LetterFilter, ids: Collection[str] = ()) -> ChosenLetters:
        """Those undecided ones that the filter admits; of these messages alone, if some are named."""
        named, chosen, classes = frozenset(ids), list[str](), LetterClasses()
        for head in self._heads_of_sources(where, undecided=True):
            if head.shown_id is not None and (not named or head.shown_id in named):
                chosen.append(head.shown_id)
                classes.add(self.topology, head)
        rejects = self.rejects(where, ids=ids, undecided=True)
        for one in rejects:
            classes.add(self.topology, Letter.of_sink(self.topology, one))
        return ChosenLetters(tuple(chosen), tuple(rejects), tuple(classes.sorted()))

    def named(self, where: LetterFilter, ids: Sequence[str]) -> ChosenLetters:
        """Those of these messages, without a look at whether each is one of a source: a decision tells that."""
        rejects = self.rejects(where, ids=ids, undecided=True) if ids else []
        return ChosenLetters(() if where.is_of_sinks else tuple(ids), tuple(rejects), ())

    def of_message(self, message: str) -> list[Letter]:
        """The dead letters of one message, with payloads: those of its source, oldest first, then those of sinks."""
        of_sources = [
            Letter.of_source(self.topology, message, source.name, letter)
            for spout, source in self.sources.items()
            if (inner := _inner(spout, message)) is not None
            for letter in source.of_message(inner)
        ]
        of_sinks = self.rejects(LetterFilter(), ids=[message], texts=True, payloads=True)
        return [*of_sources, *(Letter.of_sink(self.topology, one) for one in of_sinks)]

    def require_sources(self) -> None:
        """Raise UsageError where the topology's source keeps nothing in the ledger's database."""
        if not self.sources:
            raise UsageError(
                f"topology {self.topology!r} reads {self.row.source!r}, which keeps nothing in the ledger's database. "
                "No command reaches its dead letters: call the source's dead_letters(), requeue(), edit() and drop() in "
                "the process that has it",
                topology=self.topology,
            )

    def _admitted(self, where: LetterFilter) -> Iterator[tuple[str | None, DeadLetters]]:
        for spout, source in self.sources.items():
            if where.admits_source([source.name, *([] if spout is None else [spout])]):
                yield spout, source

    def dispose(self, ids: Sequence[str], *, requeue: bool, by: str, why: str, tx: object) -> list[str]:
        """Requeue or drop, in a transaction of the database; returns those that were undecided dead letters."""
        done: list[str] = []
        for spout, source in self.sources.items():
            act = source.requeue if requeue else source.drop
            mine = [inner for one in ids if (inner := _inner(spout, one)) is not None]
            done += [_shown(spout, inner) for inner in act(mine, by=by, why=why, tx=tx)]
        return done

    def open_again(self, messages: Mapping[str, bytes], *, by: str, why: str, tx: object) -> list[str]:
        """Hand out confirmed messages again, in a transaction of the database; returns those that are handed out."""
        done: list[str] = []
        for spout, source in self.sources.items():
            mine = {inner: payload for one, payload in messages.items() if (inner := _inner(spout, one)) is not None}
            if mine:
                done += [_shown(spout, inner) for inner in source.open_again(mine, by=by, why=why, tx=tx)]
        return done

    def retry_now(self, *, by: str, why: str, tx: object) -> int:
        """Hand out now what waits for a retry, in a transaction of the database; gives how many messages that are."""
        return sum(source.retry_now(by=by, why=why, tx=tx) for source in self.sources.values())

    def unconfirmed(self, ids: Sequence[str]) -> dict[str, bool]:
        """Those of these messages that wait for a retry or are undecided dead letters; and whether each has failed since it
        was handed out anew.
        """
        found: dict[str, bool] = {}
        for spout, source in self.sources.items():
            mine = [inner for one in ids if (inner := _inner(spout, one)) is not None]
            if mine:
                found.update((_shown(spout, inner), failed) for inner, failed in source.unconfirmed(mine).items())
        return found

    def edit(self, message: str, payload: bytes, *, by: str, why: str, tx: object) -> bool:
        """Requeue with another payload, in a transaction of the database; False if it was no undecided dead letter."""
        return any(
            source.edit(inner, payload, by=by, why=why, tx=tx)
            for spout, source in self.sources.items()
            if (inner := _inner(spout, message)) is not None
        )


def named(stores: Stores, topology: str, ids: Sequence[str]) -> list[str]:
    """Messages by the ids of the record, where their servers' ids are given; what is neither stays as it is. Each once."""
    with stores.audit.snapshot() as snapshot:
        return recorded_ids(snapshot, snapshot.topology(topology), ids)


def called_by_servers(stores: Stores, topology: str, ids: Collection[str]) -> Mapping[str, str]:
    """What their servers call messages, by their shown ids; see `SourceEvidence.server_ids`."""
    with stores.audit.snapshot() as snapshot:
        return server_ids(snapshot, snapshot.topology(topology), ids)


def _shown(spout: str | None, inner: str) -> str:
    return inner if spout is None else shown(spout, inner)


def _inner(spout: str | None, message: str) -> str | None:
    """A message's id in the source of a spout; None if it is another spout's."""
    if spout is None:
        return message
    named = unshown(message)
    return named[1] if named is not None and named[0] == spout else None


@contextmanager
def letters_of(stores: Stores, topology: str) -> Generator[Letters]:
    """The dead letters of a topology, under its subscriptions and of its sinks. Fences no driver.

    Raises:
        UsageError: there is no such topology.
    """
    with ExitStack() as stack:
        sources: dict[str | None, DeadLetters] = {}
        row, members = _evidence(stores.audit, topology)
        for spout, evidence in members.items():
            connector = connector_of(evidence.who.kind)
            store = PostgresPendingStore(connector.NOUN, evidence.name, database=stores.database)
            sources[spout] = DeadLetters(store, evidence.who, connector)
            stack.callback(store.close)
        elsewhere = () if None in sources else tuple(one for one in sources_in(row.source) if one not in sources)
        yield Letters(row, sources, stores.audit, elsewhere or (() if sources else (row.source,)))


def _evidence(ledger: AuditLedger, topology: str) -> tuple[TopologyRow, Mapping[str | None, PendingEvidence]]:
    """A topology, and the records of its sources by spout (by None if it has no spouts), as far as the ledger has them."""
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = stored_source(snapshot, row)
        return row, {None: found} if isinstance(found, PendingEvidence) else dict(spout_sources(snapshot, row).items())


@dataclass(frozen=True, slots=True)
class LetterClass:
    """The dead letters of one topology, class of error, reason and component; `undecided` ones wait for an operator."""

    topology: str
    error_class: str
    reason: str
    component: str
    undecided: int
    decided: int


class LetterClasses:
    """Counts dead letters by class."""

    def __init__(self) -> None:
        self._waiting = Counter[tuple[str, str, str, str]]()
        self._decided = Counter[tuple[str, str, str, str]]()

    def add(self, topology: str, head: LetterHead | Letter) -> None:
        """Count one more."""
        key = (topology, head.error_class, head.reason, head.component)
        (self._waiting if head.disposal is None else self._decided)[key] += 1

    @property
    def is_empty(self) -> bool:
        """Whether none was counted."""
        return not self._waiting and not self._decided

    def sorted(self) -> list[LetterClass]:
        """The classes; the one with the most undecided ones first."""
        waiting, decided = self._waiting, self._decided
        keys = sorted(waiting.keys() | decided.keys(), key=lambda key: (-waiting[key], -decided[key], key))
        return [LetterClass(*key, waiting[key], decided[key]) for key in keys]


@dataclass(frozen=True, slots=True)
class ChosenLetters:
    """Undecided dead letters that a decision is about, and how many there are of each class."""

    ids: tuple[str, ...]
    """Messages that failed too often."""
    rejects: tuple[Reject, ...]
    """What sinks rejected."""
    classes: tuple[LetterClass, ...]

    @property
    def number(self) -> int:
        """How many dead letters these are."""
        return len(self.ids) + len(self.rejects)

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages, each once."""
        return tuple(dict.fromkeys((*self.ids, *(one.message for one in self.rejects if one.message is not None))))

    @property
    def keys(self) -> frozenset[str | int]:
        """What tells each of these dead letters from any other."""
        return frozenset((*self.ids, *(one.id for one in self.rejects)))

    def of(self, messages: Collection[str]) -> ChosenLetters:
        """Those of these messages."""
        mine = frozenset(messages)
        rejects = tuple(one for one in self.rejects if one.message in mine)
        return ChosenLetters(tuple(one for one in self.ids if one in mine), rejects, ())


def not_dead(letters: Letters, message: str) -> UsageError:
    """What is said of an id that no dead letter has."""
    names = {spout for spout in letters.sources if spout is not None}
    form = f"; ids look like SPOUT:ID, with one of the spouts {', '.join(sorted(names))}" if names else ""
    return UsageError(
        f"message {message} of topology {letters.topology!r} is no dead letter{form}. See: stormproof dead-letters list "
        f"{letters.topology}",
        topology=letters.topology,
        message=message,
    )
