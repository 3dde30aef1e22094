"""`MemorySource`: messages in this process's memory, for tests and a topology's first steps.

A `MemorySource` is its store. A test that kills a driver keeps the object and gives it to the next driver; `view` gives
another subscription its own place in the same messages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self, Unpack, cast

from stormproof.core.base.arguments import error_prefix, payload_of, require_payloads, require_text
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.source import Limit, NumberIds, ShownIds, SliceReader, SourcePreview
from stormproof.core.pending.connector import NumberedAudit, two_numbers
from stormproof.core.pending.memory import MemoryPendingStore, MemorySliceReader
from stormproof.core.pending.numbered import NumberedSource
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.pending.source import PendingArguments
from stormproof.core.postgres.database import Database


class _MemoryAudit(NumberedAudit):
    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Always False: which messages there are, only the object knows."""
        return False


class InMemory(NumberedSource):
    """A source whose pending messages are in the memory of the process that made it; see `MemoryPendingStore`."""

    SHOWN_FORM: ClassVar[str] = "NUMBER"
    AUDIT = _MemoryAudit

    def __init__(
        self, name: str, *, schema: str, unit: Unit | None, clock: Clock | None, **pending: Unpack[PendingArguments]
    ) -> None:
        where = f"{self.NOUN} {name}"
        require_text(self.NOUN, "name", name, "lines")
        with error_prefix(where):
            decoder = decoder_for(schema, unit)
        self._memory = MemoryPendingStore(where, clock or SystemClock())
        super().__init__(name, decoder=decoder, store=self._memory, **pending)

    @classmethod
    def shown_id(cls, message: int, origin: int) -> str:
        """A message's number."""
        return str(message)

    def shown_ids(self) -> ShownIds:
        """The numbers."""
        return NumberIds()

    @classmethod
    def number_of(cls, shown: str) -> tuple[int, int] | None:
        """The number; the origin is 0."""
        return two_numbers(shown, "0")

    @property
    def subscriber(self) -> Subscriber:
        """That of the run which read from this object, where there is one alone."""
        if self._subscription is None:
            names = self._store.subscriptions(self.KIND, self.name)
            if len(names) == 1:
                return Subscriber(self.KIND, self.name, names[0])
        return super().subscriber


class MemorySource(InMemory):
    """Messages in a list, with all that a pending source promises, for as long as the process lives.

    Not guaranteed:
        Nothing survives the end of the process. Where the sinks are `MemorySink`, too, the ledger of such a topology is in
        memory, and lasts as long as this object: no database is written, and no command shows the run.

    Threads: any number may use one object, one call at a time; topologies that share it read it under subscriptions of
    their own. Forks: one that uses its parent's object is refused, since it would write to a copy.
    """

    KIND: ClassVar[str] = "memory"

    def __init__(
        self,
        name: str,
        payloads: Sequence[bytes] = (),
        *,
        schema: str = "line string",
        unit: Unit | None = None,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        super().__init__(name, schema=schema, unit=unit, clock=clock, **pending)
        self._messages = _checked(payloads, self.where)
        self._view_of: str | None = None

    def put(self, payloads: Sequence[bytes]) -> range:
        """Append messages; returns their ids."""
        with self._memory.guard:
            start = len(self._messages)
            self._messages.extend(_checked(payloads, self.where))
            return range(start, len(self._messages))

    def view(self, subscription: str) -> Self:
        """The same messages for another subscription; `subscribe` of the view always uses that name."""
        view = copy.copy(self)
        view._subscription = view._view_of = subscription
        return view

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on, or for that of the view; created if it is missing."""
        super().subscribe(self._view_of or subscription, epoch)

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """For that subscription, or for that of the view."""
        return super().preview(self._view_of or subscription, limit, database)

    def stop(self, cursor: Any) -> int:
        """The number of messages."""
        return len(self._messages)

    def sizes(self, first: int, stop: int, limit: Limit, cursor: Any) -> Sequence[int]:
        """The lengths of payloads."""
        return [len(payload) for payload in self._messages[first:stop]]

    def reader(self, first: int, stop: int) -> SliceReader:
        """Messages with their payloads."""
        with self._memory.guard:
            return MemorySliceReader(tuple(range(first, stop)), tuple(self._messages[first:stop]))


def _checked(payloads: object, where: str) -> list[bytes]:
    """The payloads as a list."""
    require_payloads(where, payloads)
    given = cast("Iterable[object]", payloads)
    return cast("list[bytes]", [payload_of(where, number, payload) for number, payload in enumerate(given)])
