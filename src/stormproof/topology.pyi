"""What `stormproof.topology` offers; this list is the only one."""

from .core.call_context import CallContext as CallContext
from .core.graph.aggregators import (
    Aggregator as Aggregator,
    CombinerAggregator as CombinerAggregator,
    ReducerAggregator as ReducerAggregator,
)
from .core.graph.components import (
    OutputStream as OutputStream,
    Subscription as Subscription,
)
from .trident.dry_run import (
    DryRun as DryRun,
    DryRunOutcome as DryRunOutcome,
    DryRunSink as DryRunSink,
    TopologyDryRun as TopologyDryRun,
)
from .trident.explain import Explanation as Explanation
from .trident.job_progress import JobProgress as JobProgress
from .trident.run import RunArguments as RunArguments
from .trident.statistics import (
    BatchResult as BatchResult,
    RecoveryReport as RecoveryReport,
)
from .trident.stream import GroupedStream as GroupedStream
from .trident.streaming.base import ForeachBatch as ForeachBatch
from .trident.streaming.jobs import ExactlyOnce as ExactlyOnce
from .trident.streaming.result import (
    OnceResult as OnceResult,
    StreamOutcome as StreamOutcome,
    StreamResult as StreamResult,
)
