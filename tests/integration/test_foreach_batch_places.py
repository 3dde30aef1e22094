"""Where checkpoint, ledger and sinks stand: what is handed out again, what does not belong together, and what breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from support.command_line import CommandLine
from support.crashes import KILLED
from support.queues import prepared_database
from support.stream_chain import require_exact
from support.stream_sabotage import (
    no_previous_check,
    recompute_and_skip_by_number,
    recompute_what_is_prepared,
    skip_by_number_alone,
)
from support.streams import (
    REFUSED,
    ArrowFrames,
    Form,
    Opener,
    StandInQuery,
    StreamCell,
    delta_rows,
    handout,
    postgres_rows,
    put_file,
    run_stand_in,
    run_stream_driver,
)
from support.verdicts import verified

from stormproof.core.base.failpoint import armed
from stormproof.core.postgres.database import Database
from stormproof.errors import Fenced, PositionMismatch, SinkRefused, UsageError
from stormproof.trident.streaming.foreach_batch import StreamOutcome, StreamResult

pytestmark = pytest.mark.postgres
forms = pytest.mark.parametrize("form", Form)


@pytest.fixture
def cell(database: Database, tmp_path: Path) -> StreamCell:
    return StreamCell("places", Form.SINKS, tmp_path, prepared_database(database))


def events(cell: StreamCell, kind: str) -> list[tuple[object, ...]]:
    with psycopg.connect(cell.database.conninfo) as connection:
        return connection.execute(
            "select txid, sink, detail from stormproof.event where kind = %s order by id", (kind,)
        ).fetchall()


def epoch(cell: StreamCell) -> int:
    with psycopg.connect(cell.database.conninfo) as connection:
        row = connection.execute("select epoch from stormproof.topology where name = %s", (cell.name,)).fetchone()
    assert row is not None
    return int(row[0])


@forms
def test_what_is_handed_out_again_is_suppressed_and_recorded(
    cell: StreamCell,
    opened: Opener,
    form: Form,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", cell.database.adbc_uri)
    cell = replace(cell, form=form)
    results: list[StreamResult] = []
    frames = ArrowFrames()
    function = opened(cell, frames, results.append)
    function(handout("q", "a", "b"), 0)
    function(handout("q", "c"), 1)
    function.close()
    again = opened(cell, frames, results.append)
    again(handout("q", "c"), 1)
    again(handout("q", "d"), 2)
    again.close()
    assert [r.outcome for r in results] == [
        StreamOutcome.COMMITTED,
        StreamOutcome.COMMITTED,
        StreamOutcome.SUPPRESSED,
        StreamOutcome.COMMITTED,
    ]
    assert frames.computed == 3, "what was handed out again was computed for the sinks, too"
    require_exact(cell, ["a", "b", "c", "d"])
    suppressed = events(cell, "suppressed")
    assert len(suppressed) == (2 if form is Form.SINKS else 1)
    assert all(detail == {"query": "q", "batch": 1} for _, _, detail in suppressed)
    shown = CommandLine(capsys)("audit", "duplicates", cell.name)["rows"]
    assert [row["micro_batch"] for row in shown] == ["q:1"] * len(suppressed)
    assert ((2, "postgres-rows") in [(row["txid"], row["sink"]) for row in shown]) == (form is Form.SINKS)
    assert verified(cell.name, cell.database).clean


@forms
def test_a_lost_checkpoint_is_refused_until_its_place_is_adopted(cell: StreamCell, form: Form) -> None:
    cell = replace(cell, form=form)
    put_file(cell.folder, ["a"])
    put_file(cell.folder, ["b"])
    run_stand_in(cell)
    before = epoch(cell)
    old = (cell.checkpoint / "metadata").read_text()
    cell.lose_checkpoint()
    with pytest.raises(PositionMismatch, match="was lost or replaced") as refused:
        run_stand_in(cell)
    new = (cell.checkpoint / "metadata").read_text()
    assert refused.value.details == {
        "ledger_query": old,
        "ledger_batch": 1,
        "query": new,
        "batch": 0,
        "adopt": f"{old}:1",
    }
    assert epoch(cell) == before, "a query that was refused has fenced another"
    require_exact(cell, ["a", "b"])
    results = run_stand_in(replace(cell, adopt=f"{old}:1"))
    assert [r.outcome for r in results] == [StreamOutcome.COMMITTED] * 2
    require_exact(cell, ["a", "b", "a", "b"])  # by the user's word these were new rows
    ((_, _, detail),) = events(cell, "operator")
    assert isinstance(detail, dict)
    assert (detail["from"], detail["query"], detail["batch"]) == (f"{old}:1", new, 0)
    assert verified(cell.name, cell.database).clean
    cell.lose_checkpoint()
    with pytest.raises(PositionMismatch, match="was lost or replaced"):
        run_stand_in(replace(cell, adopt=f"{old}:1"))  # left in the code, it opens no second door


@pytest.mark.parametrize(
    ("batch", "what"), [(0, "restored from an older state"), (3, "the ledger was restored from an older state")]
)
def test_a_checkpoint_that_stands_elsewhere_is_refused(cell: StreamCell, opened: Opener, batch: int, what: str) -> None:
    function = opened(cell, ArrowFrames())
    function(handout("q", "a"), 0)
    function(handout("q", "b"), 1)
    with pytest.raises(PositionMismatch, match=what):
        function(handout("q", "c"), batch)
    require_exact(cell, ["a", "b"])


@forms
def test_a_checkpoint_that_is_one_batch_old_is_refused_as_its_batch_has_another_plan(
    cell: StreamCell, opened: Opener, form: Form
) -> None:
    cell = replace(cell, form=form)
    function = opened(cell, ArrowFrames())
    function(handout("q", "a", plans={0: "{}\n1"}), 0)
    function(handout("q", "b", plans={0: "{}\n1", 1: "{}\n2"}), 1)
    function.close()
    before = epoch(cell)
    further = handout("q", "b", "new", plans={0: "{}\n1", 1: "{}\n3"})
    with pytest.raises(PositionMismatch, match=r"planned to end at 2 .* to end at 3 "):
        opened(cell, ArrowFrames())(further, 1)
    assert epoch(cell) == before, "a query that was refused has fenced another"
    require_exact(cell, ["a", "b"])
    adopting = opened(replace(cell, adopt="q:1"), ArrowFrames())
    only_new = handout("q", "new", plans={0: "{}\n1", 1: "{}\n3"})
    adopting(only_new, 1)  # as of a query that begins right behind the first plan's end
    adopting(only_new, 1)
    adopting(handout("q", "c", plans={1: "{}\n3", 2: "{}\n4"}), 2)
    adopting.close()
    require_exact(cell, ["a", "b", "new", "c"])
    assert verified(cell.name, cell.database).clean


@pytest.mark.parametrize(("armed", "is_fixed"), [("run.after=kill", False), ("prepare.after=kill", True)])
def test_a_batch_of_which_nothing_is_fixed_may_be_planned_anew(
    cell: StreamCell, opened: Opener, armed: str, is_fixed: bool
) -> None:
    put_file(cell.folder, ["a"])
    assert run_stream_driver(cell, armed) == KILLED
    query = (cell.checkpoint / "metadata").read_text()
    planned = handout(query, "a", "new", plans={0: "{}\nanother"})
    function = opened(cell, ArrowFrames())
    if is_fixed:
        with pytest.raises(PositionMismatch, match="planned otherwise"):
            function(planned, 0)
        run_stand_in(cell)
        require_exact(cell, ["a"])
        return
    function(planned, 0)
    function(handout(query, "b", plans={0: "{}\nanother", 1: "{}\nb"}), 1)
    require_exact(cell, ["a", "new", "b"])


@forms
def test_control_without_plans_a_checkpoint_that_is_one_batch_old_loses_rows_with_a_clean_audit(
    cell: StreamCell, opened: Opener, form: Form
) -> None:
    cell = replace(cell, form=form)
    function = opened(cell, ArrowFrames())
    function(handout("q", "a"), 0)
    function(handout("q", "a", "new"), 0)
    function(handout("q", "b"), 1)
    function.close()
    assert verified(cell.name, cell.database).clean
    with pytest.raises(AssertionError):
        require_exact(cell, ["a", "new", "b"])


def test_a_query_that_is_not_new_may_begin_with_any_batch(cell: StreamCell, opened: Opener) -> None:
    results: list[StreamResult] = []
    function = opened(cell, ArrowFrames(), results.append)
    function(handout("q", "a"), 1000)
    function(handout("q", "b"), 1001)
    assert [r.txids for r in results] == [(1,), (2,)]
    assert verified(cell.name, cell.database).clean


@forms
def test_two_queries_into_one_name(cell: StreamCell, opened: Opener, form: Form) -> None:
    cell = replace(cell, form=form)
    first = opened(cell, ArrowFrames())
    first(handout("q1", "a"), 0)
    with pytest.raises(PositionMismatch, match="another query has the same name"):
        opened(cell, ArrowFrames())(handout("q2", "x"), 0)
    shared = opened(cell, ArrowFrames())
    shared(handout("q1", "a"), 0)
    with pytest.raises(UsageError, match="give each query a function of its own"):
        shared(handout("q2", "x"), 0)
    second = opened(cell, ArrowFrames())
    second(handout("q1", "b"), 1)  # the same query, started twice: the later one wins
    with pytest.raises(Fenced):
        first(handout("q1", "b"), 1)
    require_exact(cell, ["a", "b"])


def test_a_row_that_a_sink_cannot_hold_stops_the_query_until_it_is_mended(cell: StreamCell, opened: Opener) -> None:
    results: list[StreamResult] = []
    function = opened(cell, ArrowFrames(), results.append)
    with pytest.raises(SinkRefused, match=r"'postgres-rows'.*value.*Nothing was written"):
        function(handout("q", "good", "nul \x00"), 0)
    assert not delta_rows(cell, "rows")
    function(handout("q", "good", "mended"), 0)
    assert results[0].txids == (2,), "a transaction that was not prepared is aborted"
    require_exact(cell, ["good", "mended"])
    assert verified(cell.name, cell.database).clean


@forms
def test_a_micro_batch_without_rows(cell: StreamCell, opened: Opener, form: Form) -> None:
    cell = replace(cell, form=form)
    function = opened(cell, ArrowFrames())
    for batch, values in enumerate([(), ("a",), ()]):
        function(handout("q", *values), batch)
    function.close()
    require_exact(cell, ["a"])
    assert verified(cell.name, cell.database).clean


@pytest.mark.parametrize("place", ["open.after", "prepare.after", "postgres.after_commit", "finish.before_commit"])
def test_a_lost_answer_is_found_out_within_the_call(cell: StreamCell, opened: Opener, place: str) -> None:
    results: list[StreamResult] = []
    function = opened(cell, ArrowFrames(), results.append)
    function(handout("q", "a"), 0)
    with armed(f"{place}=raise"):
        function(handout("q", "b"), 1)
    require_exact(cell, ["a", "b"])
    assert verified(cell.name, cell.database).clean


def test_dead_letters_of_a_stream_are_kept_with_their_rows(cell: StreamCell) -> None:
    cell = replace(cell, form=Form.TOPOLOGY)
    put_file(cell.folder, ["a", "poison never works"])
    run_stand_in(cell)
    require_exact(cell, ["a", "poison never works"])
    with psycopg.connect(cell.database.conninfo) as connection:
        rows = connection.execute("select payload, error from stormproof.dead_letter").fetchall()
    from stormproof.core.source.files.rows import shown_payload

    assert len(rows) == 1
    assert "poison never works" in shown_payload(bytes(rows[0][0]))
    staged = cell.folder / "home" / "staging" / "micro-batches"
    assert not [p for p in staged.rglob("*") if p.is_file()], "files of a micro-batch that is done were left behind"


# -- negative controls -----------------------------------------------------------------------------------------------


def test_control_skipping_by_number_alone_loses_rows(cell: StreamCell) -> None:
    put_file(cell.folder, ["a"])
    run_stand_in(cell)
    cell.lose_checkpoint()
    (cell.folder / "in" / "000000.txt").write_text("new\n")
    assert run_stream_driver(cell) == REFUSED
    broken = replace(cell, sabotage=skip_by_number_alone)
    assert run_stream_driver(broken) == 0
    with pytest.raises(AssertionError):
        require_exact(cell, ["a", "new"])


def test_control_without_a_look_at_what_the_sink_holds_a_hole_stays(cell: StreamCell) -> None:
    put_file(cell.folder, ["a"])
    put_file(cell.folder, ["b"])
    assert run_stream_driver(cell) == 0
    log = cell.folder / "lake" / cell.table("delta", "rows") / "_delta_log"
    newest = max(log.glob("*.json"))
    newest.unlink()  # the table as a backup from before the second batch has it
    put_file(cell.folder, ["c"])
    assert run_stream_driver(cell) == REFUSED
    assert run_stream_driver(replace(cell, sabotage=no_previous_check)) == 0
    assert sorted(row[0] for row in delta_rows(cell, "rows")) == ["a", "c"]
    with pytest.raises(AssertionError):
        require_exact(cell, ["a", "b", "c"])


def test_control_a_prepared_batch_that_is_computed_again_is_refused_by_its_digest(cell: StreamCell) -> None:
    put_file(cell.folder, ["a", "b"])
    assert run_stream_driver(cell, "commit.after_sink=kill") == KILLED
    assert len(delta_rows(cell, "rows")) == 2
    assert not postgres_rows(cell, "rows")
    assert run_stream_driver(replace(cell, sabotage=recompute_what_is_prepared)) == REFUSED
    assert run_stream_driver(replace(cell, sabotage=recompute_and_skip_by_number)) == 0
    with pytest.raises(AssertionError, match="different computations"):
        require_exact(cell, ["a", "b"])


def test_the_stand_in_hands_out_a_batch_again_until_it_is_done(cell: StreamCell) -> None:
    put_file(cell.folder, ["a"])
    query = StandInQuery(cell.folder, cell.checkpoint)
    first, _ = next(query.batches())
    again = list(query.batches())
    assert (first, [batch for batch, _ in again]) == (0, [0])
    assert json.dumps([batch for batch, _ in query.batches()]) == "[]"
