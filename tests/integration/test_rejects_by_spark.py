"""A row that a Delta table refuses where Spark commits fails its one message, or those of its group; all others go in."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.sink_harness import SinkHarness

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, RefusedRow, SinkSession
from stormproof.sinks.delta import judge
from stormproof.sinks.prepare.rejected_messages import GroupsRefused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.sampled(0.3)]

ROWS = [("a", 1), ("b", 200), ("c", 3), ("d", 4)]
MESSAGES = [10, 20, 20, 30]


def made(
    spark: SparkSession, folder: Path, how: str, rule: str = "n < 100", more: str = "", clause: str = ""
) -> SinkHarness:
    """A table that Spark made, with a rule and further columns."""
    harness = SinkHarness(f"delta-{how}", folder, None, committer="spark")
    name = f"delta.`{harness.delta_path}`"
    supported = "'delta.feature.allowColumnDefaults' = 'supported'" if "DEFAULT '" in more else ""
    properties = f"TBLPROPERTIES ({supported})" if supported else ""
    spark.sql(f"CREATE TABLE {name} (word STRING, n BIGINT{more}) USING DELTA {clause} {properties}")
    spark.sql(f"ALTER TABLE {name} ADD CONSTRAINT few CHECK ({rule})")
    return harness


def words(rows: tuple[RefusedRow, ...]) -> set[str]:
    return {json.loads(row.text)["word"] for row in rows}


@pytest.mark.parametrize("how", ["append", "upsert"])
@pytest.mark.parametrize("clause", ["", "PARTITIONED BY (word)"], ids=["whole", "partitioned"])
def test_a_refused_row_takes_its_message_and_no_other(
    spark: SparkSession, tmp_path: Path, how: str, clause: str
) -> None:
    harness = made(spark, tmp_path, how, clause=clause)
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, tasks=2, rejects_max=1)
    result = opened.commit(transaction, checked=True)
    assert harness.rows() == Counter([("a", 1), ("d", 4)])
    assert {(row.messages, row.goes_with_others) for row in result.refused} == {(((20, 0),), False), (((20, 0),), True)}
    assert "CHECK constraint 'few' (n < 100)" in result.refused[0].error
    (entry,) = opened.evidence(0, None).entries
    assert (entry.rows + entry.rejected, entry.problem) == (transaction.rows + entry.reinstated, None)
    again = opened.commit(transaction, checked=True)
    assert (again.outcome, again.refused) == (CommitOutcome.ALREADY_HELD, result.refused)
    opened.finished(transaction)
    assert not [file for file in harness.staging.iterdir() if file.name.lstrip("_").startswith("stormproof-")]


@pytest.mark.parametrize("place", ["delta.after_check", "delta.after_log_entry", "delta.after_sync"])
def test_a_driver_that_died_in_the_commit_is_told_the_same_rejects(
    spark: SparkSession, tmp_path: Path, place: str
) -> None:
    harness = made(spark, tmp_path, "upsert")
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1)
    with pytest.raises(FailpointError), armed(f"{place}=error"):
        opened.commit(transaction, checked=True)
    with closing(harness.open(epoch=2)) as again:
        assert words(again.commit(transaction, checked=True).refused) == {"b", "c"}
    assert harness.rows() == Counter([("a", 1), ("d", 4)])


def test_where_a_message_is_left_out_the_row_that_it_superseded_is_committed(
    spark: SparkSession, tmp_path: Path
) -> None:
    harness = made(spark, tmp_path, "upsert")
    opened = harness.open()
    rows = [("a", 1), ("a", 200), ("b", 2), ("c", 1), ("c", 3)]
    opened.commit(harness.prepare(opened, 1, None, rows, messages=[1, 2, 3, 4, 5], rejects_max=1), checked=True)
    assert harness.rows() == Counter([("a", 1), ("b", 2), ("c", 3)])
    (entry,) = opened.evidence(0, None).entries
    assert (entry.rejected, entry.reinstated) == (1, 1)


def test_rows_that_later_ones_supersede_are_not_merged(spark: SparkSession, tmp_path: Path) -> None:
    """The files hold them in case that the table refuses the later ones, and it refuses none."""
    harness = made(spark, tmp_path, "upsert")
    opened = harness.open()
    rows = [("a", 1), ("a", 2), ("b", 5)]
    result = opened.commit(harness.prepare(opened, 1, None, rows, messages=[1, 2, 3], rejects_max=1), checked=True)
    assert (result.refused, harness.rows()) == ((), Counter([("a", 2), ("b", 5)]))


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (", twice BIGINT GENERATED ALWAYS AS (n * 2)", "twice < 200"),
        (", level STRING DEFAULT 'low'", "level = 'low' AND n < 100"),
        (", id BIGINT GENERATED ALWAYS AS IDENTITY", "n < 100"),
    ],
    ids=["generated", "default", "identity"],
)
def test_rules_are_asked_with_what_spark_fills_in(spark: SparkSession, tmp_path: Path, more: str, rule: str) -> None:
    harness = made(spark, tmp_path, "append", rule, more)
    opened = harness.open()
    result = opened.commit(harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1), checked=True)
    assert words(result.refused) == {"b", "c"}
    rows = spark.read.format("delta").load(str(harness.delta_path)).select("word", "n").collect()
    assert Counter(map(tuple, rows)) == Counter([("a", 1), ("d", 4)])


def test_a_rule_on_an_identity_column_refuses_the_batch_as_a_whole(spark: SparkSession, tmp_path: Path) -> None:
    """The error names the constraint and the remedy; with it the same batch goes in."""
    harness = made(spark, tmp_path, "append", "n < 100 AND id < 100", ", id BIGINT GENERATED ALWAYS AS IDENTITY")
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1)
    with pytest.raises(SinkRefused, match=r"Which rows .*'few' .*names an identity column\. Drop it"):
        opened.commit(transaction, checked=True)
    rows = spark.read.format("delta").load(str(harness.delta_path))
    assert rows.count() == 0
    spark.sql(f"ALTER TABLE delta.`{harness.delta_path}` DROP CONSTRAINT few")
    opened.commit(transaction, checked=True)
    found = spark.read.format("delta").load(str(harness.delta_path)).select("word", "n").collect()
    assert Counter(map(tuple, found)) == Counter(ROWS)


@pytest.mark.parametrize(("rule", "refused"), [("extra > 0", {"c"}), ("extra IS NULL OR n < extra", {"a"})])
def test_an_upsert_that_leaves_columns_alone_is_asked_of_the_merged_rows(
    spark: SparkSession, tmp_path: Path, rule: str, refused: set[str]
) -> None:
    harness = made(spark, tmp_path, "upsert", rule, ", extra BIGINT")
    spark.sql(f"INSERT INTO delta.`{harness.delta_path}` VALUES ('a', 1, 5), ('b', 1, 500)")
    opened = harness.open()
    added = [("a", 7), ("b", 7), ("c", 7)]
    result = opened.commit(harness.prepare(opened, 1, None, added, messages=[1, 2, 3], rejects_max=1), checked=True)
    assert words(result.refused) == refused
    assert harness.rows() == Counter(({"a": 1, "b": 1} | {w: n for w, n in added if w not in refused}).items())


def groups(harness: SinkHarness, opened: SinkSession, rows: list[tuple[str, int]]) -> PreparedTransaction:
    numbers = range(1, len(rows) + 1) if opened.writer().names_messages else ()
    return replace(harness.prepare(opened, 1, None, rows, messages=list(numbers), rejects_max=1), of_groups=True)


@pytest.mark.parametrize(
    ("rule", "held", "error"), [("n < 100", 60, "n < 100"), ("n > 0", 2**63 - 30, "the range of its column 'n'")]
)
def test_a_group_that_only_the_merged_row_shows_to_be_refused_is_named(
    spark: SparkSession, tmp_path: Path, rule: str, held: int, error: str
) -> None:
    harness = made(spark, tmp_path, "fold", rule)
    spark.sql(f"INSERT INTO delta.`{harness.delta_path}` VALUES ('a', {held}), ('b', 1)")
    opened = harness.open()
    added = [("a", 50), ("b", 50)]
    with pytest.raises(SinkRefused, match="stands for several messages"):
        opened.commit(groups(harness, opened, added), checked=True)
    with pytest.raises(GroupsRefused) as refused:
        opened.commit(groups(harness, opened, added), checked=True)  # its files name the messages
    assert [(words((row,)), row.messages) for row in refused.value.rows] == [({"a"}, ((1, 0),))]
    assert error in refused.value.rows[0].error
    assert harness.rows() == Counter([("a", held), ("b", 1)])


def test_control_rules_of_which_no_row_is_found_refuse_the_batch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "rules_of", lambda *_: [])
    with pytest.raises(SinkRefused, match="few"):
        test_a_refused_row_takes_its_message_and_no_other(spark, tmp_path, "append", "")
