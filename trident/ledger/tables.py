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
    sa.Column("name", sa.Text, primary_key=True, comment="as the program names it"),
    sa.Column("incarnation", sa.Text, nullable=False, unique=True, comment="one life of this name"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="one run of its driver; fences older ones"),
    sa.Column("fingerprint", sa.Text, nullable=False, comment="hash of the graph's shape, names and schemas"),
    sa.Column("guarantee", sa.Text, nullable=False, comment="of the newest run"),
    sa.Column("source", sa.Text, nullable=False, comment="what the topology reads; it cannot change"),
    sa.Column("created_at", _time, nullable=False, comment="first start"),
    sa.Column("started_at", _time, nullable=False, comment="of the present epoch"),
    sa.Column("driver_host", sa.Text, nullable=False, comment="of the present epoch's driver"),
    sa.Column("driver_pid", sa.BigInteger, nullable=False, comment="its process there"),
    sa.Column("driver_started", sa.Double, nullable=False, comment="start of that process, seconds since 1970"),
    sa.Column("stopped_at", _time, comment="set when the driver of the present epoch ended in order"),
    comment="one row a topology: the fence that every transaction locks first",
)

backend: Final = sa.Table(
    "backend",
    metadata,
    incarnation(refers=True),
    sa.Column("pid", sa.BigInteger, primary_key=True, comment="of the server process"),
    sa.Column("started_at", _time, primary_key=True, comment="of the server process: pids come again"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="of the driver whose connection it is"),
    comment="server processes of a driver's connections; a take-over ends those of older epochs",
)

topology_sink: Final = sa.Table(
    "topology_sink",
    metadata,
    incarnation(refers=True),
    sa.Column("sink", sa.Text, primary_key=True, comment="name of the sink"),
    sa.Column("target", sa.Text, nullable=False, comment="the table, as the sink names it"),
    sa.Column("table_id", sa.Text, nullable=False, comment="what tells the table from another one of its name"),
    sa.Column("description", _json, comment="how to open it for inspection; no secrets"),
    sa.Column("first_at", _time, nullable=False, comment="when the sink was bound to it"),
    comment="the table behind each sink",
)

txn: Final = sa.Table(
    "txn",
    metadata,
    incarnation(refers=True),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False, comment="from 1, without gaps"),
    sa.Column("state", sa.Text, nullable=False, comment="open, prepared, blocked, committed, aborted or abandoned"),
    sa.Column("guarantee", sa.Text, nullable=False, comment="under which it ran"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="of the driver that opened it"),
    sa.Column("attempt", sa.Integer, nullable=False, comment="the latest; the one that counts once prepared"),
    sa.Column("source", sa.Text, nullable=False, comment="where its messages are from"),
    sa.Column("position", _json, nullable=False, comment="the slice, as its source describes it"),
    sa.Column("messages", sa.BigInteger, nullable=False, comment="opened"),
    sa.Column("failed", sa.BigInteger, nullable=False, server_default="0", comment="messages that failed in it"),
    sa.Column("returned", sa.BigInteger, nullable=False, server_default="0", comment="went back with failed ones"),
    sa.Column("rejected", sa.BigInteger, nullable=False, server_default="0", comment="messages that a sink rejected"),
    sa.Column("tuples", sa.BigInteger, nullable=False, server_default="0", comment="that its components passed on"),
    sa.Column("bytes", sa.BigInteger, nullable=False, comment="of its messages"),
    sa.Column("retry", sa.Boolean, nullable=False, comment="its messages failed before"),
    sa.Column("opened_at", _time, nullable=False, comment="when its messages were leased"),
    sa.Column("prepared_at", _time, comment="when its content was fixed"),
    sa.Column("ended_at", _time, comment="when it was committed, aborted or abandoned"),
    sa.Column("cause", sa.Text, comment="kind of the reason why it is blocked, aborted or abandoned"),
    sa.Column("reason", sa.Text, comment="the same in words"),
    sa.Column("steps_ms", _json, comment="how long each step took"),
    sa.Column("tuning", _json, comment="how batches were to be when it was opened"),
    known("state", TxnState),
    known("cause", TxnCause),
    sa.Index("ix_txn_unresolved", "incarnation", "txid", postgresql_where=sa.text("ended_at is null")),
    sa.CheckConstraint("txid >= 1 and epoch >= 1 and attempt >= 1", name="numbers"),
    sa.CheckConstraint("(ended_at is not null) = (state in ('committed', 'aborted', 'abandoned'))", name="ended"),
    sa.CheckConstraint("prepared_at is not null or state not in ('prepared', 'blocked', 'committed')", name="prepared"),
    sa.CheckConstraint(
        "cause is not null and reason is not null or state not in ('blocked', 'aborted', 'abandoned')", name="explained"
    ),
    sa.CheckConstraint("failed >= 0 and returned >= 0 and rejected >= 0", name="counts"),
    comment="one row a batch",
)

attempt: Final = sa.Table(
    "attempt",
    metadata,
    incarnation(),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False, comment="of the batch"),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False, comment="from 1"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="of the driver that began it"),
    sa.Column("seed", sa.BigInteger, nullable=False, comment="from which the tuples' random numbers are drawn"),
    sa.Column("excluded", _json, nullable=False, comment="numbers of the messages left out"),
    sa.Column("expected_messages", sa.BigInteger, nullable=False, comment="the batch's, less those left out"),
    sa.Column(
        "expected_xor",
        sa.BigInteger,
        nullable=False,
        comment="of these messages' tokens; the acker must come to the same",
    ),
    sa.Column("started_at", _time, nullable=False, comment="when its job was begun"),
    sa.Column("outcome", sa.Text, nullable=False, comment="running, complete, job_failed, unverified, moot, dead"),
    sa.Column("error", sa.Text, comment="why it failed"),
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
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False, comment="of the batch"),
    sa.Column("sink", sa.Text, primary_key=True, comment="name of the sink"),
    sa.Column("previous", sa.BigInteger, comment="the txid that the sink must hold before"),
    sa.Column("rows", sa.BigInteger, nullable=False, comment="that its files have"),
    sa.Column("bytes", sa.BigInteger, nullable=False, comment="that its files have"),
    sa.Column(
        "digest", sa.Text, nullable=False, comment="SHA-256 over the files' rows, digests, partitions and misfits"
    ),
    sa.Column("files", _json, nullable=False, comment="the prepared files, each with rows, bytes and digest"),
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
    known("outcome", SinkOutcome),
    sa.CheckConstraint("rows >= 0 and bytes >= 0 and superseded >= 0", name="counts"),
    comment="what each batch writes to each sink, fixed before any sink is touched",
)

txn_component: Final = sa.Table(
    "txn_component",
    metadata,
    incarnation(),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False, comment="of the batch"),
    sa.Column("component", sa.Text, primary_key=True, comment="name of the component or sink; __acker is the tracking"),
    sa.Column("kind", sa.Text, nullable=False, comment="spout, operation, bolt, aggregate, join, sink or acker"),
    sa.Column(
        "at",
        _time,
        nullable=False,
        comment="when the batch's content was fixed; of one whose messages all failed, when it ended",
    ),
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
    known("kind", ComponentKind),
    comment="what each component did in the attempt that fixed a batch's content; an attempt before it has no row",
)

txn_edge: Final = sa.Table(
    "txn_edge",
    metadata,
    incarnation(),
    sa.Column("txid", sa.BigInteger, primary_key=True, autoincrement=False, comment="of the batch"),
    sa.Column("origin", sa.Text, primary_key=True, comment="component that emitted them"),
    sa.Column("stream", sa.Text, primary_key=True, comment="stream that they were emitted to"),
    sa.Column("target", sa.Text, primary_key=True, comment="component or sink that took them"),
    sa.Column("tuples", sa.BigInteger, nullable=False, comment="how many; each copy that a grouping makes counts"),
    comment="how many tuples of that attempt went from one component to another, or to a sink",
)

event: Final = sa.Table(
    "event",
    metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True, comment="later ones are higher"),
    incarnation(key=False),
    sa.Column("at", _time, nullable=False, comment="when it was recorded"),
    sa.Column("kind", sa.Text, nullable=False, comment="what happened"),
    sa.Column("action", sa.Text, comment="what an operator decided"),
    sa.Column("txid", sa.BigInteger, comment="of the batch, where it is about one"),
    sa.Column("attempt", sa.Integer, comment="of the batch's attempt"),
    sa.Column("sink", sa.Text, comment="name of the sink, where it is about one"),
    sa.Column("message", sa.Text, comment="a message's id as people see it"),
    sa.Column("number", sa.BigInteger, comment="a message's number in its source"),
    sa.Column("origin", sa.BigInteger, comment="what the source shows before the number"),
    sa.Column("token", sa.BigInteger, comment="the message's token in that attempt"),
    sa.Column("reason", sa.Text, comment="in a word, or a short phrase"),
    sa.Column("component", sa.Text, comment="where the message failed"),
    sa.Column("error", sa.Text, comment="class and text of the exception"),
    sa.Column("input", sa.Text, comment="the beginning of the message's payload"),
    sa.Column("detail", _json, comment="what else there is to know of this kind of event"),
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
    sa.Column("txid", sa.BigInteger, nullable=False, comment="the batch in which the sink rejected it"),
    sa.Column("sink", sa.Text, nullable=False, comment="name of the sink"),
    sa.Column("message", sa.Text, comment="a message's id as people see it; null: a row of no single message"),
    sa.Column("number", sa.BigInteger, comment="the message's number in its source"),
    sa.Column("origin", sa.BigInteger, comment="what the source shows before the number"),
    sa.Column("rows", sa.BigInteger, nullable=False, comment="of the message, which the sink does not hold"),
    sa.Column("sqlstate", sa.Text, comment="null: not refused by an error of Postgres"),
    sa.Column("error", sa.Text, nullable=False, comment="why the table refuses the row"),
    sa.Column("row", sa.Text, nullable=False, comment="the refused row, as JSON"),
    sa.Column("payload", sa.LargeBinary, comment="the message's; null where its source gives none"),
    sa.Column("at", _time, nullable=False, comment="when the batch was committed"),
    sa.Column("state", sa.Text, nullable=False, comment="open, retrying, retried or dropped"),
    sa.Column("decided_by", sa.Text, comment="who decided"),
    sa.Column("decided_why", sa.Text, comment="why, in that person's words"),
    sa.Column("decided_at", _time, comment="when"),
    sa.Column("retried_in", sa.BigInteger, comment="the txid that wrote it anew to the sink, or rejected it again"),
    sa.Column("digest", sa.LargeBinary, comment="SHA-256 of payload and row when the message was set aside"),
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
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False, comment="the first run of this shape"),
    sa.Column("after_txid", sa.BigInteger, nullable=False, comment="the highest txid that was allotted before"),
    sa.Column("fingerprint", sa.Text, nullable=False, comment="hash of the graph's shape, names and schemas"),
    sa.Column("description", _json, nullable=False, comment="source, components, sinks with their schemas"),
    sa.Column("at", _time, nullable=False, comment="when that run began"),
    comment="one row each time that a topology's graph or its sinks changed",
)

prune: Final = sa.Table(
    "prune",
    metadata,
    incarnation(refers=True),
    sa.Column("upto", sa.BigInteger, primary_key=True, autoincrement=False, comment="nothing up to here is complete"),
    sa.Column("at", _time, nullable=False, comment="when"),
    sa.Column("by", sa.Text, nullable=False, comment="who"),
    sa.Column("ended_before", _time, nullable=False, comment="the horizon that was asked for"),
    sa.Column("removed", _json, nullable=False, comment="number of rows by table"),
    sa.Column("why", sa.Text, comment="why, in that person's words"),
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
    sa.Column("at", _time, nullable=False, comment="when the check ended"),
    sa.Column("by", sa.Text, nullable=False, comment="who ran it"),
    sa.Column(
        "verdict", sa.Text, nullable=False, comment="clean, violation, cannot_tell or not_compared: of the scope alone"
    ),
    sa.Column("first_txid", sa.BigInteger, nullable=False, comment="the first batch that was checked"),
    sa.Column("last_txid", sa.BigInteger, comment="null: there was none"),
    sa.Column(
        "pruned_upto",
        sa.BigInteger,
        nullable=False,
        comment="batches up to here were no longer on record, and were not checked",
    ),
    sa.Column("violations", sa.BigInteger, nullable=False, comment="how many things were wrong"),
    sa.Column("unknowns", sa.BigInteger, nullable=False, comment="how many questions the evidence left open"),
    sa.Column("notices", sa.BigInteger, nullable=False, comment="how many things there were to know"),
    sa.Column("kinds", _json, nullable=False, comment="violations and notices, counted by kind"),
    sa.Column("txids", sa.BigInteger, nullable=False, comment="batches that were checked"),
    sa.Column("sinks", sa.BigInteger, nullable=False, comment="sinks that were checked"),
    sa.Column(
        "evidence", sa.BigInteger, nullable=False, comment="entries of the sinks' own records that were compared"
    ),
    sa.Column("messages", sa.BigInteger, nullable=False, comment="openings of messages that were checked"),
    sa.Column("took_ms", sa.BigInteger, nullable=False, comment="how long the check took, in milliseconds"),
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
    known("verdict", Verdict),
    sa.Index(None, "incarnation", "id"),
    sa.CheckConstraint("(verdict = 'violation') = (violations > 0)", name="violations"),
    comment="one row a run of audit verify: what it looked at and what it found",
)

confirmation: Final = sa.Table(
    "confirmation",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True, comment="SHA-256 of the form's secret"),
    incarnation(key=False, refers=True),
    sa.Column("action", sa.Text, nullable=False, comment="the decision, by its name on the page"),
    sa.Column("by", sa.Text, nullable=False, comment="who decided"),
    sa.Column("at", _time, nullable=False, comment="when"),
    sa.Column("click", sa.Text, nullable=False, comment="tells one sending of the form from another"),
    sa.Index(None, "incarnation", "at"),
    comment="forms of the page that were confirmed: each is good for one decision, whichever process gets it",
)

forgotten: Final = sa.Table(
    "forgotten",
    metadata,
    sa.Column("number", _serial, primary_key=True, autoincrement=True, comment="later ones are higher"),
    sa.Column("what", sa.Text, nullable=False, comment="topology, or subscription: of a queue"),
    sa.Column("name", sa.Text, nullable=False, comment="the topology's, or the queue's"),
    sa.Column("life", sa.Text, nullable=False, comment="the topology's incarnation, or the subscription"),
    sa.Column("at", _time, nullable=False, comment="when"),
    sa.Column("by", sa.Text, nullable=False, comment="who"),
    sa.Column("why", sa.Text, nullable=False, comment="why, in that person's words"),
    sa.Column("removed", _json, nullable=False, comment="rows that were removed, by table"),
    sa.Column("kept", _json, nullable=False, comment="what stayed outside of the ledger, as it was shown"),
    sa.CheckConstraint("what in ('topology', 'subscription')", name="what_known"),
    sa.Index(None, "life"),
    comment="one row a topology or subscription that an operator had the ledger forget",
)
