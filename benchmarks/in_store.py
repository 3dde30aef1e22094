"""P18: P1, P2 and P5 with all tables in an object store, beside Spark that writes to the same store by s3a."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

from benchmarks.batches import SMALL, against_append, against_parquet, against_untracked
from benchmarks.figures import Goal
from benchmarks.harness import Case
from benchmarks.latency import against_micro_batch
from benchmarks.maven_jars import s3a_jars
from benchmarks.places import in_a_store, seaweed, tell_spark
from benchmarks.workbench import Workbench


def p18(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P18; none where the store or the rival's way to it cannot be had. The goals are those on a local disk."""
    missing = seaweed().missing() or (None if s3a_jars() else "hadoop-aws (Maven copies it)")
    if missing is not None:
        sys.stderr.write(f"P18 is left out: {missing} is not installed\n")
        return
    with in_a_store(bench) as place:
        tell_spark(bench, place)
        yield against_parquet(bench, SMALL, Goal(ratio=1.15), place)
        yield against_append(bench, SMALL, Goal(ratio=0.5), place)
        yield against_untracked(bench, SMALL, Goal(ratio=1.15), place)
        yield against_micro_batch(bench, Goal(ratio=0.25), place)
