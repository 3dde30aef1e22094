"""Numbered rows of a structured stream, applied by `exactly_once` from a cluster."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import Final

from support.cluster.hosts import Host
from support.cluster.spark_cluster import Cluster
from support.cluster.words import Words

ROWS: Final = 100
"""Of a micro-batch."""
RUN_S: Final = 300.0

STREAM: Final = """
import sys
from stormproof import DeltaSink, PostgresSink, Settings, exactly_once
from stormproof.core.engine.spark import spark_session

class EnoughError(Exception):
    pass

spark = spark_session(Settings())
function = exactly_once(DeltaSink("{lake}/append", name="append"), PostgresSink("numbers"), name="numbers")

def some(frame, batch):
    if batch >= int(sys.argv[1]):
        raise EnoughError
    function(frame, batch)

rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", {rows}).option("numPartitions", 2).load()
query = rows.select("value").writeStream.foreachBatch(some).option("checkpointLocation", "{disk}/checkpoint").start()
try:
    query.awaitTermination()
except Exception as error:
    if "EnoughError" not in str(error):
        raise
function.close()
"""


@dataclass(slots=True)
class Numbers:
    """A stream whose micro-batch `N` has the rows `N * ROWS` to `(N + 1) * ROWS - 1`. Its checkpoint is on its host."""

    words: Words

    @staticmethod
    def on(cluster: Cluster) -> Numbers:
        """A new one; every driver's host has its program."""
        return Numbers(Words.on(cluster, STREAM.replace("{rows}", str(ROWS))))

    def run(self, host: Host, batches: int, **environment: str) -> tuple[int, str]:
        """Let a driver run until so many micro-batches are applied since the beginning: its status, and what it said."""
        done = subprocess.run(
            self.words.python(host, "words.py", str(batches), **environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
        )
        return done.returncode, done.stdout + done.stderr

    def tables(self, host: Host) -> dict[str, Counter[int]]:
        """How often each number stands in each table."""
        rows = self.words.delta_rows(host, "append") | self.words.postgres_rows("numbers")
        return {name: Counter(row["value"] for row in some) for name, some in rows.items()}

    def check(self, host: Host, batches: int) -> None:
        """Both tables have each number of these micro-batches once; the audit says so on another host, too."""
        should = Counter(range(batches * ROWS))
        assert self.tables(host) == {"append": should, "numbers": should}
        status, report, told = self.words.ended(host, "audit", "verify", "numbers")
        assert (status, report["violations"]) == (0, []), (report, told)
