"""The ledger's tables, and their rows, typed and frozen.

A message that succeeds at the first attempt has no row of its own; every failure, replay, suppression, reject and operator
action is an append-only row of `event`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from stormproof.core.base.errors import Json
from stormproof.core.base.message import FailureReason, Guarantee, MessageFailure, MessageId, Token
from stormproof.core.contract.sink import PreparedFile
from stormproof.core.postgres.columns import key, may, must
from stormproof.sinks.contract.protocol import RefusedRow
from stormproof.trident.terms.transaction_states import (
    AttemptOutcome,
    ComponentKind,
    EventKind,
    OperatorAction,
    RejectState,
    SinkOutcome,
    TxnCause,
    TxnState,
    Verdict,
)

SCHEMA: Final = "stormproof"
metadata: Final = sa.MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    },
)

_json: Final = sa.JSON().with_variant(JSONB(), "postgresql")
_serial: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_time: Final = sa.DateTime(timezone=True)


def known(column: str, values: type[StrEnum]) -> sa.CheckConstraint:
    """A check constraint: the column has one of the enum's values."""
    return sa.CheckConstraint(f"{column} in ({', '.join(repr(one.value) for one in values)})", name=f"{column}_known")


def incarnation(*, key: bool = True, refers: bool = False) -> sa.Column[str]:
    """The column that tells whose a row is; with `refers` the database requires that there is such a topology.

    What stays where its batch was pruned (events, rejects, a sink's newest entry) refers to nothing, nor do the counts, of
    which each batch has many rows.
    """
    keys = [sa.ForeignKey(f"{SCHEMA}.topology.incarnation")] if refers else []
    return sa.Column("incarnation", sa.Text, *keys, primary_key=key, nullable=False, comment="of the topology")


topology: Final = sa.Table(
    "topology",
    metadata,
    key("name", sa.Text, "as the program names it"),
    must("incarnation", sa.Text, "one life of this name", unique=True),
    must("epoch", sa.BigInteger, "one run of its driver; fences older ones"),
    must("fingerprint", sa.Text, "hash of the graph's shape, names and schemas"),
    must("guarantee", sa.Text, "of the newest run"),
    must("source", sa.Text, "what the topology reads; it cannot change"),
    must("created_at", _time, "first start"),
    must("started_at", _time, "of the present epoch"),
    must("driver_host", sa.Text, "of the present epoch's driver"),
    must("driver_pid", sa.BigInteger, "its process there"),
    must("driver_started", sa.Double, "start of that process, seconds since 1970"),
    may("stopped_at", _time, "set when the driver of the present epoch ended in order"),
    comment="one row a topology: the fence that every transaction locks first",
)

backend: Final = sa.Table(
    "backend",
    metadata,
    incarnation(refers=True),
    key("pid", sa.BigInteger, "of the server process"),
    key("started_at", _time, "of the server process: pids come again"),
    must("epoch", sa.BigInteger, "of the driver whose connection it is"),
    comment="server processes of a driver's connections; a take-over ends those of older epochs",
)

topology_sink: Final = sa.Table(
    "topology_sink",
    metadata,
    incarnation(refers=True),
    key("sink", sa.Text, "name of the sink"),
    must("target", sa.Text, "the table, as the sink names it"),
    must("table_id", sa.Text, "what tells the table from another one of its name"),
    may("description", _json, "how to open it for inspection; no secrets"),
    must("first_at", _time, "when the sink was bound to it"),
    comment="the table behind each sink",
)

txn: Final = sa.Table(
    "txn",
    metadata,
    incarnation(refers=True),
    key("txid", sa.BigInteger, "from 1, without gaps"),
    must("state", sa.Text, "open, prepared, blocked, committed, aborted or abandoned"),
    must("guarantee", sa.Text, "under which it ran"),
    must("epoch", sa.BigInteger, "of the driver that opened it"),
    must("attempt", sa.Integer, "the latest; the one that counts once prepared"),
    must("source", sa.Text, "where its messages are from"),
    must("position", _json, "the slice, as its source describes it"),
    must("messages", sa.BigInteger, "opened"),
    must("failed", sa.BigInteger, "messages that failed in it", server_default="0"),
    must("returned", sa.BigInteger, "went back with failed ones", server_default="0"),
    must("rejected", sa.BigInteger, "messages that a sink rejected", server_default="0"),
    must("tuples", sa.BigInteger, "that its components passed on", server_default="0"),
    must("bytes", sa.BigInteger, "of its messages"),
    must("retry", sa.Boolean, "its messages failed before"),
    must("opened_at", _time, "when its messages were leased"),
    may("prepared_at", _time, "when its content was fixed"),
    may("ended_at", _time, "when it was committed, aborted or abandoned"),
    may("cause", sa.Text, "kind of the reason why it is blocked, aborted or abandoned"),
    may("reason", sa.Text, "the same in words"),
    may("steps_ms", _json, "how long each step took"),
    may("tuning", _json, "how batches were to be when it was opened"),
    known("state", TxnState),
    known("cause", TxnCause),
    sa.Index("ix_txn_unresolved", "incarnation", "txid", postgresql_where=sa.text("ended_at is null")),
    sa.CheckConstraint("txid >= 1 and epoch >= 1 and attempt >= 1", name="numbers"),
    sa.CheckConstraint("(ended_at is not null) = (state in ('committed', 'aborted', 'abandoned'))", name="ended"),
    sa.CheckConstraint("prepared_at is not null or state not in ('prepared', 'blocked', 'committed')", name="prepared"),
    sa.CheckConstraint(
        "cause is not null and reason is not null or state not in ('blocked', 'aborted', 'abandoned')", name="explained"
    ),
    sa.CheckConstraint(
        "failed >= 0 and returned >= 0 and rejected >= 0 and failed + returned <= messages and rejected <= messages",
        name="counts",
    ),
    comment="one row a batch",
)

attempt: Final = sa.Table(
    "attempt",
    metadata,
    incarnation(),
    key("txid", sa.BigInteger, "of the batch"),
    key("attempt", sa.Integer, "from 1"),
    must("epoch", sa.BigInteger, "of the driver that began it"),
    must("seed", sa.BigInteger, "from which the tuples' random numbers are drawn"),
    must("excluded", _json, "numbers of the messages left out"),
    must("expected_messages", sa.BigInteger, "the batch's, less those left out"),
    must("expected_xor", sa.BigInteger, "of these messages' tokens; the acker must come to the same"),
    must("started_at", _time, "when its job was begun"),
    must("outcome", sa.Text, "running, complete, job_failed, unverified, moot, dead"),
    may("error", sa.Text, "why it failed"),
    sa.ForeignKeyConstraint(
        ["incarnation", "txid"], [f"{SCHEMA}.txn.incarnation", f"{SCHEMA}.txn.txid"], ondelete="CASCADE"
    ),
    known("outcome", AttemptOutcome),
    sa.CheckConstraint("attempt >= 1", name="numbers"),
    comment="one try at a batch, written before its job runs",
)

txn_sink: Final = sa.Table(
    "txn_sink",
    metadata,
    incarnation(),
    key("txid", sa.BigInteger, "of the batch"),
    key("sink", sa.Text, "name of the sink"),
    may("previous", sa.BigInteger, "the txid that the sink must hold before"),
    must("rows", sa.BigInteger, "that its files have"),
    must("bytes", sa.BigInteger, "that its files have"),
    must("digest", sa.Text, "SHA-256 over the files' rows, digests, partitions and misfits"),
    must("files", _json, "the prepared files, each with rows, bytes and digest"),
    may("committed_at", _time, "set once the sink is known to hold it"),
    may("outcome", sa.Text, "applied, already_held, held_unfinished, skipped"),
    must(
        "superseded",
        sa.BigInteger,
        "rows of an upsert that changed nothing: a later one of their key was there",
        server_default="0",
    ),
    may("left_out", _json, "refused rows of groups, whose messages its files have nothing of"),
    may("version", sa.BigInteger, "the table's version that has it; null: it has none, or that is not known"),
    sa.Index("ix_txn_sink_held", "incarnation", "sink", "txid", postgresql_where=sa.text("committed_at is not null")),
    sa.Index("ix_txn_sink_superseded", "incarnation", "sink", "superseded", postgresql_where=sa.text("superseded > 0")),
    known("outcome", SinkOutcome),
    sa.CheckConstraint("rows >= 0 and bytes >= 0 and superseded >= 0", name="counts"),
    comment="what each batch writes to each sink, fixed before any sink is touched",
)

txn_component: Final = sa.Table(
    "txn_component",
    metadata,
    incarnation(),
    key("txid", sa.BigInteger, "of the batch"),
    key("component", sa.Text, "name of the component or sink; __acker is the tracking"),
    must("kind", sa.Text, "spout, operation, bolt, aggregate, join, sink or acker"),
    must("at", _time, "when the batch's content was fixed; of one whose messages all failed, when it ended"),
    must("executed", sa.BigInteger, "tuples that it took in; of a spout, messages that were read; of the acker, acks"),
    must("emitted", sa.BigInteger, "tuples that it made; of the acker, messages with a verdict"),
    must(
        "acked",
        sa.BigInteger,
        "tuples that it took in and did not fail; of spout and acker, messages that were complete",
    ),
    must("failed", sa.BigInteger, "messages that failed in it; of a spout and the acker, anywhere"),
    must("busy_ms", sa.Double, "time that it took, over all tasks"),
    known("kind", ComponentKind),
    comment="what each component did in the attempt that fixed a batch's content; an attempt before it has no row",
)

txn_edge: Final = sa.Table(
    "txn_edge",
    metadata,
    incarnation(),
    key("txid", sa.BigInteger, "of the batch"),
    key("origin", sa.Text, "component that emitted them"),
    key("stream", sa.Text, "stream that they were emitted to"),
    key("target", sa.Text, "component or sink that took them"),
    must("tuples", sa.BigInteger, "how many; each copy that a grouping makes counts"),
    comment="how many tuples of that attempt went from one component to another, or to a sink",
)

event: Final = sa.Table(
    "event",
    metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True, comment="later ones are higher"),
    incarnation(key=False),
    must("at", _time, "when it was recorded"),
    must("kind", sa.Text, "what happened"),
    may("action", sa.Text, "what an operator decided"),
    may("txid", sa.BigInteger, "of the batch, where it is about one"),
    may("attempt", sa.Integer, "of the batch's attempt"),
    may("sink", sa.Text, "name of the sink, where it is about one"),
    may("message", sa.Text, "a message's id as people see it"),
    may("number", sa.BigInteger, "a message's number in its source"),
    may("origin", sa.BigInteger, "what the source shows before the number"),
    may("token", sa.BigInteger, "the message's token in that attempt"),
    may("reason", sa.Text, "in a word, or a short phrase"),
    may("component", sa.Text, "where the message failed"),
    may("error", sa.Text, "class and text of the exception"),
    may("input", sa.Text, "the beginning of the message's payload"),
    may("detail", _json, "what else there is to know of this kind of event"),
    known("action", OperatorAction),
    sa.Index(None, "incarnation", "txid"),
    sa.Index(None, "incarnation", "message"),
    sa.Index(None, "incarnation", "kind", "id"),
    sa.Index(
        "ix_event_why_again",
        "incarnation",
        "message",
        "id",
        postgresql_where=sa.text("kind in ('failure', 'returned')"),
    ),
    known("kind", EventKind),
    comment="append-only: failures, replays, suppressed duplicates, recoveries, operator actions",
)

reject: Final = sa.Table(
    "reject",
    metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True, comment="later ones are higher"),
    incarnation(key=False),
    must("txid", sa.BigInteger, "the batch in which the sink rejected it"),
    must("sink", sa.Text, "name of the sink"),
    may("message", sa.Text, "a message's id as people see it; null: a row of no single message"),
    may("number", sa.BigInteger, "the message's number in its source"),
    may("origin", sa.BigInteger, "what the source shows before the number"),
    must("rows", sa.BigInteger, "of the message, which the sink does not hold"),
    may("sqlstate", sa.Text, "null: not refused by an error of Postgres"),
    must("error", sa.Text, "why the table refuses the row"),
    must("row", sa.Text, "the refused row, as JSON"),
    may("payload", sa.LargeBinary, "the message's; null where its source gives none"),
    must("at", _time, "when the batch was committed"),
    must("state", sa.Text, "open, retrying, retried or dropped"),
    may("decided_by", sa.Text, "who decided"),
    may("decided_why", sa.Text, "why, in that person's words"),
    may("decided_at", _time, "when"),
    may("retried_in", sa.BigInteger, "the txid that wrote it anew to the sink, or rejected it again"),
    may("digest", sa.LargeBinary, "SHA-256 of payload and row when the message was set aside"),
    known("state", RejectState),
    sa.CheckConstraint("(state = 'open') = (decided_at is null)", name="decided"),
    sa.CheckConstraint("(state = 'retried') = (retried_in is not null)", name="retried"),
    sa.Index(None, "incarnation", "txid", "sink"),
    sa.Index(None, "incarnation", "message"),
    sa.Index("ix_reject_open", "incarnation", postgresql_where=sa.text("state = 'open'")),
    comment="messages that a sink does not hold, since its table refuses a row of theirs; removed with their topology alone",
)

graph: Final = sa.Table(
    "graph",
    metadata,
    incarnation(refers=True),
    key("epoch", sa.BigInteger, "the first run of this shape"),
    must("after_txid", sa.BigInteger, "the highest txid that was allotted before"),
    must("fingerprint", sa.Text, "hash of the graph's shape, names and schemas"),
    must("description", _json, "source, components, sinks with their schemas"),
    must("at", _time, "when that run began"),
    comment="one row each time that a topology's graph or its sinks changed",
)

prune: Final = sa.Table(
    "prune",
    metadata,
    incarnation(refers=True),
    key("upto", sa.BigInteger, "nothing up to here is complete"),
    must("at", _time, "when"),
    must("by", sa.Text, "who"),
    must("ended_before", _time, "the horizon that was asked for"),
    must("removed", _json, "number of rows by table"),
    may("why", sa.Text, "why, in that person's words"),
    comment="one row a prune: how far the ledger's own record was cut, when and by whom",
)

verdict: Final = sa.Table(
    "verdict",
    metadata,
    sa.Column(
        "id",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        sa.Identity(always=True),
        primary_key=True,
        comment="later ones are higher",
    ),
    incarnation(key=False, refers=True),
    must("at", _time, "when the check ended"),
    must("by", sa.Text, "who ran it"),
    must("verdict", sa.Text, "clean, violation, cannot_tell or not_compared: of the scope alone"),
    must("first_txid", sa.BigInteger, "the first batch that was checked"),
    may("last_txid", sa.BigInteger, "null: there was none"),
    must("pruned_upto", sa.BigInteger, "batches up to here were no longer on record, and were not checked"),
    must("violations", sa.BigInteger, "how many things were wrong"),
    must("unknowns", sa.BigInteger, "how many questions the evidence left open"),
    must("notices", sa.BigInteger, "how many things there were to know"),
    must("kinds", _json, "violations and notices, counted by kind"),
    must("txids", sa.BigInteger, "batches that were checked"),
    must("sinks", sa.BigInteger, "sinks that were checked"),
    must("evidence", sa.BigInteger, "entries of the sinks' own records that were compared"),
    must("messages", sa.BigInteger, "openings of messages that were checked"),
    must("took_ms", sa.BigInteger, "how long the check took, in milliseconds"),
    must("deep", sa.Boolean, "whether the rows of the sinks' tables were compared, too", server_default=sa.false()),
    may(
        "tables",
        _json,
        "how the tables were read: of which sinks, and whether other writers may add rows; null: they were not",
    ),
    may("basis", sa.BigInteger, "number of the verdict that it continues (--since last); null: it stands by itself"),
    may(
        "chain_from",
        sa.BigInteger,
        "the first batch that it covers, together with the clean verdicts that it continues",
    ),
    may("settled_upto", sa.BigInteger, "the next one may begin behind this batch; null: none may continue it"),
    may("furthest", _json, "the batches that had read furthest into the source by then"),
    known("verdict", Verdict),
    sa.Index(None, "incarnation", "id"),
    sa.CheckConstraint("(verdict = 'violation') = (violations > 0)", name="violations"),
    comment="one row a run of audit verify: what it looked at and what it found",
)

confirmation: Final = sa.Table(
    "confirmation",
    metadata,
    key("digest", sa.Text, "SHA-256 of the form's secret"),
    incarnation(key=False, refers=True),
    must("action", sa.Text, "the decision, by its name on the page"),
    must("by", sa.Text, "who decided"),
    must("at", _time, "when"),
    must("click", sa.Text, "tells one sending of the form from another"),
    sa.Index(None, "incarnation", "at"),
    comment="forms of the page that were confirmed: each is good for one decision, whichever process gets it",
)

forgotten: Final = sa.Table(
    "forgotten",
    metadata,
    sa.Column("number", _serial, primary_key=True, autoincrement=True, comment="later ones are higher"),
    must("what", sa.Text, "topology, or subscription: of a queue"),
    must("name", sa.Text, "the topology's, or the queue's"),
    must("life", sa.Text, "the topology's incarnation, or the subscription"),
    must("at", _time, "when"),
    must("by", sa.Text, "who"),
    must("why", sa.Text, "why, in that person's words"),
    must("removed", _json, "rows that were removed, by table"),
    must("kept", _json, "what stayed outside of the ledger, as it was shown"),
    sa.CheckConstraint("what in ('topology', 'subscription')", name="what_known"),
    sa.Index(None, "life"),
    comment="one row a topology or subscription that an operator had the ledger forget",
)


T = TypeVar("T")

NO_LIFE: Final = "dry-run"
"""Stands for the life that a first start would make; no life is called so."""


# ---- rows, as they are read


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
