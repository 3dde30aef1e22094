"""Every topology of the list on every engine, in every mode: the same rows, failures and verdicts, and the right ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.engine_topologies import CASES, PARALLELISM, Case
from support.jobs import Batch, run_all

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.engine.inline import InlineEngine, Tamper
from stormproof.core.engine.protocol import Engine
from stormproof.core.task import task
from stormproof.core.task.job import WireRow
from stormproof.core.tracking import share as tracking
from stormproof.core.tracking.acker import ACKER
from stormproof.core.tracking.share import Anchors, BoltInputs
from stormproof.core.tracking.verdict import ComponentCounts, TaskCounts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES = {
    "batch": {"tracked": True, "per_message": False},
    "per-message": {"tracked": True, "per_message": True},
    "untracked": {"tracked": False, "per_message": False},
}
SHUFFLES = 3
BY_NAME = {case.name: case for case in CASES}

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
modes = pytest.mark.parametrize("mode", MODES)


def run(engine: Engine, case: Case, mode: str, folder: Path, excluded: frozenset[int] = frozenset()) -> Batch:
    return run_all(engine, case.build(folder), folder, wrap=case.wrap, excluded=excluded, **MODES[mode])


def inline(rng: Random | None = None, tamper: Tamper | None = None) -> InlineEngine:
    return InlineEngine(PARALLELISM, rng=rng, tamper=tamper)


def require_right(case: Case, mode: str, batch: Batch) -> None:
    """What came of it is what the case says."""
    assert batch.mismatches == ()
    assert batch.lost == frozenset()
    for sink, rows in case.rows.items():
        assert batch.sorted(sink) == rows, sink
    if case.failed:
        assert batch.failed == case.failed
    assert {id_: set(whats) for id_, whats in batch.late.items()} == case.late
    assert batch.report.unanchored == case.unanchored
    assert (batch.report.late_xor != 0) is bool(case.late and mode != "untracked")
    case.check(batch)


def failed_ids(batch: Batch) -> frozenset[int]:
    """The messages that the next attempt would leave out."""
    return frozenset(failure.id for failure in (*batch.report.failures, *batch.report.late))


def require_same(one: Batch, other: Batch) -> None:
    """Two runs cannot be told apart by what they report."""
    assert {sink: one.sorted(sink) for sink in one.rows} == {sink: other.sorted(sink) for sink in other.rows}
    assert one.mismatches == other.mismatches
    assert (one.failed, one.late, one.lost, one.together) == (other.failed, other.late, other.lost, other.together)
    for name in ("failures", "late"):  # with errors and inputs, and how many tasks tell of them
        assert sorted(map(repr, getattr(one.report, name))) == sorted(map(repr, getattr(other.report, name)))
    for name in ("read_messages", "read_xor", "ack_xor", "late_xor", "tuples", "unanchored", "violations"):
        assert getattr(one.report, name) == getattr(other.report, name), name
    assert counted(one) == counted(other)


def counted(batch: Batch) -> TaskCounts:
    """What each component did, without the time that it took."""
    counts = batch.report.counts
    timeless = {name: replace(of, busy_ns=0) for name, of in counts.components.items()}
    return TaskCounts(timeless, counts.edges)


@modes
@cases
def test_the_inline_engine_is_right_in_any_order(case: Case, mode: str, tmp_path: Path, seed: int) -> None:
    plain = run(inline(), case, mode, tmp_path)
    require_right(case, mode, plain)
    for number in range(SHUFFLES if len(plain.rows) < 1_000 else 1):
        require_same(run(inline(Random(seed + number)), case, mode, tmp_path), plain)


def modes_on_spark(case: Case) -> list[str]:
    """All where messages fail; else the batch, and each of the two others for every second topology.

    Spark's part is the exchange, which knows of no mode: the inline engine runs every topology in every mode.
    """
    if case.failed or case.late:
        return list(MODES)
    return ["batch", ("per-message", "untracked")[list(BY_NAME).index(case.name) % 2]]


@pytest.mark.spark
@pytest.mark.parametrize("small_job_ms", [0, math.inf], ids=["stage by stage", "in one task"])
@cases
def test_spark_and_the_inline_engine_agree(
    case: Case, tmp_path: Path, spark: SparkSession, small_job_ms: float
) -> None:
    from stormproof.core.engine.spark import SparkEngine

    engine = SparkEngine(spark, PARALLELISM, small_job_ms=small_job_ms)
    found = {mode: run(engine, case, mode, tmp_path) for mode in modes_on_spark(case)}
    for mode, batch in found.items():
        require_right(case, mode, batch)
        require_same(batch, run(inline(), case, mode, tmp_path))
    if case.failed or case.late:
        excluded = failed_ids(found["batch"])
        again = run(engine, case, "batch", tmp_path, excluded)
        require_same(again, run(inline(), case, "batch", tmp_path, excluded))


@cases
def test_messages_of_their_own_verdict_and_the_batch_say_the_same(case: Case, tmp_path: Path) -> None:
    batch, alone, untracked = (run(inline(), case, mode, tmp_path) for mode in MODES)
    assert {s: batch.sorted(s) for s in batch.rows} == {s: alone.sorted(s) for s in alone.rows}
    assert {s: batch.sorted(s) for s in batch.rows} == {s: untracked.sorted(s) for s in untracked.rows}
    assert batch.failed == alone.failed == untracked.failed
    assert batch.late == alone.late == untracked.late
    assert batch.report.ack_xor ^ batch.report.late_xor == alone.report.ack_xor ^ alone.report.late_xor
    assert (untracked.report.ack_xor, untracked.report.late_xor) == (0, 0)
    for one in (alone, untracked):
        assert counted(one).edges == counted(batch).edges
        assert without_acker(one) == without_acker(batch)
    for name, of in batch.report.counts.components.items():
        if into := [tuples for (_, _, to), tuples in batch.report.counts.edges.items() if to == name]:
            assert of.executed == sum(into), name


def without_acker(batch: Batch) -> dict[str, ComponentCounts]:
    """What the components did: the acks themselves are others in each mode."""
    return {name: of for name, of in counted(batch).components.items() if name != ACKER}


@modes
@pytest.mark.parametrize("case", [c for c in CASES if c.failed or c.late], ids=lambda case: case.name)
def test_the_next_attempt_is_run_as_if_the_failed_messages_were_not_there(
    case: Case, mode: str, tmp_path: Path
) -> None:
    first = run(inline(), case, mode, tmp_path)
    excluded = failed_ids(first)
    second = run(inline(), case, mode, tmp_path, excluded)
    assert second.mismatches == ()
    assert (second.failed, second.late, second.lost) == ({}, {}, frozenset())
    assert second.report.late_xor == 0
    assert second.report.read_messages == first.report.read_messages - len(excluded)
    require_same(run(inline(Random(1)), case, mode, tmp_path, excluded), second)


# --- negative controls: what the comparisons must see --------------------------------------------------------------


def without_a_row(at: int, rows: list[WireRow]) -> list[WireRow]:
    """One chunk less, the first that there is."""
    chunk = next((row for row in rows if row.edge >= 0), None)
    return [row for row in rows if row is not chunk]


def twice(at: int, rows: list[WireRow]) -> list[WireRow]:
    """Every chunk three times, to which an XOR is blind."""
    more = [row for row in rows if row.edge >= 0]
    return [*rows, *more, *more]


@modes
@pytest.mark.parametrize("tamper", [without_a_row, twice])
@pytest.mark.parametrize("name", ["grouping-shuffle", "grouping-all-arrow", "two-spouts-joined", "diamond-none-none"])
def test_rows_lost_or_tripled_between_stages_are_caught(name: str, tamper: Tamper, mode: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        require_right(BY_NAME[name], mode, run(inline(tamper=tamper), BY_NAME[name], mode, tmp_path))


def one_share_for_all(shares: Words, counts: Rows) -> Words:
    return np.repeat(shares, counts)


class ForgetsChildren(BoltInputs):
    """Acks an input's own share, as if nothing had been made of it."""

    def rest(self, handles: Rows) -> Anchors:
        pairs, counts = self._pairs_of(handles)
        row = np.repeat(np.arange(len(handles)), counts)
        return Anchors(len(handles), row, self._message[pairs], self._share[pairs] if self._tracked else None)


@pytest.mark.parametrize("mode", ["batch", "per-message"])
@pytest.mark.parametrize(
    ("name", "where", "broken", "worse"),
    [
        ("grouping-shuffle", tracking, "split_runs", one_share_for_all),
        ("diamond-none-none", tracking, "split_runs", one_share_for_all),
        ("two-streams", task, "BoltInputs", ForgetsChildren),
        ("self-anchor", task, "BoltInputs", ForgetsChildren),
        ("two-spouts-joined", task, "BoltInputs", ForgetsChildren),
    ],
)
def test_shares_that_do_not_add_up_are_caught(
    name: str,
    where: ModuleType,
    broken: str,
    worse: object,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, broken, worse)
    with pytest.raises(AssertionError):
        require_right(BY_NAME[name], mode, run(inline(), BY_NAME[name], mode, tmp_path))


@pytest.mark.parametrize("what", ["rows", "late", "ack_xor", "failed"])
def test_reports_that_differ_are_told_apart(what: str, tmp_path: Path) -> None:
    one = run(inline(), BY_NAME["two-spouts-joined"], "batch", tmp_path)
    other = {
        "rows": replace(one, rows={"out": one.rows["out"][1:]}),
        "late": replace(one, report=replace(one.report, late=one.report.late[1:])),
        "ack_xor": replace(one, report=replace(one.report, ack_xor=one.report.ack_xor ^ 1)),
        "failed": replace(one, failed={**one.failed, "orders:0": "error at join"}),
    }[what]
    require_same(one, replace(one))
    with pytest.raises(AssertionError):
        require_same(other, one)
