"""The dead letters of a topology's sources, under the ids that people see, by class of error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.core.pending.letters import DeadLetters
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.registry import connector_of
from stormproof.core.source.dead_letter import DeadLetter, LetterHead
from stormproof.core.source.spouts import shown, sources_in, unshown
from stormproof.trident.audit.source import PendingEvidence, recorded_ids, server_ids, spout_sources, stored_source
from stormproof.trident.decisions.letter_filter import LetterFilter

if TYPE_CHECKING:
    from stormproof.trident.audit import AuditLedger
    from stormproof.trident.stores import Stores


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, with its id in the topology (with the spout, if there are several), and its source's name."""

    topology: str
    id: str
    source: str
    letter: DeadLetter

    @property
    def state(self) -> str:
        """What an operator decided, or `undecided`."""
        return "undecided" if self.letter.disposal is None else _DECIDED[self.letter.disposal.value]


_DECIDED: Final = {"requeue": "requeued", "edit": "edited", "drop": "dropped"}


@dataclass(frozen=True, slots=True)
class Letters:
    """The dead letters of a topology's source; or of the sources of its spouts, whose names then begin the ids."""

    topology: str
    sources: Mapping[str | None, DeadLetters]
    elsewhere: tuple[str, ...] = ()
    """Spouts whose sources are not in the ledger's database: their dead letters are out of reach."""

    def each(self, where: LetterFilter, *, undecided: bool = False) -> Generator[Letter]:
        """The dead letters that the filter admits, whole, source by source, oldest first; a few at a time."""
        for spout, source in self._admitted(where):
            with closing(source.each()) as found:
                for letter in found:
                    if (
                        not (undecided and letter.disposal is not None)
                        and where.admits(LetterHead.of(letter))
                        and where.matches(letter)
                    ):
                        yield Letter(self.topology, _shown(spout, letter.shown_id), source.name, letter)

    def heads(self, where: LetterFilter, *, undecided: bool = False) -> Generator[LetterHead]:
        """The same without payloads, errors and histories; only a filter by `match` reads these. The ids name the spout."""
        if where.match is not None:
            for one in self.each(where, undecided=undecided):
                yield replace(LetterHead.of(one.letter), shown_id=one.id)
            return
        for spout, source in self._admitted(where):
            with closing(source.heads(undecided=undecided)) as found:
                for head in found:
                    if where.admits(head):
                        yield head if spout is None else replace(head, shown_id=_shown(spout, head.shown_id))

    def choose(self, where: LetterFilter, ids: Collection[str] = ()) -> ChosenLetters:
        """Those undecided ones that the filter admits; of these messages alone, if some are named."""
        named, chosen, classes = frozenset(ids), list[str](), LetterClasses()
        for head in self.heads(where, undecided=True):
            if not named or head.shown_id in named:
                chosen.append(head.shown_id)
                classes.add(self.topology, head)
        return ChosenLetters(tuple(chosen), tuple(classes.sorted()))

    def of_message(self, message: str) -> list[Letter]:
        """The dead letters of one message, oldest first."""
        return [
            Letter(self.topology, message, source.name, letter)
            for spout, source in self.sources.items()
            if (inner := _inner(spout, message)) is not None
            for letter in source.of_message(inner)
        ]

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
    """The dead letters of a topology's sources, under its subscriptions. Fences no driver.

    Raises:
        UsageError: there is no such topology, or its source keeps nothing in the ledger's database.
    """
    with ExitStack() as stack:
        sources: dict[str | None, DeadLetters] = {}
        members, elsewhere = _evidence(stores.audit, topology)
        for spout, evidence in members.items():
            connector = connector_of(evidence.who.kind)
            store = PostgresPendingStore(connector.NOUN, evidence.name, database=stores.database)
            sources[spout] = DeadLetters(store, evidence.who, connector)
            stack.callback(store.close)
        yield Letters(topology, sources, elsewhere)


def _evidence(ledger: AuditLedger, topology: str) -> tuple[Mapping[str | None, PendingEvidence], tuple[str, ...]]:
    """The records of the topology's sources, by spout (by None if it has no spouts), and the spouts without one."""
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = stored_source(snapshot, row)
        if isinstance(found, PendingEvidence):
            return {None: found}, ()
        members = spout_sources(snapshot, row)
        if not members:
            raise UsageError(
                f"topology {topology!r} reads {row.source!r}, which keeps nothing in the ledger's database. "
                "No command reaches its dead letters: call the source's dead_letters(), requeue(), edit() and drop() in "
                "the process that has it",
                topology=topology,
            )
        return dict(members.items()), tuple(spout for spout in sources_in(row.source) if spout not in members)


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

    def add(self, topology: str, head: LetterHead) -> None:
        """Count one more."""
        key = (topology, head.error_class, head.reason, head.component)
        (self._waiting if head.disposal is None else self._decided)[key] += 1

    def sorted(self) -> list[LetterClass]:
        """The classes; the one with the most undecided ones first."""
        waiting, decided = self._waiting, self._decided
        keys = sorted(waiting.keys() | decided.keys(), key=lambda key: (-waiting[key], -decided[key], key))
        return [LetterClass(*key, waiting[key], decided[key]) for key in keys]


@dataclass(frozen=True, slots=True)
class ChosenLetters:
    """Undecided dead letters that a decision is about, and how many there are of each class."""

    ids: tuple[str, ...]
    classes: tuple[LetterClass, ...]


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
