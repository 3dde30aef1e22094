"""`status` and `audit verify` of a source whose server redelivers: the journal against position and slices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.queues import prepared_database
from support.redelivering import ToyServer, ToySource
from support.verdicts import verified

from stormproof import PostgresSink, Topology
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.postgres.database import Database, connect
from stormproof.core.settings import Settings
from stormproof.trident.audit import AuditLedger
from stormproof.trident.audit.status import TopologyStatus, status

pytestmark = pytest.mark.postgres

MESSAGE = "stormproof.pending_message"
BEHIND = (
    f"insert into {MESSAGE} (subscription, number, stable_id, payload, digest, received_at)"
    " select distinct subscription, n, 'new ' || n, '\\x61'::bytea, sha256('\\x61'), now() - interval '1 hour'"
    f" from {MESSAGE}, generate_series(6, 8) n"
)
"""Three messages that were written down, and not opened."""
IN_SLICE = (
    "with position as (update stormproof.pending_subscription set position = jsonb_set(position, '{next}', '8')"
    " returning id) insert into stormproof.pending_slice (subscription, at, messages, bytes, state, epoch, opened, deaths)"
    " select id, '{\"range\": [6, 8]}', 2, 2, 'returned', 0, 1, 0 from position"
)
"""Two of them in a slice that was given back."""


@pytest.fixture
def ended(database: Database, tmp_path: Path) -> Database:
    """A topology that has applied six messages, and ended."""
    prepared_database(database)
    server = ToyServer()
    server.put([b"word %d" % number for number in range(6)])
    topology = Topology("toy")
    topology.stream("words", ToySource("toy", server)).into(PostgresSink("applied", database=database))
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"))
    topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)
    return database


def run(database: Database, *statements: str) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def seen(database: Database) -> TopologyStatus:
    engine = sa.create_engine(database.sqlalchemy_url)
    (found,) = status(AuditLedger(engine)).topologies
    engine.dispose()
    return found


def test_what_is_written_down_and_waits_is_shown_and_no_alarm(ended: Database) -> None:
    assert seen(ended).journal == JournalCounts(6, 0, 0, unresolved=0)
    run(ended, BEHIND)
    shown = seen(ended)
    assert shown.journal == JournalCounts(9, 0, 0, unresolved=3)
    assert shown.backlog is not None
    assert shown.backlog.ready == 3
    assert shown.backlog.oldest_ready_age_s is not None
    assert shown.backlog.oldest_ready_age_s >= 3_600
    assert verified("toy", ended).clean
    run(ended, IN_SLICE)
    assert verified("toy", ended).clean
    run(ended, f"update {MESSAGE} set owed = true where number < 6")
    assert verified("toy", ended).clean, "what is owed is paid when it comes again"
    run(ended, f"delete from {MESSAGE} where number < 5")
    assert verified("toy", ended).clean, "the horizon"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("delete from MESSAGE where number = 6", "1 messages of the journal of source toy were written down"),
        ("update MESSAGE set resolved_at = now() where number = 6", "1 messages .* would be opened again"),
        ("update MESSAGE set resolved_at = null where number = 3", "1 messages .* neither resolved nor in a slice"),
        ("update MESSAGE set owed = true where number = 7", "1 messages .* owed to the server as confirmed"),
        ("delete from MESSAGE where number > 4", "ends before its position .5 of 6."),
        (
            "update stormproof.pending_subscription set position = jsonb_set(position, '{next}', '4')",
            "2 would be opened again",
        ),
    ],
)
def test_control_a_journal_that_contradicts_the_position_is_found(ended: Database, fault: str, says: str) -> None:
    run(ended, BEHIND, fault.replace("MESSAGE", MESSAGE))
    require_found(ended, says)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("delete from MESSAGE where number = 6", "1 messages .* their payloads are gone"),
        ("update MESSAGE set payload = null where number = 6", "1 messages .* their payloads are gone"),
        ("update MESSAGE set resolved_at = now() where number = 7", "1 messages .* and are resolved"),
    ],
)
def test_control_a_journal_that_contradicts_a_slice_is_found(ended: Database, fault: str, says: str) -> None:
    run(ended, BEHIND, IN_SLICE, fault.replace("MESSAGE", MESSAGE))
    require_found(ended, says)


def require_found(database: Database, says: str) -> None:
    report = verified("toy", database)
    texts = [violation.text for violation in report.violations]
    assert any(re.search(says, text) for text in texts), texts
