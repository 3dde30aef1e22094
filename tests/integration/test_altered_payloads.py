"""Messages that were set aside: a payload or a row that somebody changed in the ledger is named, and is not applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.crashes import Cell
from support.operated import Operated
from support.topologies import source_of

from stormproof import PostgresSink, Topology

pytestmark = [pytest.mark.postgres]
NAME = "altered"


def read(line: str) -> int:
    return int(line)


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).map(read, "line", schema="n int")
    rows.into(PostgresSink("numbers", name="numbers", database=cell.database))
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    """A dead letter, a reject, and a message that is applied."""
    found = replace(operated, cell=replace(operated.cell, build=build))
    found.sql("create table numbers (n int check (n < 100))")
    found.put(b"1", b"none", b"100")
    found.run(build(found.cell), rejects_max_share=1.0)
    return found


LETTER = "update stormproof.dead_letter set payload = '7'"
REJECT = "update stormproof.reject set {} = '7'"


def test_what_was_set_aside_and_is_untouched_is_clean_and_opened_again(run: Operated) -> None:
    assert run.verify()["violations"] == []
    run.sql("alter table numbers drop constraint numbers_n_check")
    run.command("dead-letters", "requeue", NAME, "--all")
    run.run(build(run.cell))
    assert run.sql("select n from numbers order by n") == [(1,), (100,)]
    assert run.verify()["violations"] == []


@pytest.mark.parametrize("change", [LETTER, REJECT.format("payload"), REJECT.format('"row"')])
def test_what_was_changed_is_named(run: Operated, change: str) -> None:
    run.sql(change)
    assert run.kinds("violations", run.verify(status=1)) == ["payload_changed"]


def test_a_retry_that_was_changed_while_it_waits_is_named(run: Operated) -> None:
    run.command("dead-letters", "requeue", NAME, "--all")
    run.sql("update stormproof.pending_retry set payload = '7'")
    assert "payload_changed" in run.kinds("violations", run.verify(status=1))


def test_what_was_changed_is_not_opened_again(run: Operated) -> None:
    run.sql(LETTER)
    run.sql(REJECT.format("payload"))
    said = run.command("dead-letters", "requeue", NAME, "--all", status=2)["error"]["message"]
    assert "is not the one that was set aside" in said
    refused = run.command("dead-letters", "requeue", NAME, "--sink", "numbers", "--yes", status=1)["refused"]
    assert "is not what was rejected" in next(iter(refused.values()))
    assert run.sql("select count(*) from stormproof.pending_retry") == [(0,)]


def test_control_without_the_digest_it_goes_unnoticed(run: Operated) -> None:
    run.sql("update stormproof.dead_letter set digest = null, payload = '7'")
    assert run.verify()["violations"] == []
