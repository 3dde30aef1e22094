"""The errors that users meet, grouped by what a handler would do about them.

    StormproofError
    ├── TransientError          try again: nothing was decided
    │   ├── JobFailed           a batch's job ended without a verdict: it is the next attempt
    │   ├── StoreUnavailable    a database or a table could not be reached, or its answer was lost
    │   ├── BoltUnavailable     a bolt raised in prepare, where no message is to blame
    │   └── MachineUnavailable  a machine lacks what may come back: disk space, memory, file handles, the network
    ├── Fenced                  another driver took over: stop, touch nothing
    ├── FatalError              stop and look: going on could lose or double a message
    │   ├── PositionMismatch    a sink or a source stands elsewhere than the ledger says
    │   ├── SinkRefused         a sink refuses a prepared transaction for good: the txid is blocked
    │   ├── CannotTell          the evidence is gone
    │   ├── MissingRight        the database's role may not do it: the GRANT is named
    │   ├── BatchUnverified     the acker's verdict stayed wrong after every attempt
    │   ├── MachineUnfit        a machine cannot run any task: a module is missing, a disk is read-only, a right is missing
    │   └── TasksBroken         unrelated messages failed alone with one error outside user code: no message is to blame
    └── UsageError              fix the call (also a ValueError)
        ├── TopologyError       a topology that cannot be built
        ├── SettingsError       a setting that is missing or wrong
        └── RoutingError        a grouping has no task for a row

Every error has a ``kind`` (append-only: kinds are never renamed or removed, since callers match on them), a ``details``
mapping of JSON values, and survives pickling, since errors cross from Spark's workers to the driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final, TypeAlias

_PUBLIC: Final = "stormproof.errors"

Json: TypeAlias = str | int | float | bool | list["Json"] | dict[str, "Json"] | None


class ErrorKind(StrEnum):
    """The stable name of an error; append-only."""

    STORMPROOF = "stormproof"
    TRANSIENT = "transient"
    JOB_FAILED = "job_failed"
    STORE_UNAVAILABLE = "store_unavailable"
    BOLT_UNAVAILABLE = "bolt_unavailable"
    FENCED = "fenced"
    FATAL = "fatal"
    POSITION_MISMATCH = "position_mismatch"
    SINK_REFUSED = "sink_refused"
    CANNOT_TELL = "cannot_tell"
    BATCH_UNVERIFIED = "batch_unverified"
    MISSING_RIGHT = "missing_right"
    USAGE = "usage"
    TOPOLOGY = "topology"
    SETTINGS = "settings"
    ROUTING = "routing"
    MACHINE_UNAVAILABLE = "machine_unavailable"
    MACHINE_UNFIT = "machine_unfit"
    TASKS_BROKEN = "tasks_broken"


class StormproofError(Exception):
    """The root of every error that Stormproof raises on purpose.

    The message names the thing, the place and the next step; `details` holds the same facts for machines.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.STORMPROOF

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC  # where users import it from, and what a traceback is to show

    def __init__(self, message: str, /, **details: Json) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Json] = details

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.details))


StormproofError.__annotations__ = inspect.get_annotations(
    StormproofError, eval_str=True
)  # before it shows another home
StormproofError.__module__ = _PUBLIC


def _rebuild(cls: type[StormproofError], message: str, details: dict[str, Json]) -> StormproofError:
    return cls(message, **details)


class TransientError(StormproofError):
    """Try again: nothing was decided, and nothing was lost."""

    kind = ErrorKind.TRANSIENT


class JobFailed(TransientError):
    """A batch's job ended without a verdict. The batch is tried again as the next attempt of its txid."""

    kind = ErrorKind.JOB_FAILED


class StoreUnavailable(TransientError):
    """A database or table could not be reached, or its answer was lost: read again before acting."""

    kind = ErrorKind.STORE_UNAVAILABLE


class BoltUnavailable(TransientError):
    """A bolt raised in `prepare`, or the state that it reads did not answer: no message is to blame, and none
    counts a failure. What it needs may be away for a while, so it is tried again for as long as a store may stay away;
    then the run ends.
    """

    kind = ErrorKind.BOLT_UNAVAILABLE


class MachineUnavailable(TransientError):
    """A machine lacks what may come back: disk space, memory, file handles, the network. No message is to blame, and none
    counts a failure. The batch is opened again until the machine has it, for as long as a store may stay away; then the
    run ends. `details` has the `host`, the `error`'s class, and its `errno` by name where it has one.
    """

    kind = ErrorKind.MACHINE_UNAVAILABLE


class Fenced(StormproofError):
    """Another driver runs this topology now. Stop, and touch nothing: the other one goes on from here."""

    kind = ErrorKind.FENCED


class FatalError(StormproofError):
    """Stop and look: going on could lose or double a message."""

    kind = ErrorKind.FATAL


class PositionMismatch(FatalError):
    """A sink or a source stands elsewhere than the ledger says; both positions are named."""

    kind = ErrorKind.POSITION_MISMATCH


class SinkRefused(FatalError):
    """A sink refuses a prepared transaction for good; its txid is blocked until the operator has repaired the cause."""

    kind = ErrorKind.SINK_REFUSED


class CannotTell(FatalError):
    """The evidence that would decide is gone, for example by the table's log retention."""

    kind = ErrorKind.CANNOT_TELL


class MissingRight(FatalError):
    """The role that connects to a database lacks a right there. The message names role, object, right, and the GRANT."""

    kind = ErrorKind.MISSING_RIGHT


class BatchUnverified(FatalError):
    """Every attempt at a batch ended with a verdict that does not add up."""

    kind = ErrorKind.BATCH_UNVERIFIED


class MachineUnfit(FatalError):
    """A machine cannot run any task before somebody changes it: it cannot import the package or a user's module, a disk
    is read-only, a right is missing. No message is to blame, and none counts a failure. `details` are those of
    `MachineUnavailable`.
    """

    kind = ErrorKind.MACHINE_UNFIT


class TasksBroken(FatalError):
    """Unrelated messages failed alone, one after the other, with one and the same error outside user code; or a bolt emits,
    acks or fails from a thread that is not its task's. No message counts a failure for it. `details` has the `error`, the
    place where it is raised (`outside`), and how many `messages`.
    """

    kind = ErrorKind.TASKS_BROKEN


class UsageError(StormproofError, ValueError):
    """Fix the call."""

    kind = ErrorKind.USAGE


class TopologyError(UsageError):
    """A topology that cannot be built; names the component, the field and the names that are known."""

    kind = ErrorKind.TOPOLOGY


class SettingsError(UsageError):
    """A setting that is missing or wrong; names where it can be set."""

    kind = ErrorKind.SETTINGS


class RoutingError(UsageError):
    """A grouping has no task for a row: its function raised, or it or the emitter named none that there is."""

    kind = ErrorKind.ROUTING

    @property
    def texts(self) -> Mapping[int, str]:
        """What is wrong with each row of the record batch that has no task; empty where nothing is known of any."""
        texts = self.details.get("rows")
        pairs = [pair for pair in texts if isinstance(pair, list)] if isinstance(texts, list) else []
        return {row: text for row, text in pairs if isinstance(row, int) and isinstance(text, str)}

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The rows that have no task, in order; None: none has one."""
        return tuple(sorted(self.texts)) or None
