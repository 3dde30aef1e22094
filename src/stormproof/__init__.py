"""Storm's guarantees for pipelines on Spark: every message tracked, replayed when it fails, applied exactly once.

The names below are the public face; they are imported when they are first used, so that a command that needs no Spark
does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormproof.core.aggregators import Aggregator, CombinerAggregator, ReducerAggregator
    from stormproof.core.bolt import ArrowBolt, BasicBolt, Bolt, BoltContext, Collector, FailTuple, Tuple
    from stormproof.core.errors import (
        BatchUnverified,
        CannotTell,
        FatalError,
        Fenced,
        JobFailed,
        PositionMismatch,
        SettingsError,
        SinkRefused,
        StoreUnavailable,
        StormproofError,
        TopologyError,
        TransientError,
        UsageError,
    )
    from stormproof.core.guarantee import Guarantee
    from stormproof.core.settings import Settings
    from stormproof.core.source.files import FileSource
    from stormproof.core.source.iterator import IteratorSource
    from stormproof.core.source.memory import MemorySource
    from stormproof.core.source.postgres_queue import PostgresQueue
    from stormproof.sinks.delta import DeltaSink
    from stormproof.sinks.memory import MemorySink
    from stormproof.sinks.postgres import PostgresSink
    from stormproof.trident.aggregate import count, distinct_count, max_, mean, min_, sum_
    from stormproof.trident.explain import Explanation
    from stormproof.trident.run import run
    from stormproof.trident.statistics import BatchResult, RecoveryReport, RunStatistics
    from stormproof.trident.stream import Topology

_HOMES: Final = {
    **dict.fromkeys(("Aggregator", "CombinerAggregator", "ReducerAggregator"), "stormproof.core.aggregators"),
    **dict.fromkeys(
        ("ArrowBolt", "BasicBolt", "Bolt", "BoltContext", "Collector", "FailTuple", "Tuple"),
        "stormproof.core.bolt",
    ),
    **dict.fromkeys(
        (
            "BatchUnverified",
            "CannotTell",
            "FatalError",
            "Fenced",
            "JobFailed",
            "PositionMismatch",
            "SettingsError",
            "SinkRefused",
            "StoreUnavailable",
            "StormproofError",
            "TopologyError",
            "TransientError",
            "UsageError",
        ),
        "stormproof.core.errors",
    ),
    "Guarantee": "stormproof.core.guarantee",
    "Settings": "stormproof.core.settings",
    "FileSource": "stormproof.core.source.files",
    "IteratorSource": "stormproof.core.source.iterator",
    "MemorySource": "stormproof.core.source.memory",
    "PostgresQueue": "stormproof.core.source.postgres_queue",
    "DeltaSink": "stormproof.sinks.delta",
    "MemorySink": "stormproof.sinks.memory",
    "PostgresSink": "stormproof.sinks.postgres",
    **dict.fromkeys(("count", "distinct_count", "max_", "mean", "min_", "sum_"), "stormproof.trident.aggregate"),
    "Explanation": "stormproof.trident.explain",
    "run": "stormproof.trident.run",
    "BatchResult": "stormproof.trident.statistics",
    "RecoveryReport": "stormproof.trident.statistics",
    "RunStatistics": "stormproof.trident.statistics",
    "Topology": "stormproof.trident.stream",
}

__all__ = [
    "Aggregator",
    "ArrowBolt",
    "BasicBolt",
    "BatchResult",
    "BatchUnverified",
    "Bolt",
    "BoltContext",
    "CannotTell",
    "Collector",
    "CombinerAggregator",
    "DeltaSink",
    "Explanation",
    "FailTuple",
    "FatalError",
    "Fenced",
    "FileSource",
    "Guarantee",
    "IteratorSource",
    "JobFailed",
    "MemorySink",
    "MemorySource",
    "PositionMismatch",
    "PostgresQueue",
    "PostgresSink",
    "RecoveryReport",
    "ReducerAggregator",
    "RunStatistics",
    "Settings",
    "SettingsError",
    "SinkRefused",
    "StoreUnavailable",
    "StormproofError",
    "Topology",
    "TopologyError",
    "TransientError",
    "Tuple",
    "UsageError",
    "count",
    "distinct_count",
    "max_",
    "mean",
    "min_",
    "run",
    "sum_",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stormproof' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
