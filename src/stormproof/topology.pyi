"""What `stormproof.topology` offers; this list is the only one."""

from .core.user_code.functions import CallContext as CallContext
from .core.graph.aggregation import (
    Aggregator as Aggregator,
    CombinerAggregator as CombinerAggregator,
    ReducerAggregator as ReducerAggregator,
)
from .core.graph.components import (
    OutputStream as OutputStream,
    Subscription as Subscription,
)
from .trident.driver.dry_run import (
    DryRun as DryRun,
    DryRunOutcome as DryRunOutcome,
    DryRunSink as DryRunSink,
    TopologyDryRun as TopologyDryRun,
)
from .trident.topology.explain import Explanation as Explanation
from .trident.ledger.control import JobProgress as JobProgress
from .trident.driver.run import RunArguments as RunArguments
from .trident.terms.observers import (
    BatchResult as BatchResult,
    RecoveryReport as RecoveryReport,
)
from .trident.topology.stream import GroupedStream as GroupedStream
from .trident.streaming.foreach_batch import (
    ForeachBatch as ForeachBatch,
    OnceResult as OnceResult,
    StreamOutcome as StreamOutcome,
    StreamResult as StreamResult,
)
from .trident.streaming.sinks import ExactlyOnce as ExactlyOnce
