"""What `stormproof.testing` offers; this list is the only one."""

from stormproof.core.base.clock import ManualClock as ManualClock
from .faults import Event as Event, Fault as Fault, FaultKind as FaultKind, Faults as Faults
from .simulation import (
    End as End,
    MessageFailed as MessageFailed,
    RejectedMessage as RejectedMessage,
    SimulatedMessage as SimulatedMessage,
    Simulation as Simulation,
    SimulationStatistics as SimulationStatistics,
    Written as Written,
    simulate as simulate,
)
from .sinks import (
    FoldCases as FoldCases,
    MisfitCases as MisfitCases,
    RefuseCases as RefuseCases,
    SinkConformance as SinkConformance,
    SinkHarness as SinkHarness,
    UpsertCases as UpsertCases,
)
from .sources import (
    Message as Message,
    PendingSourceHarness as PendingSourceHarness,
    SourceConformance as SourceConformance,
    SourceHarness as SourceHarness,
    messages_of as messages_of,
)
from .states import MapStateConformance as MapStateConformance
