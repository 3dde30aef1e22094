"""The ledger's tables.

A message that succeeds at the first attempt has no row of its own; every failure, replay, suppression, reject and operator
action is an append-only row of `event`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from stormproof.trident.transaction_states import (
    ComponentKind,
    OperatorAction,
    RejectState,
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


def _known(column: str, values: type[StrEnum]) -> sa.CheckConstraint:
    """A check constraint: the column has one of the enum's values."""
    return sa.CheckConstraint(f"{column} in ({', '.join(repr(one.value) for one in values)})", name=f"{column}_known")


topology: Final = sa.Table(
    "topology",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.Text, nullable=False, unique=True, comment="one life of this name"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="one run of its driver; fences older ones"),
    sa.Column("fingerprint", sa.Text, nullable=False, comment="hash of the graph's shape, names and schemas"),
    sa.Column("guarantee", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("created_at", _time, nullable=False),
    sa.Column("started_at", _time, nullable=False, comment="of the present epoch"),
    sa.Column("driver_host", sa.Text, nullable=False),
    sa.Column("driver_pid", sa.BigInteger, nullable=False),
    sa.Column("driver_started", sa.Double, nullable=False, comment="start of that process, seconds since 1970"),
    sa.Column("stopped_at", _time, comment="set when the driver of the present epoch ended in order"),
    comment="one row a topology: the fence that every transaction locks first",
)

backend: Final = sa.Table(
    "backend",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("pid", sa.BigInteger, primary_key=True),
    sa.Column("started_at", _time, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    comment="server processes of a driver's connections; a take-over ends those of older epochs",
)

topology_sink: Final = sa.Table(
    "topology_sink",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("sink", sa.Text, primary_key=True),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("table_id", sa.Text, nullable=False),
    sa.Column("description", _json, comment="how to open it for inspection; no secrets"),
    sa.Column("first_at", _time, nullable=False),
    comment="the table behind each sink",
)

txn: Final = sa.Table(
    "txn",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("guarantee", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="of the driver that opened it"),
    sa.Column("attempt", sa.Integer, nullable=False, comment="the latest; the one that counts once prepared"),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("position", _json, nullable=False, comment="the slice, as its source describes it"),
    sa.Column("messages", sa.BigInteger, nullable=False, comment="opened"),
    sa.Column("failed", sa.BigInteger, nullable=False, server_default="0", comment="messages that failed in it"),
    sa.Column("returned", sa.BigInteger, nullable=False, server_default="0", comment="went back with failed ones"),
    sa.Column("rejected", sa.BigInteger, nullable=False, server_default="0", comment="messages that a sink rejected"),
    sa.Column("tuples", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("retry", sa.Boolean, nullable=False, comment="its messages failed before"),
    sa.Column("opened_at", _time, nullable=False),
    sa.Column("prepared_at", _time),
    sa.Column("ended_at", _time),
    sa.Column("cause", sa.Text, comment="kind of the reason why it is blocked, aborted or abandoned"),
    sa.Column("reason", sa.Text, comment="the same in words"),
    sa.Column("steps_ms", _json, comment="how long each step took"),
    sa.Column("tuning", _json, comment="how batches were to be when it was opened"),
    _known("state", TxnState),
    _known("cause", TxnCause),
    sa.Index("ix_txn_unresolved", "incarnation", "txid", postgresql_where=sa.text("ended_at is null")),
    comment="one row a batch",
)

attempt: Final = sa.Table(
    "attempt",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("excluded", _json, nullable=False, comment="numbers of the messages left out"),
    sa.Column("expected_messages", sa.BigInteger, nullable=False),
    sa.Column("expected_xor", sa.BigInteger, nullable=False),
    sa.Column("started_at", _time, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False, comment="running, complete, job_failed, unverified, moot, dead"),
    sa.Column("error", sa.Text),
    comment="one try at a batch, written before its job runs",
)

txn_sink: Final = sa.Table(
    "txn_sink",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("sink", sa.Text, primary_key=True),
    sa.Column("previous", sa.BigInteger, comment="the txid that the sink must hold before"),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("files", _json, nullable=False),
    sa.Column("committed_at", _time, comment="set once the sink is known to hold it"),
    sa.Column("outcome", sa.Text, comment="applied, already_held, held_unfinished, skipped"),
    sa.Column(
        "superseded",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="rows of an upsert that changed nothing: a later one of their key was there",
    ),
    sa.Column("left_out", _json, comment="refused rows of groups, whose messages its files have nothing of"),
    sa.Column(
        "version", sa.BigInteger, comment="the table's version that has it; null: it has none, or that is not known"
    ),
    sa.Index("ix_txn_sink_held", "incarnation", "sink", "txid", postgresql_where=sa.text("committed_at is not null")),
    sa.Index("ix_txn_sink_superseded", "incarnation", "sink", "superseded", postgresql_where=sa.text("superseded > 0")),
    comment="what each batch writes to each sink, fixed before any sink is touched",
)

txn_component: Final = sa.Table(
    "txn_component",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("component", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("at", _time, nullable=False),
    sa.Column(
        "executed",
        sa.BigInteger,
        nullable=False,
        comment="tuples that it took in; of a spout, messages that were read; of the acker, acks",
    ),
    sa.Column(
        "emitted", sa.BigInteger, nullable=False, comment="tuples that it made; of the acker, messages with a verdict"
    ),
    sa.Column(
        "acked",
        sa.BigInteger,
        nullable=False,
        comment="tuples that it took in and did not fail; of spout and acker, messages that were complete",
    ),
    sa.Column(
        "failed",
        sa.BigInteger,
        nullable=False,
        comment="messages that failed in it; of a spout and the acker, anywhere",
    ),
    sa.Column("busy_ms", sa.Double, nullable=False, comment="time that it took, over all tasks"),
    _known("kind", ComponentKind),
    comment="what each component did in the attempt that fixed a batch's content; an attempt before it has no row",
)

txn_edge: Final = sa.Table(
    "txn_edge",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("origin", sa.Text, primary_key=True),
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("tuples", sa.BigInteger, nullable=False),
    comment="how many tuples of that attempt went from one component to another, or to a sink",
)

event: Final = sa.Table(
    "event",
    metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("at", _time, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("action", sa.Text, comment="what an operator decided"),
    sa.Column("txid", sa.BigInteger),
    sa.Column("attempt", sa.Integer),
    sa.Column("sink", sa.Text),
    sa.Column("message", sa.Text, comment="a message's id as people see it"),
    sa.Column("number", sa.BigInteger, comment="a message's number in its source"),
    sa.Column("origin", sa.BigInteger),
    sa.Column("token", sa.BigInteger),
    sa.Column("reason", sa.Text),
    sa.Column("component", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("input", sa.Text),
    sa.Column("detail", _json),
    _known("action", OperatorAction),
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
    comment="append-only: failures, replays, suppressed duplicates, recoveries, operator actions",
)

reject: Final = sa.Table(
    "reject",
    metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("txid", sa.BigInteger, nullable=False),
    sa.Column("sink", sa.Text, nullable=False),
    sa.Column("message", sa.Text, comment="a message's id as people see it; null: a row of no single message"),
    sa.Column("number", sa.BigInteger),
    sa.Column("origin", sa.BigInteger),
    sa.Column("rows", sa.BigInteger, nullable=False, comment="of the message, which the sink does not hold"),
    sa.Column("sqlstate", sa.Text, comment="null: not refused by an error of Postgres"),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("row", sa.Text, nullable=False, comment="the refused row, as JSON"),
    sa.Column("payload", sa.LargeBinary, comment="the message's; null where its source gives none"),
    sa.Column("at", _time, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("decided_by", sa.Text),
    sa.Column("decided_why", sa.Text),
    sa.Column("decided_at", _time),
    sa.Column("retried_in", sa.BigInteger, comment="the txid that wrote it anew to the sink, or rejected it again"),
    sa.Column("digest", sa.LargeBinary, comment="SHA-256 of payload and row when the message was set aside"),
    _known("state", RejectState),
    sa.CheckConstraint("(state = 'open') = (decided_at is null)", name="decided"),
    sa.CheckConstraint("(state = 'retried') = (retried_in is not null)", name="retried"),
    sa.Index(None, "incarnation", "txid", "sink"),
    sa.Index(None, "incarnation", "message"),
    sa.Index("ix_reject_open", "incarnation", postgresql_where=sa.text("state = 'open'")),
    comment="messages that a sink does not hold, since its table refuses a row of theirs; never removed by the library",
)

graph: Final = sa.Table(
    "graph",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False, comment="the first run of this shape"),
    sa.Column("after_txid", sa.BigInteger, nullable=False, comment="the highest txid that was allotted before"),
    sa.Column("fingerprint", sa.Text, nullable=False),
    sa.Column("description", _json, nullable=False, comment="source, components, sinks with their schemas"),
    sa.Column("at", _time, nullable=False),
    comment="one row each time that a topology's graph or its sinks changed",
)

prune: Final = sa.Table(
    "prune",
    metadata,
    sa.Column("incarnation", sa.Text, primary_key=True),
    sa.Column("upto", sa.BigInteger, primary_key=True, autoincrement=False, comment="nothing up to here is complete"),
    sa.Column("at", _time, nullable=False),
    sa.Column("by", sa.Text, nullable=False),
    sa.Column("ended_before", _time, nullable=False, comment="the horizon that was asked for"),
    sa.Column("removed", _json, nullable=False, comment="number of rows by table"),
    sa.Column("why", sa.Text),
    comment="one row a prune: how far the ledger's own record was cut, when and by whom",
)

verdict: Final = sa.Table(
    "verdict",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(always=True), primary_key=True),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("at", _time, nullable=False),
    sa.Column("by", sa.Text, nullable=False),
    sa.Column("verdict", sa.Text, nullable=False),
    sa.Column("first_txid", sa.BigInteger, nullable=False),
    sa.Column("last_txid", sa.BigInteger, comment="null: there was none"),
    sa.Column("pruned_upto", sa.BigInteger, nullable=False),
    sa.Column("violations", sa.BigInteger, nullable=False),
    sa.Column("unknowns", sa.BigInteger, nullable=False),
    sa.Column("notices", sa.BigInteger, nullable=False),
    sa.Column("kinds", _json, nullable=False, comment="violations and notices, counted by kind"),
    sa.Column("txids", sa.BigInteger, nullable=False),
    sa.Column("sinks", sa.BigInteger, nullable=False),
    sa.Column("evidence", sa.BigInteger, nullable=False),
    sa.Column("messages", sa.BigInteger, nullable=False),
    sa.Column("took_ms", sa.BigInteger, nullable=False),
    sa.Column(
        "deep",
        sa.Boolean,
        nullable=False,
        server_default=sa.false(),
        comment="whether the rows of the sinks' tables were compared, too",
    ),
    sa.Column(
        "tables",
        _json,
        comment="how the tables were read: of which sinks, and whether other writers may add rows; null: they were not",
    ),
    sa.Column(
        "basis",
        sa.BigInteger,
        comment="number of the verdict that it continues (--since last); null: it stands by itself",
    ),
    sa.Column(
        "chain_from",
        sa.BigInteger,
        comment="the first batch that it covers, together with the clean verdicts that it continues",
    ),
    sa.Column(
        "settled_upto",
        sa.BigInteger,
        comment="the next one may begin behind this batch; null: none may continue it",
    ),
    sa.Column("furthest", _json, comment="the batches that had read furthest into the source by then"),
    _known("verdict", Verdict),
    sa.Index(None, "incarnation", "id"),
    comment="one row a run of audit verify: what it looked at and what it found",
)

confirmation: Final = sa.Table(
    "confirmation",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True, comment="SHA-256 of the form's secret"),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False, comment="the decision, by its name on the page"),
    sa.Column("by", sa.Text, nullable=False),
    sa.Column("at", _time, nullable=False),
    sa.Column("click", sa.Text, nullable=False, comment="tells one sending of the form from another"),
    sa.Index(None, "incarnation", "at"),
    comment="forms of the page that were confirmed: each is good for one decision, whichever process gets it",
)
