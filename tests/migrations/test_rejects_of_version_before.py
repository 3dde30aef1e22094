"""Rows that an operator gave up in a version before are rejects in this one, dropped by whoever gave them up."""

from __future__ import annotations

from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.config import Config

from stormproof import migrations
from stormproof.core.postgres.database import Database
from stormproof.migrations import migrate
from stormproof.trident.audit import AuditLedger
from stormproof.trident.transaction_states import RejectState

pytestmark = pytest.mark.postgres


def test_rows_given_up_in_the_version_before_are_rejects(database: Database) -> None:
    engine = sa.create_engine(database.sqlalchemy_url, poolclass=sa.NullPool)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with engine.begin() as connection:
        connection.execute(sa.text("create schema stormproof"))
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0014")
    insert = sa.text(
        "insert into stormproof.event (incarnation, at, kind, txid, sink, reason, error, input, action, detail) values"
        " ('life', now(), :kind, 3, 's', :reason, :error, :input, :action, cast(:detail as jsonb))"
    )
    decided = ("operator", "skip rows by ann", None, None, "skip_rows", '{"by": "ann", "why": "known"}')
    refused = ("reject", "refused", "no", '{"n": 1}', None, '{"sqlstate": "23514", "row": 0}')
    skipped = ("reject", "skipped", "gone", '{"n": 2}', None, '{"row": 0}')
    names = ("kind", "reason", "error", "input", "action", "detail")
    with engine.begin() as connection:
        connection.execute(insert, [dict(zip(names, row, strict=True)) for row in (decided, refused, skipped)])
    assert migrate(engine).up_to_date
    with AuditLedger(engine).snapshot() as snapshot:
        (one,) = snapshot.rejects("life")
    assert (one.txid, one.sink, one.message, one.rows, one.sqlstate, one.error, one.row) == (
        *(3, "s", None, 1),
        *("23514", "no", '{"n": 1}'),
    )
    assert (one.state, one.by, one.why) == (RejectState.DROPPED, "ann", "known")
    engine.dispose()
