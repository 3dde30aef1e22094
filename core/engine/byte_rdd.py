"""RDDs of byte strings: Spark hands from task to task what they send, without a look into it.

Nothing of Spark SQL is used: no plan is made and optimised, and no column is converted, which is most of the time of a small
job. PySpark's own `RDD.partitionBy` would pickle the strings and gather a thousand of them in a worker's memory. So what it
does below is done here, with the same classes of the JVM; they are the same in every Spark from 3.5 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from struct import Struct
from typing import Any, Final, TypeAlias

from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer

Task: TypeAlias = Callable[[int, Iterable[bytes]], Iterable[bytes]]
"""What a task runs: it is given its number and what was sent to it."""

_KEY: Final = Struct("!q")


def tasks(context: SparkContext, number: int) -> RDD[Any]:
    """So many tasks, which are given nothing."""
    return context.parallelize([], number)


def run_by(rdd: RDD[Any], task: Task) -> RDD[Any]:
    """What the tasks yield, each given what the RDD has for it."""
    made = rdd.mapPartitionsWithIndex(task)
    made._bypass_serializer = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return made


def keyed(task: int, sent: bytes) -> tuple[bytes, bytes]:
    """What a task yields, one after the other, to send a string to a task of the next stage."""
    return _KEY.pack(task), sent


def exchanged(rdd: RDD[Any], number: int) -> RDD[Any]:
    """What was sent (`keyed`), in the tasks of the next stage."""
    context: Any = rdd.context
    given: Any = rdd._jrdd  # pyright: ignore[reportPrivateUsage]
    jvm: Any = context._jvm
    pairs = jvm.PairwiseRDD(given.rdd()).asJavaPairRDD().partitionBy(jvm.PythonPartitioner(number, 0))
    pairs.rdd().setSerializer(_serializer(context))
    return RDD(jvm.PythonRDD.valueOfPair(pairs), context, NoOpSerializer())


@lru_cache(maxsize=1)
def _serializer(context: Any) -> Any:
    """Serialises each string for itself; made once for Spark's context, not once a batch.

    By default Java's stream keeps the last hundred objects, to send one that comes again by its number. Chunks never come
    again, and a hundred of them fill a heap.
    """
    conf = context._jsc.sc().conf().clone().set("spark.serializer.objectStreamReset", "1")
    return context._jvm.org.apache.spark.serializer.JavaSerializer(conf)
