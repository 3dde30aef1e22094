"""The matrix of a Delta table's features: who writes, and what is refused by its name. Tables are made without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema
from support.delta_tables import BY_HAND, BY_SPARK, make_by_hand
from support.sink_harness import FOLD, SCHEMA, SinkHarness

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkMode
from stormproof.sinks.delta.features import FEATURES, TEXT_TYPE, Committer, Refused, TableFacts, choose, features_of


def facts(*features: str, **settings: str) -> TableFacts:
    return TableFacts(frozenset(features), {f"delta.{name}": value for name, value in settings.items()}, {})


def test_each_row_of_the_matrix_has_a_table_in_the_tests() -> None:
    assert {feature.name for feature in FEATURES} == {*BY_SPARK, *BY_HAND}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_spark_does_not_make_is_found_in_the_log(name: str, tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    make_by_hand(harness.delta_path, BY_HAND[name])
    if name == "column invariants":
        assert choose(TableFacts.of(DeltaTable(harness.delta_path)), SinkMode.APPEND).committer is Committer.SPARK
        return
    with pytest.raises(SinkRefused, match=name):
        harness.open()


@pytest.mark.parametrize(
    ("found", "mode", "who"),
    [
        (facts(), SinkMode.APPEND, Committer.DELTA_RS),
        (facts("timestampNtz", "v2Checkpoint"), SinkMode.FOLD, Committer.DELTA_RS),
        (facts("deletionVectors"), SinkMode.APPEND, Committer.DELTA_RS),
        (facts("deletionVectors"), SinkMode.UPSERT, Committer.SPARK),
        (facts("rowTracking", "domainMetadata"), SinkMode.APPEND, Committer.SPARK),
        (facts(enableChangeDataFeed="true"), SinkMode.APPEND, Committer.DELTA_RS),
        (facts(enableChangeDataFeed="true"), SinkMode.FOLD, Committer.SPARK),
    ],
)
def test_delta_rs_writes_where_it_can(found: TableFacts, mode: SinkMode, who: Committer) -> None:
    choice = choose(found, mode)
    assert (choice.committer, choice.refused) == (who, ())
    assert (who is Committer.SPARK) == bool(choice.needs_spark)


@pytest.mark.parametrize("settings", [{"setTransactionRetentionDuration": "interval 1 day"}, {"appendOnly": "true"}])
def test_one_refused_feature_decides(settings: Mapping[str, Any]) -> None:
    choice = choose(facts("rowTracking", **settings), SinkMode.FOLD)
    assert [found.feature.name for found in choice.refused] == [f"delta.{next(iter(settings))}"]


def test_a_feature_that_a_protocol_only_allows_counts_as_absent(tmp_path: Path) -> None:
    allowed = ("columnMapping", "generatedColumns", "checkConstraints", "changeDataFeed", "appendOnly", "invariants")
    assert features_of(facts(*allowed)) == ()
    DeltaTable.create(tmp_path, Schema.from_arrow(SCHEMA))
    assert features_of(TableFacts.of(DeltaTable(tmp_path))) == ()


def test_a_refusal_says_why_and_what_to_do() -> None:
    ways = [way for feature in FEATURES for way in (feature.append, feature.by_key)]
    assert all(way.reason and way.way_on for way in ways if isinstance(way, Refused))


@pytest.mark.parametrize("kind", ["float", "double", "binary", "decimal(9,2)"])
def test_partitions_whose_values_are_spelled_differently_need_spark(kind: str) -> None:
    found = TableFacts(frozenset(), {}, {"at": kind})
    assert choose(found, FOLD.mode).committer is Committer.SPARK


def test_text_longer_than_its_varchar_fails_its_message(tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    columns = Schema.from_arrow(SCHEMA).fields
    short = Field("word", columns[0].type, metadata={TEXT_TYPE: "varchar(2)"})
    DeltaTable.create(harness.delta_path, Schema([short, columns[1]]))
    rows = pa.record_batch([["äb", "äbc", None], [1, 2, 3]], schema=SCHEMA)
    ((row, reason),) = harness.open().writer().check(rows)
    assert (row, "has 3 characters, too many for" in reason) == (1, True)


def test_who_commits_is_told_with_the_reason(tmp_path: Path) -> None:
    append, fold = (SinkHarness(f"delta-{how}", tmp_path, None) for how in ("append", "fold"))
    assert append.sink.committed_by(append.input) is None  # there is no table yet
    make_by_hand(append.delta_path, {"both": "deletionVectors"})
    assert append.sink.committed_by(append.input) == "delta-rs"
    told = "spark, since the table has deletion vectors (deletionVectors)"
    assert fold.sink.committed_by(fold.input) == told
    asked = SinkHarness("delta-append", tmp_path, None, committer="spark")
    assert asked.sink.committed_by(asked.input) == "spark"


def test_what_needs_spark_is_refused_where_delta_rs_was_asked_for(tmp_path: Path) -> None:
    fold = SinkHarness("delta-fold", tmp_path, None, committer="delta-rs")
    make_by_hand(fold.delta_path, {"both": "deletionVectors"})
    with pytest.raises(SinkRefused, match=r"deletion vectors .*which delta-rs does not write.*committer='auto'"):
        fold.open()


def test_a_claim_leaves_the_protocol_as_it_is(tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    make_by_hand(harness.delta_path, {"both": "deletionVectors"})
    before = DeltaTable(harness.delta_path)
    session = harness.open()
    assert session.claim(()) == ()
    assert session.release()
    after = DeltaTable(harness.delta_path)
    assert (after.protocol(), after.schema().to_json()) == (before.protocol(), before.schema().to_json())
    added = after.metadata().configuration.items() - before.metadata().configuration.items()
    assert [value for _, value in added] == ["released"]
    assert (after.metadata().id, after.metadata().created_time) == (
        before.metadata().id,
        before.metadata().created_time,
    )
