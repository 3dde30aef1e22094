"""What `stormproof.errors` offers; this list is the only one."""

from .core.base.errors import (
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
