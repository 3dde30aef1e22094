"""The ledger's rows, typed and frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from stormproof.core.base.errors import Json
from stormproof.core.base.message import FailureReason, Guarantee, MessageFailure, MessageId, Token
from stormproof.core.contract.sink import PreparedFile
from stormproof.sinks.contract.protocol import RefusedRow
from stormproof.trident.terms.transaction_states import (
    ComponentKind,
    EventKind,
    OperatorAction,
    RejectState,
    SinkOutcome,
    TxnCause,
    TxnState,
)

T = TypeVar("T")

NO_LIFE: Final = "dry-run"
"""Stands for the life that a first start would make; no life is called so."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a topology's driver, and the epoch that it holds."""

    topology: str
    incarnation: str
    epoch: int
    took_over_from: str | None = None
    """The older driver that had not recorded its end, as ``host:pid``; None where there was none."""


@dataclass(frozen=True, slots=True)
class SinkWork:
    """What one batch writes to one sink."""

    sink: str
    previous: int | None
    rows: int
    bytes: int
    digest: str
    files: tuple[PreparedFile, ...]
    committed_at: datetime | None = None
    outcome: SinkOutcome | None = None
    superseded: int = 0
    """Rows of an upsert that changed nothing; known once the sink holds the batch."""
    left_out: tuple[RefusedRow, ...] | None = None
    """Set where this content was fixed in the place of another, of which the sink's table refused rows of groups: these
    rows. `files` have nothing of their messages, and their own rows name theirs (see `trident.driver.recovery`)."""
    version: int | None = None
    """The table's version that has it, where tables have versions and the ledger knows it."""


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """What one component did in one batch; the table's comments explain the fields."""

    component: str
    kind: ComponentKind
    executed: int
    emitted: int
    acked: int
    failed: int
    busy_ms: float


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """How many tuples of one batch went from a component's stream to another component, or to a sink."""

    origin: str
    stream: str
    target: str
    tuples: int


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What each component did in one batch. Empty for a micro-batch of a query, whose rows Spark computes."""

    components: tuple[ComponentRow, ...] = ()
    edges: tuple[EdgeRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Txn:
    """One batch as the ledger knows it."""

    txid: int
    state: TxnState
    guarantee: Guarantee
    epoch: int
    attempt: int
    source: str
    position: dict[str, Json]
    messages: int
    failed: int
    returned: int
    rejected: int
    tuples: int
    bytes: int
    retry: bool
    opened_at: datetime
    prepared_at: datetime | None
    ended_at: datetime | None
    cause: TxnCause | None
    reason: str | None
    """The cause in words."""
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])
    tuning: dict[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the append-only `event` table."""

    kind: EventKind
    action: OperatorAction | None = None
    """The decision, of an `operator` event."""
    txid: int | None = None
    attempt: int | None = None
    sink: str | None = None
    message: str | None = None
    number: int | None = None
    origin: int | None = None
    token: int | None = None
    reason: str | None = None
    component: str | None = None
    error: str | None = None
    input: str | None = None
    detail: dict[str, Json] | None = None
    at: datetime | None = None

    @staticmethod
    def of_failure(failure: MessageFailure, shown: str, txid: int, attempt: int) -> Event:
        """The record of one message's failure or return. It is complete: an owed confirm can be repeated from it."""
        return Event(
            EventKind.FAILURE if failure.counted else EventKind.RETURNED,
            txid=txid,
            attempt=attempt,
            message=shown,
            number=failure.id,
            origin=failure.origin,
            token=failure.token,
            reason=failure.reason.value,
            component=failure.component,
            error=failure.error,
            input=failure.input,
            detail={"mates": failure.mates} if failure.mates else None,
        )

    def to_failure(self) -> MessageFailure:
        """The failure, or return, that this event records."""
        assert self.number is not None
        assert self.reason is not None
        return MessageFailure(
            id=MessageId(self.number),
            origin=self.origin or 0,
            token=Token(self.token or 0),
            reason=FailureReason(self.reason),
            component=self.component or "",
            error=self.error or "",
            input=self.input or "",
            counted=self.kind is EventKind.FAILURE,
            mates=int(str((self.detail or {}).get("mates", 0))),
        )


@dataclass(frozen=True, slots=True)
class Reject:
    """A message of a batch that a sink does not hold, since its table refuses one of the message's rows.

    Without `message` it is a row of no single message. `row` is the refused row as JSON, `rows` how many rows are left out.
    `payload` is the message's, where the source gives it. See `RejectState` for what became of it.
    """

    txid: int
    sink: str
    message: str | None
    number: int | None
    origin: int | None
    rows: int
    sqlstate: str | None
    error: str
    row: str
    payload: bytes | None = None
    state: RejectState = RejectState.OPEN
    at: datetime | None = None
    by: str | None = None
    why: str | None = None
    decided_at: datetime | None = None
    retried_in: int | None = None
    id: int = 0

    @property
    def reason(self) -> str:
        """The SQLSTATE, or ``refused`` where no error of Postgres refused it: as in the audit's views."""
        return self.sqlstate or "refused"


def record_of(kind: type[T], row: Any, /, **given: Any) -> T:
    """A row, or another record, as a record of this kind: each field that is not given by its name, times with a zone."""
    return kind(**{name: aware(getattr(row, name)) for name in names_of(kind) if name not in given}, **given)


def names_of(kind: Any) -> tuple[str, ...]:
    """The names of a record's fields."""
    names: tuple[str, ...] = kind.__match_args__  # as `dataclasses.fields` says, in a tenth of the time
    return names


def aware(value: Any) -> Any:
    """The value; a time without a zone, as SQLite gives it, as one of UTC."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def to_txn(row: Any) -> Txn:
    """A `txn` row."""
    return record_of(
        Txn,
        row,
        state=TxnState(row.state),
        guarantee=Guarantee(row.guarantee),
        cause=None if row.cause is None else TxnCause(row.cause),
        steps_ms=row.steps_ms or {},
        tuning=row.tuning or {},
    )


def to_work(row: Any) -> SinkWork:
    """A `txn_sink` row."""
    return record_of(
        SinkWork,
        row,
        files=tuple(PreparedFile(**f) for f in row.files),
        outcome=None if row.outcome is None else SinkOutcome(row.outcome),
        left_out=None if row.left_out is None else tuple(_refused(one) for one in row.left_out),
    )


def _refused(one: dict[str, Any]) -> RefusedRow:
    found = RefusedRow(**one)
    return replace(found, messages=tuple((int(number), int(origin)) for number, origin in found.messages))


def to_reject(row: Any) -> Reject:
    """A `reject` row."""
    return record_of(
        Reject,
        row,
        payload=None if row.payload is None else bytes(row.payload),
        state=RejectState(row.state),
        by=row.decided_by,
        why=row.decided_why,
    )


def to_event(row: Any) -> Event:
    """An `event` row."""
    action = None if row.action is None else OperatorAction(row.action)
    return record_of(Event, row, kind=EventKind(row.kind), action=action)


def counts_of(failures: Iterable[Event]) -> dict[str, int]:
    """The numbers of failed and of returned messages among these events, by column of `txn`."""
    found = [event.kind is EventKind.FAILURE for event in failures]
    return {"failed": sum(found), "returned": len(found) - sum(found)}
