"""What `stormproof.source` offers; this list is the only one."""

from .core.base.clock import Clock as Clock
from .core.contract.source import ShownIds as ShownIds
from .core.base.message import (
    FailureReason as FailureReason,
    MessageFailure as MessageFailure,
)
from .core.pending.batches import batches_of as batches_of
from .core.pending.journal import Delivery as Delivery
from .core.pending.numbered import NumberedSource as NumberedSource
from .core.pending.postgres import PostgresPendingStore as PostgresPendingStore
from .core.pending.redelivering import (
    RedeliveringArguments as RedeliveringArguments,
    RedeliveringSource as RedeliveringSource,
)
from .core.pending.registry import register_source as register_source
from .core.pending.source import PendingArguments as PendingArguments, PendingSource as PendingSource
from .core.postgres.database import Database as Database
from .core.contract.dead_letter import (
    DeadLetter as DeadLetter,
    Disposal as Disposal,
)
from .core.source.files.micro_batches import MicroBatches as MicroBatches
from .core.contract.source import SourceKind as SourceKind
from .core.contract.payload import decoder_for as decoder_for
from .core.contract.source import (
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
