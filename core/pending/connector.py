"""`Connector`: what a kind of source says of its messages; `PendingSource` does the rest over the rows of a store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.capabilities import READS_AGAIN, Capabilities, refusal
from stormproof.core.contract.source import Expectation, Limit, OriginIds, ShownIds, SliceReader, Source, SourceKind
from stormproof.core.pending.audit import NumberedAudit, SliceAudit
from stormproof.core.pending.rows import At, Subscriber


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
class Next:
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
    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> Next | None:
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
