"""A harness over any source that keeps a journal, for the suite that every source must pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from stormproof.core.contract.source import Lease, Limit
from stormproof.testing import PendingSourceHarness
from support.source_harness import messages_of

ANY = Limit(1_000)


@dataclass
class BrokerHarness(PendingSourceHarness[Any]):
    """`name` is the source's, and its queue's."""

    several_subscriptions = False
    counts_unopened = False
    exact_bytes = False  # what is stored has what the server says of a message, too

    def close(self) -> None:
        for view in self.views:
            view.drop_connections()


@dataclass
class CrashHarness(BrokerHarness):
    """Over a server that may be killed and cut off."""

    @abstractmethod
    def left(self) -> int:
        """How many messages the server has that are not confirmed to it."""

    @abstractmethod
    def deliver_again(self) -> None:
        """Have the server deliver messages again that were confirmed to it, as far as it can."""

    @abstractmethod
    def remove_but(self, messages: int) -> None:
        """Have the server remove all messages but so many, the newest."""

    @property
    @abstractmethod
    def confirms_by(self) -> bytes:
        """What stands in the bytes by which a client confirms messages."""

    def died(self) -> None:
        """A driver died in this process: what a process takes with it goes, too."""


def opened(source: Any, lease: Lease, limit: Limit = ANY) -> list[bytes]:
    """The payloads of the next slice; none where there is none."""
    slice_ = source.open(lease, limit, 7)
    return [] if slice_ is None else [message.payload for message in messages_of(source, slice_)]


def tuples_of(source: Any, slice_: Any) -> list[dict[str, Any]]:
    """The tuples of a slice."""
    found: list[dict[str, Any]] = []
    for reader in source.readers(slice_, 1):
        for batch in reader.read(7, frozenset(), 100):
            found += source.decoder.decode(batch.column("payload")).rows.to_pylist()
    return found
