"""What looks at a server leave on record."""

from __future__ import annotations

from dataclasses import replace

from stormproof.core.pending.continuity import RECORD_MAX, Continuity, ContinuityLook, looks_in, with_looks
from stormproof.core.source.rabbitmq.stream_position import Mark, StreamPosition

REMOVED = ContinuityLook(
    Continuity.REMOVED, "3 messages were removed", 3, "9", "13", at="2026-01-01T00:00:00+00:00", by="on_gap"
)


def test_what_is_seen_again_behind_the_same_id_stands_once_with_the_higher_number_and_the_newest_time() -> None:
    later = replace(REMOVED, messages=2, at="2026-01-02T00:00:00+00:00")
    assert looks_in(with_looks(with_looks({}, [REMOVED]), [later])) == [replace(REMOVED, at=later.at)]
    assert looks_in(with_looks(with_looks({}, [later]), [REMOVED])) == [REMOVED]


def test_records_that_are_taken_together_are_none_of_those_that_stood_before() -> None:
    """One that was accepted would hide the others."""
    looks = [
        ContinuityLook(
            Continuity.UNKNOWN, "cannot be told", 0, str(n), at=f"2026-01-01T00:{n // 60:02}:{n % 60:02}+00:00"
        )
        for n in range(RECORD_MAX + 10)
    ]
    before = with_looks({}, looks[:-5])
    after = looks_in(with_looks(before, looks[-5:]))
    assert len(after) == RECORD_MAX
    assert str(after[0]) not in {str(one) for one in [*looks, *looks_in(before)]}


def test_a_mark_that_came_behind_a_doubt_stays() -> None:
    """Control of the mark: without it a stream that is set back is not told."""
    doubt = ContinuityLook(Continuity.UNKNOWN, "cannot be told", behind="9", at="2026-01-01T00:00:00+00:00")
    position = StreamPosition(0, 10, Mark(9, 1)).noted([doubt])
    assert position.mark is None
    moved = replace(position, next=12, mark=Mark(11, 2))
    assert moved.noted([doubt]) == moved
