"""Rows of the version before, whose causes and decisions stood in prose, get the typed columns that the prose means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.config import Config

from stormproof import migrations
from stormproof.core.postgres.database import Database
from stormproof.migrations import migrate
from stormproof.trident.audit import AuditLedger
from stormproof.trident.audit.source import is_taken
from stormproof.trident.transaction_states import EventKind, OperatorAction, TxnCause

pytestmark = pytest.mark.postgres

CAUSES: list[tuple[str, str | None, TxnCause | None]] = [
    ("aborted", "every message failed", TxnCause.EVERY_MESSAGE_FAILED),
    ("aborted", "in flight when its driver ended", TxnCause.DRIVER_ENDED),
    ("abandoned", "in flight when its driver ended", TxnCause.DRIVER_ENDED),
    (
        "aborted",
        "in flight when its driver ended; set apart what was in hand: 3 messages",
        TxnCause.DRIVER_ENDED,
    ),
    ("aborted", "halved after job_failed: a worker died", TxnCause.JOB_FAILED),
    ("aborted", "2 suspects set apart after job_failed: after unverified: x", TxnCause.JOB_FAILED),
    ("aborted", "halved after unverified: 3 rows too many", TxnCause.UNVERIFIED),
    ("aborted", "halved after moot: 1 messages failed", TxnCause.MOOT),
    ("abandoned", "job_failed: a worker died", TxnCause.JOB_FAILED),
    ("abandoned", "unverified: 3 rows too many", TxnCause.UNVERIFIED),
    ("blocked", "sink 's': sink 's': file lost: version 3 holds txid 2, but a.parquet is missing", TxnCause.FILE_LOST),
    ("blocked", "sink 's': 1 of 2 prepared files are not as prepared: a is missing; nothing", TxnCause.FILE_LOST),
    ("blocked", "sink 's': the prepared file a is missing; nothing was written; put it back", TxnCause.FILE_LOST),
    ("blocked", "sink 's': table public.t: there is no such table, it is gone", TxnCause.TABLE_GONE),
    ("blocked", "sink 's': sink 's' (delta /t): the table is gone: no log", TxnCause.TABLE_GONE),
    ("blocked", "sink 's': sink 's' (delta /t): there is no Delta table: no log", TxnCause.TABLE_GONE),
    ("blocked", "sink 's': a value breaks a constraint", TxnCause.SINK_REFUSED),
    ("aborted", "Every message failed, as somebody wrote by hand", TxnCause.OTHER),
    ("abandoned", "every message failed", TxnCause.OTHER),
    ("blocked", "by hand", TxnCause.OTHER),
    ("aborted", None, None),
    ("committed", None, None),
    ("open", None, None),
]
"""State and reason as the version before has them, and the cause that they mean."""

ACTIONS: list[tuple[str | None, str | None, OperatorAction]] = [
    ("retry by ann", '{"action": "retry"}', OperatorAction.RETRY),
    ("skip by ann", '{"action": "skip"}', OperatorAction.SKIP),
    ("skip rows by ann", '{"action": "skip_rows"}', OperatorAction.SKIP_ROWS),
    ("adopted", '{"action": "adopt"}', OperatorAction.ADOPT),
    ("adopt table by ann", '{"action": "adopt_table"}', OperatorAction.ADOPT_TABLE),
    ("accepted_loss", '{"upto": 3}', OperatorAction.ACCEPT_LOSS),
    ("release table by ann", '{"action": "release_table"}', OperatorAction.RELEASE_TABLE),
    ("accept_change", '{"action": "accept_change"}', OperatorAction.ACCEPT_CHANGE),
    ("goes on from q:3, which follows q:1", '{"action": "adopt_stream"}', OperatorAction.ADOPT_STREAM),
    ("adopt queue q by ann", '{"action": "adopt queue"}', OperatorAction.ADOPT_QUEUE),
    ("by hand", '{"action": "adopt"}', OperatorAction.OTHER),
    ("by hand", None, OperatorAction.OTHER),
    (None, None, OperatorAction.OTHER),
]
"""Reason and detail of an operator's event as the version before has them, and the decision that they mean."""


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    """A database of the version before."""
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with engine.begin() as connection:
        connection.execute(sa.text("create schema stormproof"))
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0009")
    yield engine
    engine.dispose()


def test_causes_and_decisions_of_the_version_before_are_mapped(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position,"
                " messages, bytes, retry, opened_at, reason)"
                " values ('life', :txid, :state, 'exactly-once', 1, 1, 'q', '{}', 1, 1, false, now(), :reason)"
            ),
            [{"txid": txid, "state": state, "reason": why} for txid, (state, why, _) in enumerate(CAUSES, 1)],
        )
        insert = sa.text(
            "insert into stormproof.event (incarnation, at, kind, txid, reason, detail)"
            " values ('life', now(), :kind, :txid, :reason, cast(:detail as jsonb))"
        )
        rows = [("operator", reason, detail) for reason, detail, _ in ACTIONS] + [("attempt_failed", "adopted", None)]
        connection.execute(
            insert,
            [{"kind": kind, "txid": n, "reason": why, "detail": d} for n, (kind, why, d) in enumerate(rows, 1)],
        )
    assert migrate(engine).up_to_date
    with AuditLedger(engine).snapshot() as snapshot:
        txns = snapshot.txns("life")
        decisions = snapshot.events("life", [EventKind.OPERATOR])
        (failed,) = snapshot.events("life", [EventKind.ATTEMPT_FAILED])
        assert not snapshot.unreadable
    assert [(txn.state.value, txn.reason, txn.cause) for txn in txns] == CAUSES
    assert [(e.reason, e.action) for e in decisions] == [(reason, action) for reason, _, action in ACTIONS]
    assert failed.action is None
    aborted = [txn.txid for txn in txns if txn.state.value == "aborted" and is_taken(txn)]
    assert aborted == [1], "the messages of this one alone left the source for good"


def test_the_database_knows_every_cause_and_decision_and_no_other(engine: sa.Engine) -> None:
    migrate(engine)
    query = "select conname, pg_get_constraintdef(oid) from pg_constraint where conname like '%_known'"
    with engine.connect() as connection:
        checks = {str(name): str(text) for name, text in connection.execute(sa.text(query))}
    for name, values in (("ck_txn_cause_known", TxnCause), ("ck_event_action_known", OperatorAction)):
        assert set(checks[name].split("'")[1::2]) == {one.value for one in values}
