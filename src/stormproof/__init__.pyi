"""The public face: every name that users may import from `stormproof`; this list is the only one.

Names are imported when they are first used, so that a command that needs no Spark does not wait for it.
"""

from .core.bolt import (
    ArrowBolt as ArrowBolt,
    BasicBolt as BasicBolt,
    Bolt as Bolt,
    BoltContext as BoltContext,
    Collector as Collector,
    FailTuple as FailTuple,
    Tuple as Tuple,
)
from .core.call_context import CallContext as CallContext, context as context
from .core.clock import Clock as Clock
from .core.errors import (
    BatchUnverified as BatchUnverified,
    BoltUnavailable as BoltUnavailable,
    CannotTell as CannotTell,
    FatalError as FatalError,
    Fenced as Fenced,
    JobFailed as JobFailed,
    MachineUnavailable as MachineUnavailable,
    MachineUnfit as MachineUnfit,
    MissingRight as MissingRight,
    PositionMismatch as PositionMismatch,
    RoutingError as RoutingError,
    SettingsError as SettingsError,
    SinkRefused as SinkRefused,
    StoreUnavailable as StoreUnavailable,
    StormproofError as StormproofError,
    TasksBroken as TasksBroken,
    TopologyError as TopologyError,
    TransientError as TransientError,
    UsageError as UsageError,
)
from .core.folds import Fold as Fold
from .core.graph.aggregators import (
    Aggregator as Aggregator,
    CombinerAggregator as CombinerAggregator,
    ReducerAggregator as ReducerAggregator,
)
from .core.graph.components import OutputStream as OutputStream, Subscription as Subscription
from .core.guarantee import Guarantee as Guarantee
from .core.lineage import Lineage as Lineage, ShownIds as ShownIds
from .core.message import FailureReason as FailureReason, MessageFailure as MessageFailure
from .core.pending.batches import batches_of as batches_of
from .core.pending.journal import Delivery as Delivery
from .core.pending.numbered import NumberedSource as NumberedSource
from .core.pending.postgres import PostgresPendingStore as PostgresPendingStore
from .core.pending.redelivering import RedeliveringSource as RedeliveringSource
from .core.pending.registry import register_source as register_source
from .core.pending.source import PendingSource as PendingSource
from .core.postgres.database import Database as Database
from .core.settings import secret as secret
from .core.settings import Settings as Settings
from .core.sink import (
    PreparedFile as PreparedFile,
    SinkInput as SinkInput,
    SinkMode as SinkMode,
    SinkWriter as SinkWriter,
    TaskContext as TaskContext,
    TaskWriter as TaskWriter,
)
from .core.source.backoff import Backoff as Backoff
from .core.source.dead_letter import DeadLetter as DeadLetter, Disposal as Disposal
from .core.source.files import FileSource as FileSource
from .core.source.kafka import KafkaSource as KafkaSource
from .core.source.files.micro_batches import MicroBatches as MicroBatches
from .core.source.iterator import IteratorSource as IteratorSource
from .core.source.kestrel import KestrelSource as KestrelSource
from .core.source.kind import SourceKind as SourceKind
from .core.source.memory import MemorySource as MemorySource
from .core.source.nats import NatsSource as NatsSource
from .core.source.postgres_queue import PostgresQueue as PostgresQueue
from .core.source.rabbitmq import RabbitMQSource as RabbitMQSource
from .core.source.rabbitmq import RabbitMQStreamSource as RabbitMQStreamSource
from .core.source.redis_streams import RedisStreamSource as RedisStreamSource
from .core.source.protocol import (
    Backlog as Backlog,
    Decoded as Decoded,
    Decoder as Decoder,
    Expectation as Expectation,
    Lease as Lease,
    Limit as Limit,
    Resolution as Resolution,
    Slice as Slice,
    SliceReader as SliceReader,
    Source as Source,
    SourcePreview as SourcePreview,
)
from .sinks.delta import CatalogTable as CatalogTable, DeltaSink as DeltaSink
from .sinks.memory import MemorySink as MemorySink
from .sinks.postgres import PostgresSink as PostgresSink
from .sinks.preview import RowsPreview as RowsPreview, TableAction as TableAction, TablePreview as TablePreview
from .sinks.protocol import (
    CommitOutcome as CommitOutcome,
    CommitResult as CommitResult,
    CommitDecision as CommitDecision,
    Evidence as Evidence,
    EvidenceReport as EvidenceReport,
    Held as Held,
    PreparedTransaction as PreparedTransaction,
    RefusedRow as RefusedRow,
    Sink as Sink,
    SinkIdentity as SinkIdentity,
    SinkSession as SinkSession,
    decide as decide,
)
from .sinks.registry import SinkAddress as SinkAddress, register_sink as register_sink
from .sinks.transactional import TransactionalSession as TransactionalSession, TransactionalSink as TransactionalSink
from .trident.aggregate import (
    collect_set as collect_set,
    count as count,
    distinct_count as distinct_count,
    first as first,
    last as last,
    max_ as max_,
    mean as mean,
    min_ as min_,
    sum_ as sum_,
)
from .trident.dry_run import (
    DryRun as DryRun,
    DryRunOutcome as DryRunOutcome,
    DryRunSink as DryRunSink,
    TopologyDryRun as TopologyDryRun,
)
from .trident.explain import Explanation as Explanation
from .trident.job_progress import JobProgress as JobProgress
from .trident.run import RunArguments as RunArguments, run as run
from .trident.state.delta import DeltaMap as DeltaMap
from .trident.state.key_value import (
    MemoryMap as MemoryMap,
    NonTransactionalMap as NonTransactionalMap,
    OpaqueMap as OpaqueMap,
    TransactionalMap as TransactionalMap,
)
from .trident.state.merge import RowMerge as RowMerge
from .trident.state.postgres import PostgresMap as PostgresMap
from .trident.state.protocol import (
    MapState as MapState,
    Merge as Merge,
    State as State,
    StateContext as StateContext,
    StateFactory as StateFactory,
    StateKind as StateKind,
    StateUpdater as StateUpdater,
)
from .trident.state.sink import StateSink as StateSink
from .trident.state.stores import KeyValueStore as KeyValueStore, MemoryStore as MemoryStore
from .trident.state.sink import MapSetter as MapSetter, MapUpdater as MapUpdater
from .trident.statistics import (
    BatchResult as BatchResult,
    RecoveryReport as RecoveryReport,
    RunStatistics as RunStatistics,
)
from .trident.stream import GroupedStream as GroupedStream, Stream as Stream, Topology as Topology
from .trident.streaming.api import exactly_once as exactly_once, feed as feed
from .trident.streaming.base import ForeachBatch as ForeachBatch
from .trident.streaming.jobs import ExactlyOnce as ExactlyOnce
from .trident.streaming.result import (
    OnceResult as OnceResult,
    StreamOutcome as StreamOutcome,
    StreamResult as StreamResult,
)
from .trident.web.application import WebApp as WebApp
from .trident.web.mount import web_app as web_app
from .trident.web.people import WebRole as WebRole, WebUser as WebUser
