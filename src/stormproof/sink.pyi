"""What `stormproof.sink` offers; this list is the only one."""

from .core.contract.fold import Fold as Fold
from .core.contract.sink import Lineage as Lineage
from .core.contract.sink import (
    PreparedFile as PreparedFile,
    SinkInput as SinkInput,
    SinkMode as SinkMode,
    SinkWriter as SinkWriter,
    TaskContext as TaskContext,
    TaskWriter as TaskWriter,
)
from .sinks.contract.preview import (
    RowsPreview as RowsPreview,
    TableAction as TableAction,
    TablePreview as TablePreview,
)
from .sinks.contract.protocol import (
    CommitDecision as CommitDecision,
    CommitOutcome as CommitOutcome,
    CommitResult as CommitResult,
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
from .sinks.contract.registry import (
    SinkAddress as SinkAddress,
    register_sink as register_sink,
)
from .sinks.stores.transactional import (
    TransactionalSession as TransactionalSession,
    TransactionalSink as TransactionalSink,
)
