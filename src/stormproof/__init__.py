"""Storm's guarantees for pipelines on Spark: every message tracked, replayed when it fails, applied exactly once.

The names below are the public face; they are imported when they are first used, so that a command that needs no Spark
does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormproof.core.bolt import ArrowBolt, BasicBolt, Bolt, BoltContext, Collector, FailTuple, Tuple
    from stormproof.core.errors import (
        BatchUnverified,
        BoltUnavailable,
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
    from stormproof.core.graph.aggregators import Aggregator, CombinerAggregator, ReducerAggregator
    from stormproof.core.guarantee import Guarantee
    from stormproof.core.settings import Settings
    from stormproof.core.source.files import FileSource
    from stormproof.core.source.files.micro_batches import MicroBatches
    from stormproof.core.source.iterator import IteratorSource
    from stormproof.core.source.kind import SourceKind
    from stormproof.core.source.memory import MemorySource
    from stormproof.core.source.postgres_queue import PostgresQueue
    from stormproof.sinks.delta import DeltaSink
    from stormproof.sinks.memory import MemorySink
    from stormproof.sinks.postgres import PostgresSink
    from stormproof.trident.aggregate import count, distinct_count, max_, mean, min_, sum_
    from stormproof.trident.explain import Explanation
    from stormproof.trident.foreach_batch import StreamResult, exactly_once, feed
    from stormproof.trident.run import run
    from stormproof.trident.state.delta import DeltaMap
    from stormproof.trident.state.key_value import (
        KeyValueStore,
        MemoryMap,
        MemoryStore,
        NonTransactionalMap,
        OpaqueMap,
        TransactionalMap,
    )
    from stormproof.trident.state.merge import RowMerge
    from stormproof.trident.state.postgres import PostgresMap
    from stormproof.trident.state.protocol import (
        MapState,
        Merge,
        State,
        StateContext,
        StateFactory,
        StateKind,
        StateUpdater,
    )
    from stormproof.trident.state.sink import StateSink
    from stormproof.trident.state.updater import MapSetter, MapUpdater
    from stormproof.trident.statistics import BatchResult, RecoveryReport, RunStatistics
    from stormproof.trident.stream import Topology

_HOMES: Final = {
    **dict.fromkeys(("Aggregator", "CombinerAggregator", "ReducerAggregator"), "stormproof.core.graph.aggregators"),
    **dict.fromkeys(
        ("ArrowBolt", "BasicBolt", "Bolt", "BoltContext", "Collector", "FailTuple", "Tuple"),
        "stormproof.core.bolt",
    ),
    **dict.fromkeys(
        (
            "BatchUnverified",
            "BoltUnavailable",
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
    "MicroBatches": "stormproof.core.source.files.micro_batches",
    "IteratorSource": "stormproof.core.source.iterator",
    "MemorySource": "stormproof.core.source.memory",
    "PostgresQueue": "stormproof.core.source.postgres_queue",
    "DeltaSink": "stormproof.sinks.delta",
    "MemorySink": "stormproof.sinks.memory",
    "PostgresSink": "stormproof.sinks.postgres",
    **dict.fromkeys(("count", "distinct_count", "max_", "mean", "min_", "sum_"), "stormproof.trident.aggregate"),
    "Explanation": "stormproof.trident.explain",
    "StreamResult": "stormproof.trident.foreach_batch",
    "exactly_once": "stormproof.trident.foreach_batch",
    "feed": "stormproof.trident.foreach_batch",
    "run": "stormproof.trident.run",
    "SourceKind": "stormproof.core.source.kind",
    "DeltaMap": "stormproof.trident.state.delta",
    **dict.fromkeys(
        (
            "KeyValueStore",
            "MemoryMap",
            "MemoryStore",
            "NonTransactionalMap",
            "OpaqueMap",
            "TransactionalMap",
        ),
        "stormproof.trident.state.key_value",
    ),
    "RowMerge": "stormproof.trident.state.merge",
    "PostgresMap": "stormproof.trident.state.postgres",
    **dict.fromkeys(
        (
            "MapState",
            "Merge",
            "State",
            "StateContext",
            "StateFactory",
            "StateKind",
            "StateUpdater",
        ),
        "stormproof.trident.state.protocol",
    ),
    "StateSink": "stormproof.trident.state.sink",
    **dict.fromkeys(
        (
            "MapSetter",
            "MapUpdater",
        ),
        "stormproof.trident.state.updater",
    ),
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
    "BoltUnavailable",
    "CannotTell",
    "Collector",
    "CombinerAggregator",
    "DeltaMap",
    "DeltaSink",
    "Explanation",
    "FailTuple",
    "FatalError",
    "Fenced",
    "FileSource",
    "Guarantee",
    "IteratorSource",
    "JobFailed",
    "KeyValueStore",
    "MapSetter",
    "MapState",
    "MapUpdater",
    "MemoryMap",
    "MemorySink",
    "MemorySource",
    "MemoryStore",
    "Merge",
    "MicroBatches",
    "NonTransactionalMap",
    "OpaqueMap",
    "PositionMismatch",
    "PostgresMap",
    "PostgresQueue",
    "PostgresSink",
    "RecoveryReport",
    "ReducerAggregator",
    "RowMerge",
    "RunStatistics",
    "Settings",
    "SettingsError",
    "SinkRefused",
    "SourceKind",
    "State",
    "StateContext",
    "StateFactory",
    "StateKind",
    "StateSink",
    "StateUpdater",
    "StoreUnavailable",
    "StormproofError",
    "StreamResult",
    "Topology",
    "TopologyError",
    "TransactionalMap",
    "TransientError",
    "Tuple",
    "UsageError",
    "count",
    "distinct_count",
    "exactly_once",
    "feed",
    "max_",
    "mean",
    "min_",
    "run",
    "sum_",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stormproof' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
