"""`exactly_once(...).once(frame, key)`: a job's rows once for each key, wherever its program is killed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy.exc import IntegrityError
from support.command_line import CommandLine
from support.crashes import KILLED
from support.once_runs import (
    Program,
    expected,
    frame_of,
    require_exact,
    require_not_too_many,
    run_keys,
    run_on_spark,
    run_program,
    values_of,
)
from support.queues import prepared_database
from support.streams import (
    ArrowFrames,
    Form,
    Handout,
    Opener,
    StreamCell,
    first_column,
    handout,
    postgres_rows,
    sinks_of,
)
from support.verdicts import verified

from stormproof import exactly_once
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.database import Database, connect
from stormproof.errors import Fenced, JobFailed, SinkRefused, UsageError
from stormproof.topology import ExactlyOnce, StreamOutcome
from stormproof.trident.ledger import handed_in
from stormproof.trident.streaming.sinks import OneMessageSteps

pytestmark = pytest.mark.postgres
COMMITTED, ROLLED_FORWARD, SUPPRESSED = StreamOutcome.COMMITTED, StreamOutcome.ROLLED_FORWARD, StreamOutcome.SUPPRESSED
POINTS = [
    point
    for point in FAILPOINTS.values()
    if point.scope
    not in ("retry", "state", "stream", "queue", "audit", "operator", "journal", "reject", "group", "upkeep", "owed")
]


@pytest.fixture
def cell(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamCell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return StreamCell("daily", Form.SINKS, tmp_path, prepared_database(database))


def writer(cell: StreamCell, frames: ArrowFrames | None = None) -> ExactlyOnce:
    return exactly_once(
        *sinks_of(cell, "rows"), name=cell.name, settings=cell.settings(), frames=frames or ArrowFrames()
    )


# -- killed anywhere -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0.34)
@pytest.mark.timeout(600)
def test_a_program_killed_at_every_failpoint(cell: StreamCell, seed: int) -> None:
    points = POINTS.copy()
    random.Random(seed).shuffle(points)
    program = Program(cell, run_program)
    for point in points:
        if point.scope in ("recovery", "abort"):  # they are passed only where a job was left behind
            assert program.killed_at("prepare.before=kill") == KILLED
        assert program.killed_at(f"{point.name}=kill") == KILLED, f"{point.name} was not reached"
    assert program.killed_at("") == 0
    require_exact(cell, program.keys)


@pytest.mark.spark(own=True)
@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(600)
def test_a_program_on_spark(cell: StreamCell) -> None:
    program = Program(cell, run_on_spark)
    for point in ("prepare.before", "prepare.after", "commit.after_sink"):
        assert program.killed_at(f"{point}=kill@2") == KILLED
    assert program.killed_at("") == 0
    require_exact(cell, program.keys)


@pytest.mark.parametrize("place", ["open.after", "prepare.before"])
def test_what_was_not_prepared_is_written_anew_with_its_new_content(cell: StreamCell, place: str) -> None:
    assert run_program(cell, ["a"], f"{place}=kill") == KILLED
    with writer(cell) as write:
        result = write.once(frame_of("a", "new"), "a")
    assert (result.outcome, result.txid, result.rows) == (COMMITTED, 2, 4)
    assert first_column(postgres_rows(cell, "rows")) == expected(["a"]) + Counter(["new"])


@pytest.mark.parametrize("place", ["prepare.after", "commit.after_sink", "finish.before_commit"])
def test_what_was_prepared_is_completed_by_a_call_with_any_key(cell: StreamCell, place: str) -> None:
    assert run_program(cell, ["a"], f"{place}=kill") == KILLED
    frames = ArrowFrames()
    with writer(cell, frames) as write:
        assert write.once(frame_of("b"), "b").outcome is COMMITTED
        require_exact(cell, ["a", "b"])
        told = [write.once(frame_of("a", "new"), "a") for _ in range(2)]
    assert [(r.outcome, r.txid, r.rows) for r in told] == [(ROLLED_FORWARD, 1, 0), (SUPPRESSED, 1, 0)]
    assert frames.computed == 1, "the rows of 'a' were not computed again"
    require_exact(cell, ["a", "b"])


def test_of_a_dead_programs_job_it_is_said_which_sink_has_it_and_the_next_run_counts_it(
    cell: StreamCell, command: CommandLine
) -> None:
    assert run_program(cell, ["a"], "commit.after_sink=kill") == KILLED
    told = command("audit", "txn", "daily", "1")["sinks"]
    assert sorted(one["has"] for one in told) == ["has_it", "has_it_not"]
    (opening,) = command("audit", "message", "daily", "a")["openings"]
    assert ([one["sink"] for one in opening["held"]], len(opening["not_held"])) == (["delta-rows"], 1)
    with writer(cell) as write:
        write.once(frame_of("b"), "b")
        found = write.statistics
    assert (found.batches, found.messages, found.recoveries[0].rolled_forward) == (2, 2, (1,))


# -- keys ------------------------------------------------------------------------------------------------------------


def test_keys_come_in_any_order_and_each_is_written_once(cell: StreamCell, command: CommandLine) -> None:
    keys = ["2026-11-22", "2026-01-01", "no date", "'; drop table", "\u00fc \U0001f600", " "]
    frames = ArrowFrames()
    assert [r.outcome for r in run_keys(cell, keys, frames)] == [COMMITTED] * 6
    assert [(r.outcome, r.txid) for r in run_keys(cell, keys[::-1], frames)] == [
        (SUPPRESSED, n) for n in (6, 5, 4, 3, 2, 1)
    ]
    assert frames.computed == 6
    require_exact(cell, keys)
    assert verified(cell.name, cell.database).clean
    assert "6 keys written; the last is ' ', txid 6" in command.text("status", "daily")
    (topology,) = command("status", "daily")["topologies"]
    assert (topology["jobs"]["count"], topology["jobs"]["last"]) == (6, " ")
    assert "its key is '2026-01-01'" in command.text("audit", "txn", "daily", "2")
    assert command("audit", "message", "daily", "no date")["openings"][0]["txid"] == 3
    assert {row["key"] for row in command("audit", "duplicates", "daily")["rows"]} == set(keys)


def test_a_prune_leaves_the_keys(cell: StreamCell, command: CommandLine) -> None:
    keys = [f"day {number}" for number in range(6)]
    run_keys(cell, keys)
    (report,) = command("ledger", "prune", "daily", "--older-than", "0s")["topologies"]
    assert report["removed"]["txn"] >= 5
    assert [r.outcome for r in run_keys(cell, keys)] == [SUPPRESSED] * 6
    require_exact(cell, keys)
    assert verified(cell.name, cell.database).clean


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800", "x" * 2001, 7, None])
def test_what_is_no_key(cell: StreamCell, key: str) -> None:
    with writer(cell) as write, pytest.raises(UsageError, match="once"):
        write.once(frame_of("a"), key)


def test_the_longest_key(cell: StreamCell) -> None:
    assert run_keys(cell, [random.Random(0).randbytes(1000).hex()])[0].outcome is COMMITTED


# -- who may write ---------------------------------------------------------------------------------------------------


def test_a_second_program_takes_over(cell: StreamCell) -> None:
    with writer(cell) as one, writer(cell) as other:
        one.once(frame_of("a"), "a")
        assert other.once(frame_of("a"), "a").outcome is SUPPRESSED
        with pytest.raises(Fenced):
            one.once(frame_of("b"), "b")
        other.once(frame_of("b"), "b")
    require_exact(cell, ["a", "b"])


def test_a_key_that_two_programs_write_at_once_is_there_once(cell: StreamCell) -> None:
    other = writer(cell)

    class Overtaken(ArrowFrames):
        def write(self, *arguments: object) -> object:  # type: ignore[override]
            other.once(frame_of("a"), "a")
            return super().write(*arguments)  # type: ignore[arg-type]

    with writer(cell, Overtaken()) as one, pytest.raises(Fenced):
        one.once(frame_of("a"), "a")
    other.close()
    require_exact(cell, ["a"])
    assert verified(cell.name, cell.database).clean


def test_a_name_is_for_queries_or_for_jobs(cell: StreamCell, opened: Opener) -> None:
    with writer(cell) as write:
        write.once(frame_of("a"), "a")
        with pytest.raises(UsageError, match=r"fed by a program that calls once\(\), and query q calls it"):
            write(handout("q", "x"), 0)
    with pytest.raises(UsageError, match=r"'daily' is used by jobs, by once\(frame, key=...\), and now by a streaming"):
        opened(cell)(handout("q", "x"), 0)
    stream = StreamCell("stream", Form.SINKS, cell.folder, cell.database)
    opened(stream)(handout("q", "x"), 0)
    with pytest.raises(UsageError, match=r"'stream' is used by a streaming query.*and now by jobs"):
        run_keys(stream, ["a"])
    require_exact(cell, ["a"])
    assert first_column(postgres_rows(stream, "rows")) == {"x": 1}


# -- what fails ------------------------------------------------------------------------------------------------------


def test_a_job_that_fails_leaves_its_key(cell: StreamCell) -> None:
    class Failing(ArrowFrames):
        def write(self, *arguments: object) -> object:  # type: ignore[override]
            raise JobFailed("no such file")

    with writer(cell, Failing()) as write, pytest.raises(JobFailed):
        write.once(frame_of("a"), "a")
    assert run_keys(cell, ["a"])[0].outcome is COMMITTED
    require_exact(cell, ["a"])
    assert verified(cell.name, cell.database).clean


def test_a_row_that_a_sink_cannot_hold_is_named_and_leaves_the_key(cell: StreamCell) -> None:
    bad = Handout("", lambda: pa.table({"value": ["ok", "nul \0 here"], "id": ["1", "2"]}))
    with writer(cell) as write:
        with pytest.raises(
            SinkRefused, match=r"key 'a': rows that a sink cannot hold.*NUL.*call once\(\) with this key"
        ):
            write.once(bad, "a")
        assert write.once(frame_of("a"), "a").outcome is COMMITTED
    require_exact(cell, ["a"])
    assert verified(cell.name, cell.database).clean


def test_no_rows_are_a_job_too(cell: StreamCell) -> None:
    empty = Handout("", lambda: pa.table({"value": pa.array([], pa.string()), "id": pa.array([], pa.string())}))
    with writer(cell) as write:
        assert [write.once(empty, "a").outcome for _ in range(2)] == [COMMITTED, SUPPRESSED]
    assert verified(cell.name, cell.database).clean


# -- negative controls -----------------------------------------------------------------------------------------------


def test_control_without_a_look_at_the_key_the_ledger_itself_refuses(
    cell: StreamCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_keys(cell, ["a"])
    monkeypatch.setattr(handed_in, "job_of", lambda *_: None)
    with pytest.raises(IntegrityError, match="uq_handed_in_key"):
        run_keys(cell, ["a"])
    require_exact(cell, ["a"])


def test_control_without_keys_rows_are_doubled_and_the_audit_says_so(
    cell: StreamCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_keys(cell, ["a", "b"])
    monkeypatch.setattr(handed_in, "job_of", lambda *_: None)
    monkeypatch.delattr(OneMessageSteps, "_pin")
    run_keys(cell, ["a"])
    with pytest.raises(AssertionError, match=values_of("a")[0]):
        require_not_too_many(cell, ["a", "b"])
    (violation,) = verified(cell.name, cell.database).violations
    assert (violation.kind, violation.txid) == ("slices", 3)
    assert "wrote key 'a', which is txid 1 by its row" in violation.text


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("delete from stormproof.handed_in where txid = 1", "wrote key 'a', which has no row"),
        ("update stormproof.handed_in set txid = 9 where txid = 1", "key 'a' was taken as txid 9, which has no row"),
    ],
)
def test_control_a_key_that_the_ledger_lost_is_named(cell: StreamCell, statement: str, text: str) -> None:
    run_keys(cell, ["a", "b"])
    with connect(cell.database, application_name="test", autocommit=True) as connection:
        connection.execute(statement.encode())
    assert any(text in violation.text for violation in verified(cell.name, cell.database).violations)
