"""A driver that dies while Spark commits for it: the next one goes on exactly, also where the dead one's JVM still lives."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import Child
from support.sink_harness import SinkHarness
from support.spark_committer import second_of

from stormproof.sinks.contract.protocol import CommitOutcome
from stormproof.sinks.delta.session import DeltaSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
HELD = {"delta.after_check": False, "delta.after_log_entry": True, "delta.after_sync": True}

pytestmark = [pytest.mark.spark, pytest.mark.sampled(0.3, pool="long")]


def die(folder: Path, kind: str, *, at: str | None, after_s: float = 0) -> None:
    """Run a driver that dies in its second commit: at this failpoint, or so long after it began."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "examples")])}
    if at is not None:
        environment["STORMPROOF_FAILPOINT"] = f"{at}=kill@2"
    with Child([sys.executable, "-m", "support.spark_committer", str(folder), kind], environment) as child:
        assert child.line() == "commits"
        if at is None:
            threading.Event().wait(after_s)
            child.kill(signal.SIGKILL)
        else:
            assert child.wait() == -signal.SIGKILL


def take_over(folder: Path, kind: str) -> CommitOutcome:
    """Roll the second transaction forward, and go on with a third; every row is there once."""
    harness = SinkHarness(kind, folder, None, committer="spark")
    session = harness.open(2)
    assert isinstance(session, DeltaSession)
    second = second_of(folder)
    outcome = session.commit(second, checked=True).outcome
    session.finished(second)
    session.commit(harness.prepare(session, 3, 2, {"c": 4}), checked=True)
    assert harness.rows() == Counter(
        [("a", 11), ("b", 2), ("c", 7)] if harness.fold else [("a", 1), ("b", 2), ("a", 10), ("c", 3), ("c", 4)]
    )
    report = session.evidence(1, None)
    assert report.problems == ()
    assert [(e.txid, e.problem, e.gone) for e in report.entries] == [(n, None, False) for n in (1, 2, 3)]
    return outcome


@pytest.mark.parametrize("kind", ["delta-append", "delta-fold"])
@pytest.mark.parametrize("at", HELD)
def test_a_driver_that_dies_in_a_commit(spark: SparkSession, at: str, kind: str, tmp_path: Path) -> None:
    die(tmp_path, kind, at=at)
    assert take_over(tmp_path, kind) is (CommitOutcome.ALREADY_HELD if HELD[at] else CommitOutcome.APPLIED)


@pytest.mark.parametrize("kind", ["delta-append", "delta-fold"])
def test_a_driver_that_dies_while_its_jvm_commits(spark: SparkSession, seed: int, kind: str, tmp_path: Path) -> None:
    die(tmp_path, kind, at=None, after_s=random.Random(seed).uniform(0, 2.5))
    take_over(tmp_path, kind)
