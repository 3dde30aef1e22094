"""Positions by snapshot: the ranges that are sent to Postgres hold what the definition says, and each message once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.base.errors import Json
from stormproof.core.source.postgres_queue.position import NOTHING, QueuePlace, Range, Snapshot, Span

XIDS = range(3, 16)
IDS = range(1, 4)
EVERY = [QueuePlace(xid, id_) for xid in XIDS for id_ in IDS]


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    xmax = draw(st.integers(3, 16))
    running = draw(st.sets(st.integers(3, 15)))
    running = {xid for xid in running if xid < xmax}
    return Snapshot(min(running, default=xmax), xmax, tuple(sorted(running)))


@st.composite
def later(draw: st.DrawFn, start: Snapshot) -> Snapshot:
    """A snapshot that could be taken after `start`: what ended stays ended."""
    xmax = draw(st.integers(start.xmax, 16))
    could_run = [xid for xid in XIDS if xid < xmax and not start.sees(xid)]
    running = draw(st.sets(st.sampled_from(could_run))) if could_run else set[int]()
    return Snapshot(min(running, default=xmax), xmax, tuple(sorted(running)))


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(snapshots())
    span = Span(start, draw(later(start)))
    cut_before: bool = draw(st.booleans())
    cut_after: bool = draw(st.booleans())
    inside = [place for place in EVERY if span.holds(*place)]
    if inside and cut_before:
        span = span.beyond(draw(st.sampled_from(inside)))
    inside = [place for place in inside if span.holds(*place)]
    if inside and cut_after:
        span = span.upto(draw(st.sampled_from(inside)))
    return span


def in_range(range_: Range, place: QueuePlace) -> bool:
    if range_.xid is not None:
        return place.xid == range_.xid and place.id > range_.above and (range_.upto is None or place.id <= range_.upto)
    assert range_.upto is not None
    return range_.above < place.xid < range_.upto


@given(spans())
def test_ranges_hold_exactly_what_the_span_holds_and_in_order(span: Span) -> None:
    found = [p for range_ in span.ranges() for p in EVERY if in_range(range_, p) and span.end.sees(p.xid)]
    assert found == [p for p in EVERY if span.holds(*p)]


@given(st.data())
def test_spans_one_after_the_other_hold_every_message_once(data: st.DataObject) -> None:
    opened = list[QueuePlace]()
    start = NOTHING
    for _ in range(data.draw(st.integers(1, 4))):
        end = data.draw(later(start))
        rest = Span(start, end)
        while inside := [p for p in EVERY if rest.holds(*p)]:
            cut = data.draw(st.sampled_from(inside))
            opened += [p for p in EVERY if rest.upto(cut).holds(*p)]
            rest = rest.beyond(cut)
        start = end
    assert sorted(opened) == [p for p in EVERY if start.sees(p.xid)]


@given(snapshots())
def test_text_form_is_read_back(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


@given(spans())
def test_json_form_is_read_back(span: Span) -> None:
    assert Span.from_json(span.to_json()) == span


@given(snapshots(), st.integers(3, 20))
def test_before_makes_one_transaction_running_and_changes_no_other(snapshot: Snapshot, own: int) -> None:
    changed = snapshot.before(own)
    assert not changed.sees(own)
    assert all(changed.sees(xid) == snapshot.sees(xid) for xid in range(3, 20) if xid != own)


def test_conditions_ask_the_snapshot_only_where_something_was_running() -> None:
    start = Snapshot(5, 8, (5,))
    assert Span(start, Snapshot(9, 9)).conditions() == (
        "(xid = '5'::xid8 and id > 0)",
        "(xid > '7'::xid8 and xid < '9'::xid8)",
    )
    with_running = Span(start, Snapshot(6, 9, (6,))).conditions()
    assert all(re.search(r"pg_visible_in_snapshot\(xid, '6:9:6'::pg_snapshot\)", c) for c in with_running)


def test_a_span_between_equal_snapshots_has_no_condition() -> None:
    assert Span(Snapshot(9, 9), Snapshot(9, 9)).conditions() == ()


@pytest.mark.parametrize("value", [[1], ["1", 2], {"xid": 1}])
def test_a_place_that_is_none_is_refused(value: Json) -> None:
    with pytest.raises(ValueError, match="not a place"):
        Span.from_json({"start": "3:3:", "end": "3:3:", "after": value, "last": None})
