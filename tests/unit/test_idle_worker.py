"""A Spark worker that is closed between two tasks says nothing; one that is closed within a task still does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stormproof.core.engine.spark_lines import spark_line

pytestmark = pytest.mark.skipif(spark_line().name == "3.5", reason="its worker ends in silence by itself")

# PySpark's own worker loop, on a connection of ours.
WORKER = """
import socket, sys
import pyspark.worker
from pyspark.daemon import worker
sys.argv = ["daemon"]
if sys.argv_silent:
    from stormproof.core.engine.worker import end_in_silence_when_idle
    end_in_silence_when_idle()
    end_in_silence_when_idle()
ours, spark = socket.socketpair()
spark.sendall(sys.argv_bytes)
spark.close()
print(worker(ours, True))
"""


def ended(*, silent: bool, sent: bytes) -> tuple[str, str]:
    code = f"import sys; sys.argv_silent = {silent}; sys.argv_bytes = {sent!r}\n{WORKER}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip(), done.stderr


def test_an_idle_worker_ends_in_silence() -> None:
    assert ended(silent=True, sent=b"") == ("1", "")


@pytest.mark.parametrize(("silent", "sent"), [(False, b""), (True, b"\x00\x00")])
def test_control_pyspark_alone_and_a_task_that_is_cut_off_are_heard(silent: bool, sent: bytes) -> None:
    status, said = ended(silent=silent, sent=sent)
    assert status == "-1"
    assert "BrokenPipeError" in said
