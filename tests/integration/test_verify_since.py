"""`audit verify --since`: what came since is checked, and a chain of verdicts has no hole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltalake import DeltaTable
from support.crashes import Cell
from support.operated import Operated
from support.topologies import source_of

from stormproof import DeltaSink, PostgresSink, Topology

pytestmark = [pytest.mark.postgres]
NAME = "since"


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(str.split, "line", schema="word string")
    rows.into(
        DeltaSink(cell.folder / "lake" / "words", name="delta"),
        PostgresSink("words", name="postgres", database=cell.database, lineage=True),
    )
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=3))
    more(found, 9)
    return found


def more(run: Operated, messages: int) -> None:
    run.put(*(f"word{i} again".encode() for i in range(messages)))
    run.run(build(run.cell))


def verify(run: Operated, *options: str, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = run.command("audit", "verify", NAME, *options, status=status)
    return report


def since_last(run: Operated, *options: str, status: int = 0) -> dict[str, Any]:
    return verify(run, "--since", "last", *options, status=status)


def said(report: dict[str, Any]) -> set[str]:
    return {notice["kind"] for notice in report["notices"]}


def newest(run: Operated) -> int:
    ((found,),) = run.sql("select max(txid) from stormproof.txn")
    return int(found)


@pytest.mark.parametrize("options", [(), ("--deep",)])
def test_each_check_looks_at_what_came_since_the_one_before(run: Operated, options: tuple[str, ...]) -> None:
    first = since_last(run, *options)
    assert (first["first"], first["last"], "all_checked" in said(first)) == (1, 3, True)
    for upto in (6, 9):
        more(run, 9)
        report = since_last(run, *options)
        assert (report["first"], report["last"], report["chain"]["chain_from"]) == (upto - 2, upto, 1)
        assert report["checked"]["txids"] == 3
        assert "all_checked" not in said(report)
    idle = since_last(run, *options)
    assert (idle["first"], idle["last"], idle["checked"]["txids"]) == (10, None, 0)


def test_what_is_wrong_before_the_point_is_not_claimed_and_what_is_wrong_behind_it_is_found(run: Operated) -> None:
    verify(run)
    more(run, 9)
    run.sql("update stormproof.txn_sink set rows = rows + 1 where txid = 2 and sink = 'postgres'")
    report = since_last(run)
    assert (report["first"], report["violations"]) == (4, [])
    assert verify(run, status=1)["violations"]
    run.sql("update stormproof.txn_sink set rows = rows + 1 where txid = 5 and sink = 'postgres'")
    found = verify(run, "--since", "4", status=1)
    assert {violation["txid"] for violation in found["violations"]} == {5}


def test_after_a_violation_the_next_check_looks_at_it_again(run: Operated) -> None:
    verify(run)
    more(run, 9)
    run.sql("update stormproof.txn_sink set rows = rows + 1 where txid = 5 and sink = 'postgres'")
    since_last(run, status=1)
    more(run, 9)
    report = since_last(run, status=1)
    assert (report["first"], report["last"]) == (4, 9)
    run.sql("update stormproof.txn_sink set rows = rows - 1 where txid = 5 and sink = 'postgres'")
    assert since_last(run)["first"] == 4
    assert since_last(run)["first"] == 10


def test_a_verdict_with_a_gap_before_it_is_not_continued(run: Operated) -> None:
    verify(run, "--since", "3")
    report = since_last(run)
    assert (report["first"], "all_checked" in said(report)) == (1, True)
    more(run, 9)
    verify(run, "--since", "6")
    assert since_last(run)["first"] == 4


def test_a_verdict_of_the_logs_alone_is_not_continued_by_one_that_reads_tables(run: Operated) -> None:
    verify(run)
    assert since_last(run, "--deep")["first"] == 1
    assert since_last(run)["first"] == 4
    assert since_last(run, "--deep", "--sink", "delta")["first"] == 1


def test_a_restore_of_rows_that_were_checked_before_is_found(run: Operated) -> None:
    verify(run)
    more(run, 9)
    table = DeltaTable(run.cell.folder / "lake" / "words")
    table.restore(2)
    report = since_last(run, status=1)
    assert (report["first"], "all_checked" in said(report)) == (1, True)
    assert {violation["sink"] for violation in report["violations"]} == {"delta"}


def test_a_message_that_waits_for_its_retry_keeps_its_batch_in_the_next_check(run: Operated) -> None:
    verify(run)
    run.sql(
        "update stormproof.txn set state = 'open', ended_at = null where txid = 3 and "
        "incarnation = (select incarnation from stormproof.topology)"
    )
    assert verify(run, "--since", "1", status=1)["chain"]["settled_upto"] in (None, 2)


def test_a_prune_beyond_the_last_verdict_has_all_of_it_checked(run: Operated) -> None:
    verify(run)
    more(run, 9)
    run.command("ledger", "prune", NAME, "--older-than", "0s")
    report = since_last(run)
    assert "all_checked" in said(report)
    assert report["chain"]["chain_from"] == report["pruned_upto"] + 1
    more(run, 3)
    assert since_last(run)["first"] == newest(run)


def test_a_time_names_the_first_batch_that_had_not_ended_by_then(run: Operated) -> None:
    ((at,),) = run.sql("select ended_at from stormproof.txn where txid = 2")
    assert verify(run, "--since", at.isoformat())["first"] == 2
    assert verify(run, "--since", "0s")["checked"]["txids"] == 0
