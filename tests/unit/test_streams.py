"""What a micro-batch is, seen from the ledger; a payload in a column; what cannot be fed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from stormproof import MemorySink, MemorySource, Topology, exactly_once, feed
from stormproof.core.base.errors import Json
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.payload import decoder_for
from stormproof.core.source.files.micro_batches import ColumnDecoder
from stormproof.errors import PositionMismatch, TopologyError, UsageError
from stormproof.source import MicroBatches
from stormproof.trident.audit.evidence import HandedInEvidence
from stormproof.trident.ledger.handed_in import HandedIn, HandoutStanding, handed, micro_batch, missing
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.terms.transaction_states import TxnState


def taken(number: int, query: str, batch: int, adopted_from: str | None = None) -> HandedIn:
    return replace(micro_batch(query, batch, adopted_from), number=number, txid=number)


def committed(one: HandedIn) -> Txn:
    now, no = datetime.now(UTC), 0
    position: dict[str, Json] = {"key": one.key}
    return Txn(
        *(one.txid or no, TxnState.COMMITTED, Guarantee.EXACTLY_ONCE, 1, 1, "orders", position, 1, no, no, no, no, no),
        *(False, now, now, now, None, None),
    )


LAST = taken(8, "q", 7)


@pytest.mark.parametrize(
    ("last", "query", "batch", "adopt", "what"),
    [
        (None, "q", 0, None, micro_batch("q", 0)),
        (None, "q", 1000, None, micro_batch("q", 1000)),
        (LAST, "q", 8, None, micro_batch("q", 8)),
        (LAST, "q", 7, None, LAST),
        (LAST, "q", 7, "q:7", LAST),
        (LAST, "other", 0, "q:7", micro_batch("other", 0, "q:7")),
        (LAST, "q", 3, "q:7", micro_batch("q", 3, "q:7")),
        (LAST, "q", 12, "q:7", micro_batch("q", 12, "q:7")),
    ],
)
def test_what_is_handed_out(last: HandedIn | None, query: str, batch: int, adopt: str | None, what: HandedIn) -> None:
    assert handed("orders", HandoutStanding(last), query, batch, {}, adopt) == what


@pytest.mark.parametrize(
    ("query", "batch", "adopt"),
    [("other", 0, None), ("other", 8, "q:6"), ("q", 6, None), ("q", 9, None), ("q", 0, "q:")],
)
def test_what_does_not_follow_is_refused_with_both_places(query: str, batch: int, adopt: str | None) -> None:
    with pytest.raises(PositionMismatch) as refused:
        handed("orders", HandoutStanding(LAST), query, batch, {}, adopt)
    text = str(refused.value)
    assert "batch 7 of streaming query q" in text
    assert f"batch {batch} of query {query}" in text
    assert "adopt='q:7'" in text


PLANNED = replace(LAST, plan="{}\n107")


@pytest.mark.parametrize(
    ("batch", "plans", "what"),
    [
        (7, {6: "{}\n93", 7: "{}\n107"}, PLANNED),
        (8, {7: "{}\n107", 8: "{}\n120"}, micro_batch("q", 8, plan="{}\n120")),
        (8, {8: "{}\n120"}, micro_batch("q", 8, plan="{}\n120")),
    ],
)
def test_a_batch_that_was_planned_alike_goes_on(batch: int, plans: dict[int, str], what: HandedIn) -> None:
    assert handed("orders", HandoutStanding(PLANNED), "q", batch, plans, None) == what


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
        handed("orders", HandoutStanding(PLANNED), "q", batch, plans, None)
    assert (refused.value.details["ledger_plan"], refused.value.details["plan"]) == (PLANNED.plan, plans[7])
    for part in ("to end at 107", "adopt='q:7'", f"hands out batch {batch}"):
        assert part in str(refused.value)
    assert handed("orders", HandoutStanding(PLANNED), "q", batch, plans, "q:7").adopted_from == "q:7"


OTHERS = {"behind": taken(3, "q", 2), "further": taken(9, "q", 7)}


def test_a_name_of_its_own_does_not_hide_that_the_query_is_known_by_another() -> None:
    with pytest.raises(PositionMismatch) as refused:
        handed("orders", HandoutStanding(None, OTHERS), "q", 8, {}, None)
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
            handed("orders", HandoutStanding(None, OTHERS), "q", 8, {}, wrong)
    assert handed("orders", HandoutStanding(None, OTHERS), "q", 8, {}, "q:7") == micro_batch("q", 8, "q:7")
    assert handed("orders", HandoutStanding(LAST, OTHERS), "q", 8, {}, None) == micro_batch("q", 8), (
        "it stands here by its own name"
    )


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
    def findings(*handed_in: HandedIn) -> list[str]:
        found = HandedInEvidence("orders", handed_in).slice_findings([committed(one) for one in handed_in])
        return [finding.text for finding in found]

    def follows(*handed_in: HandedIn) -> bool:
        return not findings(*handed_in)

    assert follows(taken(1, "q", 0), taken(2, "q", 1))
    assert follows(taken(1, "q", 0), taken(2, "r", 0, adopted_from="q:0"))
    assert follows(taken(2, "q", 0), taken(5, "q", 1)), "a txid that was aborted in between is no hole"
    for second in (taken(2, "q", 0), taken(2, "q", 2), taken(2, "r", 0)):
        (found,) = findings(taken(1, "q", 0), second)
        assert "does not follow q:0" in found


def test_what_is_no_plain_dataframe_is_no_job() -> None:
    from pyspark.sql import DataFrame

    from stormproof.core.engine.frame import SparkFrames

    class Remote(DataFrame):
        """As a DataFrame of Spark Connect is: one, but not of this process."""

        __module__ = "pyspark.sql.connect.dataframe"

    for frame, told in ((object.__new__(Remote), "Spark Connect is not supported"), ([1], "not an object of list")):
        with pytest.raises(UsageError, match=told):
            SparkFrames().require_batch(frame)
