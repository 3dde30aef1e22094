"""`Connector`: what a kind of source says of its messages; `PendingSource` does the rest over the rows of a store.

The audit asks of a kind of source where its slices reach, and whether they leave gaps or overlap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.capabilities import READS_AGAIN, Capabilities, refusal
from stormproof.core.contract.source import Expectation, Limit, OriginIds, ShownIds, SliceReader, Source, SourceKind
from stormproof.core.pending.rows import At, Subscriber


@dataclass(frozen=True, slots=True)
class OpenedSlice:
    """Messages that were opened together: by a batch, or in a slice that the store still has.

    `holder` is for people. `taken`: they left the source with it, so nothing else may hold them. One that is not taken was
    given back; it only shows what was handed out.
    """

    at: At
    holder: str
    txid: int | None
    taken: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the slices of a source.

    `unreachable`: it is with messages that were never in a slice, and cannot come into one. `doubt`: whether something is
    wrong cannot be told.
    """

    text: str
    txid: int | None = None
    unreachable: bool = False
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of a comparison of messages that were opened, as the source still keeps them, with what is on record: how
    many are as they were, in which words; what is wrong; and what was not compared, and why.
    """

    messages: int = 0
    compared: str = ""
    wrong: tuple[Finding, ...] = ()
    left_out: tuple[str, ...] = ()


class SliceAudit(ABC):
    """What a connector knows of slices that others wrote down, with nothing but the store's database."""

    def __init__(self, who: Subscriber, cursor: Any) -> None:
        self._who = who
        self._cursor = cursor

    @abstractmethod
    def can_read(self, at: At) -> bool:
        """Whether this is a slice of such a source."""

    @abstractmethod
    def reach(self, at: At) -> Any:
        """How far into the source a slice goes; comparable with another's."""

    @abstractmethod
    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether a slice holds a message."""

    def has(self, id_: int, origin: int) -> bool:
        """Whether the source has the message; also true where that is not known, as by default."""
        return True

    def count(self, at: At) -> int | None:
        """How many messages of a slice the source still has; None: not known, as by default."""
        return None

    @abstractmethod
    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the message lies behind the position."""

    def unopened(self, position: At) -> tuple[int, float | None]:
        """How many messages were never opened, and how many seconds the oldest has waited; (0, None), as by default: not
        known.
        """
        return 0, None

    @abstractmethod
    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """Overlaps of what was taken, messages before the position that nobody took, and messages that nobody can reach.

        `held` has the batches first, in their order. Everything up to the furthest of `trusted` counts as handed out once.
        """

    def kept(self, slices: Sequence[OpenedSlice]) -> Kept:
        """Compare what the source still keeps of these slices with what they were when they were opened. By default only a
        server has them.
        """
        why = "its messages: their server keeps them, and no digest of them is on record"
        return Kept(left_out=(why,) if slices else ())


class NumberedAudit(SliceAudit):
    """Messages have numbers without gaps: slices are ranges of them, and the position is the next number."""

    def can_read(self, at: At) -> bool:
        """Whether it is a range."""
        return _range_of(at) is not None

    def reach(self, at: At) -> int:
        """The number behind the range."""
        found = _range_of(at)
        return 0 if found is None else found.stop

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the range encloses the number."""
        found = _range_of(at)
        return found is not None and id_ in found

    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the number lies behind the position."""
        return id_ >= (_next_of(position) or 0)

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """Ranges that were taken must cover, once, all that was handed out."""
        end = _next_of(position)
        if position and end is None:
            return [Finding(f"the position of source {self._who.source} cannot be read: {sorted(position)}")]
        known = max((self.reach(at) for at in trusted), default=0)
        pieces = [
            (found.start, found.stop, one) for one in held if one.taken and (found := _range_of(one.at)) is not None
        ]
        findings, covered = overlaps_and_gaps(pieces, _first_of(position), known, "messages", self._missed)
        if end is not None and covered > end:
            findings.append(
                Finding(
                    f"the position of source {self._who.source} is {end}, and batches hold messages up to {covered}: "
                    f"{covered - end} would be opened again"
                )
            )
        covered = max(covered, known)
        if end is not None and covered < end:
            findings.append(self._missed(covered, end, "behind the last batch", None))
        return findings

    def _missed(self, start: int, stop: int, where: str, txid: int | None) -> Finding:
        return Finding(
            f"{stop - start} messages of source {self._who.source} {where} were handed out to no batch", txid
        )


def overlaps_and_gaps(
    pieces: Iterable[tuple[int, int, OpenedSlice]],
    first: int,
    known: int,
    what: str,
    missed: Callable[[int, int, str, int | None], Finding],
) -> tuple[list[Finding], int]:
    """What is wrong with ranges that were taken, in the order of their numbers, and how far they reach from `first` on.

    All up to `known` was handed out. `what` they hold is for people; `missed` makes the finding of a gap.
    """
    findings, covered = list[Finding](), first
    for start, stop, one in sorted(pieces, key=lambda piece: piece[:2]):
        if start < covered:
            findings.append(Finding(f"{one.holder} holds {what} that another batch holds, too", one.txid))
        elif start > (reached := max(covered, known)):
            findings.append(missed(reached, start, f"before {one.holder}", one.txid))
        covered = max(covered, stop)
    return findings, covered


def _next_of(position: At) -> int | None:
    """The number of the first message that was never opened; None where the position has none."""
    number = position.get("next")
    return number if isinstance(number, int) else None


def _first_of(position: At) -> int:
    """The number that the subscription began with; 0 where there is none."""
    number = position.get("first")
    return number if isinstance(number, int) else 0


def _range_of(at: At) -> range | None:
    """The numbers of a slice; None where it is not of numbered messages, which `can_read` tells the audit."""
    match at.get("range"):
        case [int(first), int(stop)]:
            return range(first, stop)
        case _:
            return None


# ---- the connector


def two_numbers(one: str, other: str) -> tuple[int, int] | None:
    """What two parts of a shown id say; None: they are not as they are shown: in ASCII, no zeros in front, of 63 bits."""
    if not (one.isdecimal() and other.isdecimal() and max(len(one), len(other)) < 20):
        return None
    both = int(one), int(other)
    return both if (str(both[0]), str(both[1])) == (one, other) and max(both) < 2**63 else None


@dataclass(frozen=True, slots=True)
class Piece:
    """The first messages of a set, within a limit: at least one where the set holds any.

    `expected` is for the seed that was asked for. `rest` is what is left of the set, None: nothing. `gone` is how many
    messages of the set, `rest` included, its store has removed as it may (Kafka's compaction); a connector whose messages
    must stay raises PositionMismatch instead, or leaves them out of all.
    """

    at: At
    messages: int
    bytes: int
    expected: Expectation
    rest: At | None
    gone: int = 0


@dataclass(frozen=True, slots=True)
class NextMessages:
    """Messages that were never opened, and the subscription's position behind them."""

    piece: Piece
    position: At


class Connector(Source):
    """What a kind of source says of its messages; see `PendingSource`, from which a connector derives."""

    KIND: ClassVar[str]
    """The connector's name in the store: "queue", "files"."""
    NOUN: ClassVar[str] = "source"
    """What errors call it."""
    SHOWN_FORM: ClassVar[str] = "ORIGIN-NUMBER"
    """How its messages' shown ids look, for an error."""
    ORIGIN: ClassVar[int | None] = None
    """The one origin of all of its messages; None: there are several."""
    BEFORE_ID: ClassVar[str] = ""
    """What a stable id in a journal has in front of the server's own: ``=`` alone, or the stream's identity up to ``/``."""
    AUDIT: ClassVar[type[SliceAudit]] = NumberedAudit
    """What the audit needs to know of its slices: by default, that messages have numbers without gaps."""
    capabilities: Capabilities = READS_AGAIN
    """What the server of its messages can do; by default, any set of them can be read again."""
    KEEPS_MESSAGES: ClassVar[bool] = False
    """Whether the store has every message until it is opened, so that one which it lacks does not exist."""

    @abstractmethod
    def start(self, cursor: Any) -> At:
        """The position of a new subscription."""

    @abstractmethod
    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """Messages behind a position, at most as many as the limit admits (but one at least); None: there are none now.

        The sets that a subscription is given this way must hold every message once, whoever writes meanwhile.
        """

    @abstractmethod
    def head(self, at: At, limit: Limit, seed: int, cursor: Any) -> Piece:
        """The first messages of a slice, in an order that never changes; at most as many as the limit admits, but one."""

    @abstractmethod
    def places(self, at: At, ids: Sequence[int], cursor: Any) -> Sequence[int]:
        """The ordinals (from 0) of those of these messages that are in the slice, in the order of `head`."""

    @abstractmethod
    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: Any) -> Expectation:
        """Number and XOR of the tokens of the slice's messages, some left out; computed apart from the read."""

    @abstractmethod
    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as `parallelism` disjoint readers (some may be empty), which give the same messages each time."""

    @abstractmethod
    def payloads(self, at: At, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """The payloads of these messages of a slice, to be kept; messages that are not in the slice are left out."""

    def look(self, epoch: int) -> None:
        """See what there is to open; before the transaction that opens, and outside of it."""

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Refuse a position that does not fit the store of the messages any more; within the transaction that opens.

        Returns the position for `next`, to which it may add what it has seen of the messages.

        Raises:
            PositionMismatch: messages would be skipped or doubled.
        """
        return position

    def unopened(self, position: At, cursor: Any) -> tuple[int, float | None]:
        """How many messages were never opened, and how many seconds the oldest has waited; (0, None): not known."""
        return 0, None

    @classmethod
    def at_server(cls, position: At) -> int | None:
        """How many messages a server that delivers had not delivered when a slice was last opened; None: not known.

        None are where all messages can be read: `unopened` counts them.
        """
        left = position.get("at_server", 0)
        return left if isinstance(left, int) else None

    @classmethod
    def notes(cls, position: At) -> tuple[str, ...]:
        """What holds some of its messages up, for `status`; nothing where all is as usual."""
        return ()

    def settle(self, at: At, cursor: Any) -> None:
        """A slice was confirmed, in this transaction: its messages are applied, or wait or are dead with their payloads.

        It is called once for each message, when its first slice ends. The transaction may still be rolled back.
        """

    def unpack(self) -> Any:
        """A picklable function from stored payloads to arrays of the decoder's own type; None: they are bytes."""
        return None

    @classmethod  # the command line has the class alone
    def shown_id(  # pyright: ignore[reportIncompatibleMethodOverride] - it is called as a method is
        cls, message: int, origin: int
    ) -> str:
        """A message's id as people see it: ``ORIGIN-N``."""
        return f"{origin}-{message}"

    def shown_ids(self) -> ShownIds | None:
        """``ORIGIN-N``. A connector that overrides `shown_id` overrides this, too."""
        return OriginIds()

    @classmethod
    def number_of(cls, shown: str) -> tuple[int, int] | None:
        """Number and origin of a shown id; None: it is none of this source."""
        origin, _, number = shown.rpartition("-")
        found = two_numbers(number, origin)
        return found if found is None or cls.ORIGIN in (None, found[1]) else None

    @classmethod
    def server_ids(cls, position: At, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], str]:
        """What their server calls messages, by number and origin, where no journal says it; else they are left out."""
        return {}

    @classmethod
    def by_server_id(cls, position: At, given: str) -> tuple[int, int] | None:
        """Number and origin of the message that its server calls so; None: none on record."""
        return None

    @classmethod
    def edited(cls, old: bytes, payload: bytes) -> bytes:
        """What is stored of a payload that an operator wrote, in place of `old`.

        Raises:
            UsageError: the source cannot store it.
        """
        return payload

    @property
    def kind(self) -> SourceKind:
        """A slice can be read again, for as long as it is not confirmed."""
        return SourceKind.TRANSACTIONAL

    def serves(self, guarantee: Guarantee) -> str | None:
        """As its capabilities allow."""
        return refusal(self.capabilities, guarantee, self.where)

    @property
    def key(self) -> str:
        """The name under which the store and errors know it."""
        return self.name

    @property
    def where(self) -> str:
        """The source as errors name it."""
        return f"{self.NOUN} {self.key}"
