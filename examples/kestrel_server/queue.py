"""A queue of the Kestrel test server: items, open reads, and the journal from which a restart makes both again."""

from __future__ import annotations

import itertools
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

_REMOVE: Final = 1
_ADD: Final = 2
_UNREMOVE: Final = 5
_CONFIRM: Final = 6
_REMOVE_TENTATIVE: Final = 9
_HEAD: Final = struct.Struct("<BIqq")  # operation, bytes or xid, time of the put, time of expiry in ms (0: never)


class Item(NamedTuple):
    """One item; times are ms since the epoch. It has no id: that is Kestrel's."""

    data: bytes
    added_ms: int
    expiry_ms: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much a queue takes, and for how long.

    `max_items` and `max_bytes`: puts above it are refused, or with `discard_old` push out the oldest. `max_age_s`: items
    that are older are dropped, or put into the queue `expire_to`. `open_timeout_s`: an open read that is older is given
    back when somebody next asks. 0: no limit.
    """

    max_items: int = 0
    max_bytes: int = 0
    max_item_bytes: int = 0
    max_age_s: float = 0.0
    open_timeout_s: float = 0.0
    discard_old: bool = False
    expire_to: str = ""
    max_journal_bytes: int = 16 << 20


@dataclass(slots=True)
class Counters:
    """What a queue has seen since the server started, by Kestrel's names."""

    total_items: int = 0
    expired_items: int = 0
    discarded: int = 0
    transactions: int = 0
    canceled_transactions: int = 0
    total_flushes: int = 0


class Queue:
    """First in, first out; an item that is read by `open` stays until it is closed, or comes back to the head."""

    def __init__(
        self,
        name: str,
        folder: Path,
        limits: QueueLimits,
        now_ms: Callable[[], int],
        expired: Callable[[Item], None],
        *,
        fsync: bool = False,
    ) -> None:
        self.name = name
        self.counters = Counters()
        self._limits = limits
        self._now_ms = now_ms
        self._expired = expired
        self._fsync = fsync
        self._items: deque[Item] = deque()
        self._open: dict[int, tuple[Item, int]] = {}
        self._xids = itertools.count(1)
        self._path = folder / name
        self._read_journal()
        self._journal: BinaryIO = self._path.open("ab")

    # ---- what a client asks for

    def put(self, data: bytes, expiry_ms: int = 0) -> bool:
        """Add an item at the end; False: the queue takes no more."""
        limits, now_ms = self._limits, self._now_ms()
        if limits.max_item_bytes and len(data) > limits.max_item_bytes:
            return False
        while self._is_full(len(data)):
            if not limits.discard_old or not self._items:
                return False
            self._items.popleft()
            self._write(_HEAD.pack(_REMOVE, 0, 0, 0))
            self.counters.discarded += 1
        if limits.max_age_s:
            oldest_ms = now_ms + int(limits.max_age_s * 1_000)
            expiry_ms = min(expiry_ms, oldest_ms) if expiry_ms else oldest_ms
        item = Item(data, now_ms, expiry_ms)
        self._write(_HEAD.pack(_ADD, len(data), item.added_ms, item.expiry_ms) + data)
        self._items.append(item)
        self.counters.total_items += 1
        return True

    def take(self) -> Item | None:
        """The head, for good."""
        self.discard_expired()
        if not self._items:
            return None
        self._write(_HEAD.pack(_REMOVE, 0, 0, 0))
        item = self._items.popleft()
        self._pack_if_long()
        return item

    def open(self) -> tuple[int, Item] | None:
        """The head, and the number of the open read; it stays in the journal."""
        self.discard_expired()
        self._time_out()
        if not self._items:
            return None
        xid = next(xid for xid in self._xids if xid not in self._open)
        self._write(_HEAD.pack(_REMOVE_TENTATIVE, xid, 0, 0))
        item = self._items.popleft()
        self._open[xid] = (item, self._now_ms())
        self.counters.transactions += 1
        return xid, item

    def close(self, xid: int) -> None:
        """The item of an open read goes for good; an unknown number is no error."""
        if self._open.pop(xid, None) is not None:
            self._write(_HEAD.pack(_CONFIRM, xid, 0, 0))
            self._pack_if_long()

    def abort(self, xid: int) -> None:
        """The item of an open read goes back to the head; an unknown number is no error."""
        found = self._open.pop(xid, None)
        if found is not None:
            self._write(_HEAD.pack(_UNREMOVE, xid, 0, 0))
            self._items.appendleft(found[0])
            self.counters.canceled_transactions += 1

    def peek(self) -> Item | None:
        """The head, which stays."""
        self.discard_expired()
        return self._items[0] if self._items else None

    def flush(self) -> None:
        """Drop what nobody has open."""
        for _ in range(len(self._items)):
            self._write(_HEAD.pack(_REMOVE, 0, 0, 0))
        self._items.clear()
        self.counters.total_flushes += 1
        self._pack_if_long()

    def discard_expired(self) -> int:
        """Drop items whose time has passed, or move them; gives how many. Kestrel looks at the head alone, and so do we."""
        dropped, now_ms = 0, self._now_ms()
        while self._items and 0 < self._items[0].expiry_ms <= now_ms:
            item = self._items.popleft()
            self._write(_HEAD.pack(_REMOVE, 0, 0, 0))
            dropped += 1
            self._expired(item)
        self.counters.expired_items += dropped
        return dropped

    def _time_out(self) -> None:
        """Give back the oldest open read, if it is too old: the oldest alone, and only when somebody asks."""
        if self._limits.open_timeout_s and self._open:
            xid, (_, since_ms) = next(iter(self._open.items()))
            if self._now_ms() - since_ms >= self._limits.open_timeout_s * 1_000:
                self.abort(xid)

    def _is_full(self, more_bytes: int) -> bool:
        limits = self._limits
        return bool(
            (limits.max_items and len(self._items) >= limits.max_items)
            or (limits.max_bytes and self.size + more_bytes > limits.max_bytes)
        )

    # ---- what it holds

    def __len__(self) -> int:
        return len(self._items)

    @property
    def size(self) -> int:
        """Bytes of the items that nobody has open."""
        return sum(len(item.data) for item in self._items)

    @property
    def open_reads(self) -> int:
        """Reads that are neither closed nor aborted."""
        return len(self._open)

    def stats(self) -> Iterator[tuple[str, int]]:
        """Figures by Kestrel's names."""
        now_ms = self._now_ms()
        yield "items", len(self._items)
        yield "bytes", self.size
        yield "total_items", self.counters.total_items
        yield "logsize", self._path.stat().st_size
        yield "expired_items", self.counters.expired_items
        yield "mem_items", len(self._items)
        yield "mem_bytes", self.size
        yield "age", now_ms - self._items[0].added_ms if self._items else 0
        yield "discarded", self.counters.discarded
        yield "open_transactions", len(self._open)
        yield "transactions", self.counters.transactions
        yield "canceled_transactions", self.counters.canceled_transactions
        yield "total_flushes", self.counters.total_flushes

    # ---- the journal

    def _write(self, record: bytes) -> None:
        self._journal.write(record)
        self._journal.flush()  # of the process, so a kill loses nothing; power is another matter
        if self._fsync:
            os.fsync(self._journal.fileno())

    def _read_journal(self) -> None:
        """Make the queue as it was. Reads that were open go back to the head, the first of them first."""
        content = self._path.read_bytes() if self._path.exists() else b""
        place = 0
        while place + _HEAD.size <= len(content):
            operation, number, added_ms, expiry_ms = _HEAD.unpack_from(content, place)
            end = place + _HEAD.size + (number if operation == _ADD else 0)
            if end > len(content):
                break  # torn by a crash: it was never answered
            data = content[place + _HEAD.size : end]
            self._replay(operation, number, Item(data, added_ms, expiry_ms))
            place = end
        if place < len(content):
            os.truncate(self._path, place)
        back = [item for item, _ in self._open.values()]
        self._open.clear()
        self._items.extendleft(reversed(back))
        if back:
            self._rewrite()

    def _replay(self, operation: int, number: int, item: Item) -> None:
        if operation == _ADD:
            self._items.append(item)
        elif operation == _REMOVE:
            self._items.popleft()
        elif operation == _REMOVE_TENTATIVE:
            self._open[number] = (self._items.popleft(), 0)
        elif operation == _UNREMOVE:
            self._items.appendleft(self._open.pop(number)[0])
        elif operation == _CONFIRM:
            del self._open[number]
        else:
            raise ValueError(f"{self._path}: no operation {operation}: this is no journal of this server")

    def _pack_if_long(self) -> None:
        if self._journal.tell() > self._limits.max_journal_bytes:
            self._journal.close()
            self._rewrite()
            self._journal = self._path.open("ab")

    def _rewrite(self) -> None:
        """Write the journal anew, with what is there; in one step, so that a crash leaves the old one or the new one."""
        fresh = self._path.with_name(self._path.name + "~~")
        with fresh.open("wb") as out:
            held = [(_ADD, item) for item, _ in self._open.values()] + [(_ADD, item) for item in self._items]
            for operation, item in held:
                out.write(_HEAD.pack(operation, len(item.data), item.added_ms, item.expiry_ms) + item.data)
            for xid in self._open:  # opened in their order, from the head
                out.write(_HEAD.pack(_REMOVE_TENTATIVE, xid, 0, 0))
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(self._path)

    def end(self, *, delete: bool = False) -> None:
        """Close the journal, or delete it."""
        self._journal.close()
        if delete:
            self._path.unlink(missing_ok=True)


def limits_for(limits: QueueLimits, name: str) -> QueueLimits:
    """The limits of a queue: the one that takes what expired keeps it."""
    return replace(limits, max_age_s=0.0, expire_to="") if name == limits.expire_to else limits
