"""What a micro-batch is, seen from the ledger; a payload in a column; what cannot be fed."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from stormproof import (
    MemorySink,
    MemorySource,
    MicroBatches,
    PositionMismatch,
    Topology,
    TopologyError,
    UsageError,
    exactly_once,
    feed,
)
from stormproof.core.source.decode import decoder_for
from stormproof.core.source.files.micro_batches import ColumnDecoder
from stormproof.trident.audit.streams import StreamEvidence
from stormproof.trident.ledger.streams import Handed, Standing, StreamBatch, handed, missing

LAST = StreamBatch(8, "q", 7, 8)


@pytest.mark.parametrize(
    ("last", "query", "batch", "adopt", "what"),
    [
        (None, "q", 0, None, Handed.NEW),
        (None, "q", 1000, None, Handed.NEW),
        (LAST, "q", 8, None, Handed.NEW),
        (LAST, "q", 7, None, Handed.AGAIN),
        (LAST, "q", 7, "q:7", Handed.AGAIN),
        (LAST, "other", 0, "q:7", Handed.ADOPTED),
        (LAST, "q", 3, "q:7", Handed.ADOPTED),
        (LAST, "q", 12, "q:7", Handed.ADOPTED),
    ],
)
def test_what_is_handed_out(last: StreamBatch | None, query: str, batch: int, adopt: str | None, what: Handed) -> None:
    assert handed("orders", Standing(last), query, batch, {}, adopt) is what


@pytest.mark.parametrize(
    ("query", "batch", "adopt"),
    [("other", 0, None), ("other", 8, "q:6"), ("q", 6, None), ("q", 9, None), ("q", 0, "q:")],
)
def test_what_does_not_follow_is_refused_with_both_places(query: str, batch: int, adopt: str | None) -> None:
    with pytest.raises(PositionMismatch) as refused:
        handed("orders", Standing(LAST), query, batch, {}, adopt)
    text = str(refused.value)
    assert "batch 7 of streaming query q" in text
    assert f"batch {batch} of query {query}" in text
    assert "adopt='q:7'" in text


PLANNED = replace(LAST, plan="{}\n107")


@pytest.mark.parametrize(
    ("batch", "plans", "what"),
    [
        (7, {6: "{}\n93", 7: "{}\n107"}, Handed.AGAIN),
        (8, {7: "{}\n107", 8: "{}\n120"}, Handed.NEW),
        (8, {8: "{}\n120"}, Handed.NEW),
    ],
)
def test_a_batch_that_was_planned_alike_goes_on(batch: int, plans: dict[int, str], what: Handed) -> None:
    assert handed("orders", Standing(PLANNED), "q", batch, plans, None) is what


@pytest.mark.parametrize(
    ("batch", "plans"),
    [
        pytest.param(7, {7: "{}\n110"}, id="the last one with further rows"),
        pytest.param(7, {7: '{"batchTimestampMs": 2}\n107'}, id="the last one at another time"),
        pytest.param(8, {7: "{}\n110", 8: "{}\n120"}, id="the next one behind another last one"),
    ],
)
def test_another_plan_under_a_known_number_is_refused_with_both_ends(batch: int, plans: dict[int, str]) -> None:
    with pytest.raises(PositionMismatch, match="planned otherwise") as refused:
        handed("orders", Standing(PLANNED), "q", batch, plans, None)
    assert (refused.value.details["ledger_plan"], refused.value.details["plan"]) == (PLANNED.plan, plans[7])
    for part in ("to end at 107", "adopt='q:7'", f"hands out batch {batch}"):
        assert part in str(refused.value)
    assert handed("orders", Standing(PLANNED), "q", batch, plans, "q:7") is Handed.ADOPTED


OTHERS = {"behind": StreamBatch(3, "q", 2, 3), "further": StreamBatch(9, "q", 7, 9)}


def test_a_name_of_its_own_does_not_hide_that_the_query_is_known_by_another() -> None:
    with pytest.raises(PositionMismatch) as refused:
        handed("orders", Standing(None, OTHERS), "q", 8, {}, None)
    text = str(refused.value)
    for part in (
        "'orders' has taken nothing",
        "batch 8 of streaming query q",
        "'further' stands at batch 7",
        "'behind'",
    ):
        assert part in text
    assert "adopt='q:7'" in text
    assert "batches 0 to 7 are not in its sinks" in text
    for wrong in ("q:2", "q:8", "r:7"):
        with pytest.raises(PositionMismatch):
            handed("orders", Standing(None, OTHERS), "q", 8, {}, wrong)
    assert handed("orders", Standing(None, OTHERS), "q", 8, {}, "q:7") is Handed.ADOPTED
    assert handed("orders", Standing(LAST, OTHERS), "q", 8, {}, None) is Handed.NEW, "it stands here by its own name"


@pytest.mark.parametrize(("first", "text"), [(1, "batch 0 is"), (2, "batches 0 to 1 are"), (7, "batches 0 to 6 are")])
def test_what_is_missing_in_words(first: int, text: str) -> None:
    assert missing(first) == text


def test_a_payload_in_a_column_and_null() -> None:
    decoder = ColumnDecoder(decoder_for("k string, v long"), "value")
    rows = pa.array([{"value": '{"k": "a", "v": 1}'}, {"value": None}, {"value": "no json"}])
    decoded = decoder.decode(rows)
    assert decoded.rows.slice(0, 1).to_pylist() == [{"k": "a", "v": 1}]
    assert dict(decoded.failed)[1] == "column 'value' is NULL"
    assert [row for row, _ in decoded.failed] == [1, 2]


def test_what_cannot_be_fed() -> None:
    with pytest.raises(TopologyError, match="at least one sink"):
        exactly_once(name="orders")
    with pytest.raises(TopologyError, match="name its column"):
        MicroBatches("orders", "k string", unit="lines")
    queue = Topology("words")
    queue.stream("lines", MemorySource("lines")).into(MemorySink("words"))
    with pytest.raises(TopologyError, match=r"one source is a MicroBatches.*MemorySource"):
        feed(queue)


def test_the_audit_sees_a_micro_batch_that_was_taken_twice_or_left_out() -> None:
    def findings(*taken: StreamBatch) -> list[str]:
        # Its own rows of these transactions are gone: each is named. What does not follow is named besides.
        return [f.text for f in StreamEvidence("orders", taken).slice_findings([]) if "follow" in f.text]

    assert not findings(StreamBatch(1, "q", 0, 1), StreamBatch(2, "q", 1, 2))
    assert not findings(StreamBatch(1, "q", 0, 1), StreamBatch(2, "r", 0, 2, adopted_from="q:0"))
    assert findings(StreamBatch(1, "q", 0, 1), StreamBatch(2, "q", 0, 2))
    assert findings(StreamBatch(1, "q", 0, 1), StreamBatch(2, "q", 2, 2))
    assert findings(StreamBatch(1, "q", 0, 1), StreamBatch(2, "r", 0, 2))


def test_what_is_no_plain_dataframe_is_no_job() -> None:
    from pyspark.sql import DataFrame

    from stormproof.core.engine.frame import SparkFrames

    class Remote(DataFrame):
        """As a DataFrame of Spark Connect is: one, but not of this process."""

    for frame, told in ((object.__new__(Remote), "Spark Connect is not supported"), ([1], "not an object of list")):
        with pytest.raises(UsageError, match=told):
            SparkFrames().require_batch(frame)
