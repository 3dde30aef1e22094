"""`status` and `audit verify` of a source whose server redelivers: the journal against position and slices."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database
from support.redelivering import ToyServer, ToySource
from support.verdicts import verified

from stormproof import PostgresSink, Topology
from stormproof.core.pending.connector import Kept
from stormproof.core.pending.journal import Journal, JournalCounts
from stormproof.core.pending.rows import Subscriber
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.audit.ledger import AuditLedger
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


SEALED = "'\\xfffffffe00000002'::bytea || '{}'"
TOMBSTONE = "'\\xfffffffd00000002'::bytea || '{}'"


def kept_in(database: Database) -> Kept:
    with connect(database, application_name="tests") as connection, connection.cursor() as cursor:
        cursor.execute(b"select kind, source, subscription from stormproof.pending_subscription")
        (who,) = cursor.fetchall()
        return Journal(cursor, Subscriber(*who), "source toy").kept()


def test_a_payload_is_compared_without_what_its_server_said_of_it(ended: Database) -> None:
    run(
        ended,
        f"update {MESSAGE} set payload = {SEALED} || payload where number < 3",
        f"update {MESSAGE} set payload = {TOMBSTONE}, digest = sha256('') where number = 3",
        f"update {MESSAGE} set payload = '\\xfffffffe', digest = sha256('\\xfffffffe') where number = 4",
    )
    assert kept_in(ended) == Kept(6, "the payloads of 6 messages that the journal still keeps", ())


@pytest.mark.parametrize(
    "payload",
    [
        f"{SEALED} || '7'",
        TOMBSTONE,
        "'\\xfffffffe'",
        "'\\xfffffffe0000'",
        "'\\xfffffffeffffffff'",
        "'\\xfffffffe7fffffff' || payload",
    ],
)
def test_control_a_payload_that_was_changed_is_found_whatever_is_left_of_it(ended: Database, payload: str) -> None:
    run(ended, f"update {MESSAGE} set payload = {payload} where number = 3")
    text = "message 3 of the journal of source toy is not the one that was received"
    assert [one.text for one in kept_in(ended).wrong] == [text]


@pytest.fixture
def done(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return command_line_in(tmp_path, database, "app.py", "", monkeypatch, capsys)


def checked(line: str) -> list[str]:
    if line.startswith("bad"):
        raise ValueError(line)
    return [line]


def test_dead_letters_of_a_journal_are_put_back_by_ids_of_a_file(
    database: Database, done: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_database(database)
    server = ToyServer()
    server.put([b"good", b"bad 1", b"bad 2", b"bad 3"], prefix="id of 'ours', \u00e4 ")
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"))

    def run_it() -> None:
        topology = Topology("toy")
        words = topology.stream("words", ToySource("toy", server, max_attempts=1))
        words.flat_map(checked, "line", schema="word string").into(PostgresSink("applied", database=database))
        topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)

    run_it()
    letters = {one["text"]: one["id"] for one in done("dead-letters", "list", "toy")["dead_letters"]}
    assert sorted(letters) == ["bad 1", "bad 2", "bad 3"]
    assert done("dead-letters", "show", "toy", letters["bad 1"])["server_id"] == "id of 'ours', \u00e4 2"
    assert "its server knows it as id of 'ours'" in done.text("dead-letters", "show", "toy", letters["bad 1"])
    Path("ids").write_text(f"{letters['bad 1']}\n\n{letters['bad 2']}\n")
    assert done("dead-letters", "requeue", "toy", "--ids", "ids")["requeued"] == [letters["bad 1"], letters["bad 2"]]
    monkeypatch.setattr("sys.stdin", io.StringIO(letters["bad 3"]))
    assert done("dead-letters", "drop", "toy", "--ids", "-")["dropped"] == [letters["bad 3"]]
    assert done.ended("dead-letters", "drop", "toy", "--ids", "no-such-file")[0] == 2
    Path("ids").write_text("\n")
    assert done.ended("dead-letters", "drop", "toy", "--ids", "ids")[0] == 2, "an empty file is not all of them"
    run_it()
    undecided = done("dead-letters", "list", "toy")["dead_letters"]
    assert sorted(one["text"] for one in undecided) == ["bad 1", "bad 2"]
    assert verified("toy", database).clean


def require_found(database: Database, says: str) -> None:
    report = verified("toy", database)
    texts = [violation.text for violation in report.violations]
    assert any(re.search(says, text) for text in texts), texts
