"""What is counted of a Redis stream: whatever is added, read, trimmed and deleted, what was not read is accounted for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from stormproof.core.pending.continuity import CONTINUOUS, Continuity, ContinuityLook, looks_in, with_looks
from stormproof.core.source.redis_streams.client import NONE, Counted, StreamCounts


@dataclass
class Stream:
    """A stream as the server counts it, and a driver that reads it."""

    rng: Random
    counts: bool = True
    entries: list[str] = field(default_factory=list[str])
    added: int = 0
    deleted: str = NONE
    read: set[str] = field(default_factory=set[str])
    trimmed: int = 0
    withdrawn: int = 0
    last: str = NONE
    known: Counted = field(init=False)
    looks: list[ContinuityLook] = field(default_factory=list[ContinuityLook])

    def __post_init__(self) -> None:
        self.known = Counted.begun(self.facts(), is_new=True)

    def facts(self) -> StreamCounts:
        anchor = self.known.anchor if hasattr(self, "known") else ""
        first = self.entries[0] if self.entries else ""
        added = self.added if self.counts else -1
        newest = f"{self.added}-0"
        return StreamCounts(
            added, len(self.entries), first, newest, self.deleted, anchor in self.entries, -1, self.last
        )

    @property
    def on_record(self) -> list[ContinuityLook]:
        """What was seen, as the position keeps it."""
        return looks_in(with_looks({}, self.looks))

    def add(self) -> None:
        self.added += 1
        self.entries.append(f"{self.added}-0")

    def trim(self) -> None:
        kept = self.rng.randrange(len(self.entries) + 1)
        gone, self.entries = self.entries[: len(self.entries) - kept], self.entries[len(self.entries) - kept :]
        self.trimmed += len([one for one in gone if one not in self.read])

    def delete(self) -> None:
        if self.entries:
            gone = self.entries.pop(self.rng.randrange(len(self.entries)))
            self.withdrawn += gone not in self.read
            self.deleted = max(self.deleted, gone, key=lambda one: int(one.partition("-")[0]))

    def read_some(self) -> None:
        self.take(3)

    def take(self, limit: int) -> None:
        look, self.known = self.known.looked(self.facts(), None, is_all=False)
        self.looks += [look] if look is not CONTINUOUS else []
        new = [one for one in self.entries if one not in self.read and int(one[:-2]) > int(self.last[:-2])][:limit]
        look, self.known = self.known.looked(self.facts(), new, is_all=len(new) < limit)
        self.looks += [look] if look is not CONTINUOUS else []
        self.read |= set(new)
        self.last = new[-1] if new else self.last


@pytest.mark.parametrize("seed", range(100))
def test_what_was_trimmed_unread_is_seen_and_what_was_deleted_is_not_taken_for_it(seed: int) -> None:
    stream = Stream(Random(seed))
    for _ in range(60):
        stream.rng.choices([stream.add, stream.trim, stream.delete, stream.read_some], [8, 1, 1, 2])[0]()
    stream.take(100)
    stream.take(100)
    seen = sum(one.messages for one in stream.on_record)
    certain = sum(one.messages for one in stream.on_record if one.verdict is Continuity.REMOVED)
    assert {one.verdict for one in stream.looks} <= {Continuity.REMOVED, Continuity.UNKNOWN}
    assert seen + stream.known.withdrawn == stream.trimmed + stream.withdrawn
    assert certain <= stream.trimmed <= seen, "what is called removed was trimmed, and none that was is passed over"


def test_without_deletions_each_trimmed_entry_is_certain() -> None:
    for seed in range(100):
        stream = Stream(Random(seed))
        for _ in range(60):
            stream.rng.choices([stream.add, stream.trim, stream.read_some], [8, 1, 2])[0]()
        stream.take(100)
        assert sum(one.messages for one in stream.on_record) == stream.trimmed
        assert {one.verdict for one in stream.looks} <= {Continuity.REMOVED}


def test_a_server_that_does_not_count_is_never_called_clean_once_it_trimmed_what_was_read() -> None:
    stream = Stream(Random(1), counts=False)
    for _ in range(5):
        stream.add()
    stream.take(3)
    assert stream.looks == [], "negative control: what was read is there, so nothing behind it was trimmed"
    stream.entries = stream.entries[4:]
    stream.take(10)
    assert [(one.verdict, one.messages) for one in stream.looks] == [(Continuity.UNKNOWN, 0)]


def test_entries_that_an_earlier_driver_was_given_count_once() -> None:
    known = Counted.begun(StreamCounts(5, 5, "1-0", "5-0", NONE, False, -1, NONE), is_new=True)
    known = known.given(["1-0", "2-0"])
    assert known.given(["1-0", "2-0"]) == known
    assert replace(known, anchor="") == Counted(2, "2-0", "", NONE, 0)
