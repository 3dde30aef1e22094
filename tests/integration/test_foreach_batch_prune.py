"""The ledger of a streaming query is pruned: what tells a checkpoint that does not fit, and what the audit needs, stays."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from support.command_line import CommandLine
from support.queues import prepared_database
from support.stream_chain import require_exact
from support.streams import (
    Form,
    Opener,
    StreamCell,
    first_column,
    handout,
    postgres_rows,
    settle,
)
from support.topologies import POISON
from support.verdicts import verified

from stormproof.core.base.clock import SystemClock
from stormproof.core.pending.rows import Subscriber
from stormproof.core.postgres.database import Database
from stormproof.core.source.files import entries
from stormproof.errors import PositionMismatch
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.decisions.pruning import prune
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.streaming.foreach_batch import StreamOutcome, StreamResult

pytestmark = pytest.mark.postgres
forms = pytest.mark.parametrize("form", Form)
QUERY, OTHER = str(uuid.UUID(int=7)), str(uuid.UUID(int=8))
VALUES = ["a", "b", "c", "d", "e", "f"]


@pytest.fixture
def cell(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamCell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return StreamCell("orders", Form.SINKS, tmp_path, prepared_database(database))


def sql(cell: StreamCell, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(cell.database.conninfo, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return [] if cursor.description is None else cursor.fetchall()


def left(cell: StreamCell) -> list[int]:
    return [row[0] for row in sql(cell, "select batch from stormproof.handed_in order by number")]


def fed(cell: StreamCell, opened: Opener, first: int = 0) -> None:
    """A run of a query over six micro-batches."""
    function = opened(cell)
    for batch, value in enumerate(VALUES, first):
        function(handout(QUERY, value), batch)
    function.close()


def pruned(command: CommandLine, *options: str) -> dict[str, int]:
    (report,) = command("ledger", "prune", "orders", "--older-than", "0s", *options)["topologies"]
    found: dict[str, int] = report["removed"]
    return found


@forms
def test_what_a_prune_leaves_still_tells_every_checkpoint_that_does_not_fit(
    cell: StreamCell, opened: Opener, command: CommandLine, form: Form
) -> None:
    cell = replace(cell, form=form)
    fed(cell, opened)
    files = sql(cell, "select count(*) from stormproof.file_entry")[0][0]
    dry = pruned(command, "--dry-run")
    assert left(cell) == [0, 1, 2, 3, 4, 5]
    done = pruned(command)
    assert done["handed_in"] == dry["handed_in"] == 6 - len(left(cell))
    kept_files = sql(cell, "select count(*) from stormproof.file_entry")[0][0]
    assert done.get("file_entry", 0) == dry.get("file_entry", 0) == files - kept_files
    assert kept_files < files or form is Form.SINKS
    # The first; the one that the ledger's next one follows; where the query stands.
    assert left(cell) == ([0, 4, 5] if form is Form.SINKS else [0, 5])
    assert "handed_in" not in pruned(command)
    assert verified("orders", cell.database).clean
    for query, batch, what in (
        (OTHER, 0, "was lost or replaced"),
        (OTHER, 6, "was lost or replaced"),
        (QUERY, 0, "restored from an older state"),
        (QUERY, 2, "restored from an older state"),
        (QUERY, 4, "restored from an older state"),
        (QUERY, 7, "the ledger was restored"),
    ):
        with pytest.raises(PositionMismatch, match=what):
            opened(cell)(handout(query, "x"), batch)
    with pytest.raises(PositionMismatch, match="was renamed"):
        opened(replace(cell, name="renamed"))(handout(QUERY, "x"), 6)
    results: list[StreamResult] = []
    function = opened(cell, on_batch=results.append)
    function(handout(QUERY, "f"), 5)
    function(handout(QUERY, "g"), 6)
    function(handout(QUERY, "h"), 7)
    function.close()
    assert [r.outcome for r in results] == [StreamOutcome.SUPPRESSED] + [StreamOutcome.COMMITTED] * 2
    require_exact(cell, [*VALUES, "g", "h"])
    assert verified("orders", cell.database).clean
    pruned(command)
    assert left(cell) == ([0, 6, 7] if form is Form.SINKS else [0, 7])
    assert verified("orders", cell.database).clean


@forms
def test_where_a_query_began_late_and_where_it_was_adopted_outlive_a_prune(
    cell: StreamCell, opened: Opener, command: CommandLine, form: Form
) -> None:
    cell = replace(cell, form=form)
    fed(cell, opened, first=3)
    adopting = replace(cell, adopt=f"{QUERY}:8")
    function = opened(adopting)
    for batch, value in enumerate(["g", "h", "i", "j"]):
        function(handout(OTHER, value), batch)
    function.close()
    pruned(command)
    assert left(cell) == ([3, 8, 2, 3] if form is Form.SINKS else [3, 8, 3])
    report = verified("orders", cell.database)
    assert report.clean
    assert [n.text for n in report.notices if n.kind == "began_late"] == [
        f"orders begins at batch 3 of streaming query {QUERY}; batches 0 to 2 are not in its sinks"
    ]
    with pytest.raises(PositionMismatch, match="'orders' stands at batch 8 of it"):
        opened(replace(cell, name="renamed"))(handout(QUERY, "x"), 9)


@forms
def test_a_function_that_runs_meanwhile_is_not_disturbed(
    cell: StreamCell, opened: Opener, command: CommandLine, form: Form
) -> None:
    cell = replace(cell, form=form)
    function = opened(cell)
    for batch, value in enumerate(VALUES):
        function(handout(QUERY, value), batch)
        pruned(command)
        assert len(left(cell)) <= 3
    function.close()
    require_exact(cell, VALUES)
    assert verified("orders", cell.database).clean


def test_only_what_is_older_than_the_horizon_goes(cell: StreamCell, opened: Opener, command: CommandLine) -> None:
    for form in Form:
        each = replace(cell, name=f"orders-{form}", form=form)
        fed(each, opened)
        (report,) = command("ledger", "prune", each.name, "--older-than", "1h")["topologies"]
        assert report["removed"] == {}
    assert len(left(cell)) == 12


def test_the_micro_batch_of_a_dead_letter_stays_until_its_story_is_over(
    cell: StreamCell, opened: Opener, command: CommandLine
) -> None:
    cell = replace(cell, form=Form.TOPOLOGY)
    function = opened(cell)
    for batch, value in enumerate(["a", "b", POISON.decode(), "d", "e", "f"]):
        function(handout(QUERY, value), batch)
    function.close()
    settle(cell)
    pruned(command)
    assert left(cell) == [0, 2, 5]
    (letter,) = command("dead-letters", "list", "orders")["dead_letters"]
    assert command("audit", "message", "orders", letter["id"])["end"]["kind"] == "dead_letter"
    assert verified("orders", cell.database).clean
    command("dead-letters", "requeue", "orders", letter["id"])
    settle(cell)
    assert verified("orders", cell.database).clean


def test_messages_are_numbered_on_where_only_micro_batches_without_rows_are_left(
    cell: StreamCell, opened: Opener, command: CommandLine
) -> None:
    """Else what comes next would be taken for messages that were done before."""
    cell = replace(cell, form=Form.TOPOLOGY)
    function = opened(cell)
    for batch, values in enumerate((["a"], ["b", "c"], ["d"], [], [])):
        function(handout(QUERY, *values), batch)
    pruned(command)
    assert left(cell) == [0, 2, 3, 4]
    with psycopg.connect(cell.database.conninfo) as connection:
        who = Subscriber("files", "lines", QUERY)
        entries.forget(connection.cursor(), who, [(0, 1_000)])
        assert entries.forget(connection.cursor(), who, [(0, 1_000)]) == 0
    assert len(sql(cell, "select from stormproof.file_entry")) == 1
    for batch, value in enumerate(["e", "f"], 5):
        function(handout(QUERY, value), batch)
        pruned(command)
    function.close()
    require_exact(cell, ["a", "b", "c", "d", "e", "f"])
    assert verified("orders", cell.database).clean


class Killed(Exception):
    pass


def test_a_prune_that_is_killed_is_a_shorter_prune(cell: StreamCell, opened: Opener) -> None:
    fed(cell, opened)
    engine = sa.create_engine(cell.database.sqlalchemy_url)
    now = datetime.now(UTC)

    def by_hand(dies_at: int | None, chunk_txids: int) -> None:
        def between(upto: int) -> None:
            if upto == dies_at:
                raise Killed

        prune(
            Ledger(engine, SystemClock(), lambda: "none"),
            AuditLedger(engine),
            "orders",
            ended_before=now + timedelta(seconds=1),
            now=now,
            by="tests",
            chunk_txids=chunk_txids,
            between=between,
        )

    with pytest.raises(Killed):
        by_hand(4, 2)
    assert left(cell) == [0, 1, 2, 3, 4, 5]
    assert verified("orders", cell.database).clean
    by_hand(None, 1)
    engine.dispose()
    assert left(cell) == [0, 4, 5]
    assert verified("orders", cell.database).clean
    assert sql(cell, "select upto, removed->'handed_in' from stormproof.prune order by 1") == [(4, None), (5, 3)]


# -- negative controls -----------------------------------------------------------------------------------------------


def test_control_without_the_place_a_lost_checkpoint_doubles_the_rows(cell: StreamCell, opened: Opener) -> None:
    fed(cell, opened)
    sql(cell, "delete from stormproof.handed_in")
    function = opened(cell)
    function(handout(OTHER, "a"), 0)
    function.close()
    assert first_column(postgres_rows(cell, "rows")) == Counter([*VALUES, "a"])


@pytest.mark.parametrize("gone", [5, 6])
def test_control_without_what_the_next_one_follows_the_audit_complains(
    cell: StreamCell, opened: Opener, command: CommandLine, gone: int
) -> None:
    fed(cell, opened)
    pruned(command)
    sql(cell, f"delete from stormproof.handed_in where number = {gone}")
    report = verified("orders", cell.database)
    assert [v.kind for v in report.violations] == ["slices"]
