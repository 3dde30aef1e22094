"""What is told of Spark's errors: the cause first, none of what surrounds it."""

from __future__ import annotations

import pytest

from stormproof.core.engine.spark_error import LINES_MAX, what_happened

STAGE = (
    "Job aborted due to stage failure: Task 1 in stage 2.0 failed 1 times, most recent failure: Lost task 1.0 in stage 2.0 "
    "(TID 3) (localhost executor driver): "
)
DEAD_WORKER = f"""An error occurred while calling o170.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:\x20
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:53)
Caused by: {STAGE}org.apache.spark.SparkException: Python worker exited unexpectedly (crashed):\x20
\tat org.apache.spark.api.python.BasePythonRunner.f(PythonRunner.scala:670)
Caused by: java.io.EOFException
\t... 19 more

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.f(DAGScheduler.scala:3122)
Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed):\x20
Caused by: java.io.EOFException
"""
TRACEBACK = f"""An error occurred while calling o1.collect.
: org.apache.spark.SparkException: {STAGE}org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
ValueError: no such city

\tat org.apache.spark.api.python.BasePythonRunner.f(PythonRunner.scala:670)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            DEAD_WORKER,
            "on localhost executor driver: Python worker exited unexpectedly (crashed):\njava.io.EOFException",
        ),
        (TRACEBACK, '  File "worker.py", line 1, in main\n    process()\nValueError: no such city'),
        (
            f"{STAGE}ExecutorLostFailure (executor 2 exited) Reason: worker lost\nDriver stacktrace:",
            "on localhost executor driver: ExecutorLostFailure (executor 2 exited) Reason: worker lost",
        ),
        (
            "An error occurred while calling o1.x.\n: java.lang.OutOfMemoryError: heap",
            "java.lang.OutOfMemoryError: heap",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: file:/x", "[PATH_NOT_FOUND] Path does not exist: file:/x"),
        ("An error occurred while calling o1.x", "An error occurred while calling o1.x"),
        ("", ""),
    ],
)
def test_the_cause_is_told_first(text: str, told: str) -> None:
    assert what_happened(text) == told


def test_of_many_lines_the_first_and_the_last_are_told() -> None:
    told = what_happened("\n".join(f"line {i}." for i in range(100))).splitlines()
    assert (len(told), told[0], told[-1]) == (LINES_MAX + 1, "line 0.", "line 99.")
