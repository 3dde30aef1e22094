"""What becomes of a retried reject that ends in another way than in its sink; and of one whose topology has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.crashes import Cell
from support.operated import Operated
from support.rejecting import BAD, NAME, PLAIN, STRICT, words_of
from support.topologies import source_of

from stormproof import PostgresSink, Topology
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.base.message import Guarantee

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

LINES = [b"a b", b"bad c", b"d"]
SINKS = {"strict": STRICT, "plain": PLAIN}


class Splitter:
    """Splits lines into words; while it is `broken`, every line fails."""

    broken = False

    def __call__(self, line: str) -> list[str]:
        if Splitter.broken:
            raise ValueError("broken")
        return line.split()


def build(cell: Cell, *sinks: str) -> Topology:
    t = Topology(NAME)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(Splitter(), "line", schema="word string")
    words.into(*(PostgresSink(SINKS[one], name=one, database=cell.database) for one in sinks or SINKS))
    return t


@pytest.fixture
def rejecting(operated: Operated) -> Operated:
    """Two sinks, of which one has rejected a message and would take it now; its reject is `retrying`."""
    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=100))
    run(operated)  # makes the tables
    operated.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    operated.put(*LINES)
    assert run(operated).rejected == 1
    operated.sql("alter table strict_words drop constraint rule")
    operated.command("dead-letters", "requeue", NAME, "--all")
    return operated


def run(rejecting: Operated, *sinks: str) -> Any:
    return rejecting.run(build(rejecting.cell, *sinks))


def words(rejecting: Operated, table: str) -> Counter[str]:
    return Counter(word for (word,) in rejecting.sql(f"select word from {table}"))


def states(rejecting: Operated) -> list[tuple[int, str]]:
    return rejecting.sql("select txid, state from stormproof.reject order by id")


def test_a_retry_for_a_sink_that_is_gone_is_a_reject_again(rejecting: Operated) -> None:
    again = run(rejecting, "plain")
    assert (again.messages, again.rejected) == (0, 1)
    assert states(rejecting) == [(1, "retried"), (2, "open")]
    report = rejecting.verify()
    assert "rejected" in rejecting.kinds("notices", report)
    (listed,) = rejecting.command("dead-letters", "list", NAME)["dead_letters"]
    assert "the topology had no sink 'strict'" in listed["error"]
    assert words(rejecting, PLAIN) == words_of(LINES)
    rejecting.command("dead-letters", "requeue", NAME, "--all", status=1)
    with pytest.raises(PositionMismatch, match="sink 'strict' is back") as caught:
        run(rejecting)
    rejecting.command("ledger", "accept-change", NAME, str(caught.value.details["fingerprint"]))
    run(rejecting)  # with the sink
    rejecting.command("dead-letters", "requeue", NAME, "--all")
    assert run(rejecting).messages == 1
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of(LINES)
    rejecting.verify()


def test_a_retry_that_waits_for_an_at_most_once_run_is_read_before_it_is_confirmed(rejecting: Operated) -> None:
    """A message is confirmed as it is opened, and with that the payload of its retry is gone."""
    lossy = replace(rejecting, cell=replace(rejecting.cell, guarantee=Guarantee.AT_MOST_ONCE))
    lossy.put(b"e f")
    assert run(lossy).messages == 2
    assert states(rejecting) == [(1, "retried")]
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of([*LINES, b"e f"])
    rejecting.verify()


def dies(rejecting: Operated, monkeypatch: pytest.MonkeyPatch) -> str:
    """The retried message fails until it is a dead letter; its id."""
    monkeypatch.setattr(Splitter, "broken", True)
    run(rejecting)
    monkeypatch.setattr(Splitter, "broken", False)
    (letter,) = rejecting.command("dead-letters", "list", NAME)["dead_letters"]
    message: str = letter["id"]
    return message


def test_a_retried_message_that_is_dropped_as_a_dead_letter_is_a_dropped_reject(
    rejecting: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = dies(rejecting, monkeypatch)
    assert states(rejecting) == [(1, "retrying")]
    rejecting.verify()
    rejecting.command("dead-letters", "drop", NAME, message, "--by", "ann", "--why", "broken")
    assert states(rejecting) == [(1, "dropped")]
    rejecting.verify()
    report = rejecting.command("audit", "message", NAME, message)
    assert (report["end"]["kind"], report["end"]["by"]) == ("dropped", "ann")
    run(rejecting)
    assert words(rejecting, STRICT) == words_of(LINES, {BAD})


def test_a_retried_message_that_is_requeued_as_a_dead_letter_goes_to_its_sink_alone(
    rejecting: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = dies(rejecting, monkeypatch)
    rejecting.command("dead-letters", "requeue", NAME, message)
    run(rejecting)
    assert states(rejecting) == [(1, "retried")]
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of(LINES)
    rejecting.verify()
