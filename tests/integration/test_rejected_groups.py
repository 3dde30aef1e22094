"""A row of a group that a table refuses: the group's own messages are rejected there, and every other group is counted
without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.crashes import KILLED, run_driver
from support.grouping import BATCHES, NAME, TOTALS, WORDS, build, counts_of, taken
from support.operated import Operated

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import Guarantee
from stormproof.trident.driver import recovery

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

LINES = [b"a b", b"bad c", b"d", b"e bad bad f", b"a c", b"g", b"a g", b"c h", b"i", b"a"]


@pytest.fixture
def grouping(operated: Operated) -> Operated:
    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=100))
    operated.run(build(operated.cell))  # makes the tables
    return operated


def run(grouping: Operated) -> Any:
    return grouping.run(build(grouping.cell))


def counted(grouping: Operated, table: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for word, n in grouping.sql(f"select word, n from {table}"):
        found[word] += n
    return found


def rejected(grouping: Operated) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for sink, payload in grouping.sql("select sink, payload from stormproof.reject order by number"):
        found.setdefault(sink, []).append(bytes(payload))
    return found


def no_bad(word: str, _n: int) -> bool:
    return word == "bad"


def at_most_three(_word: str, n: int) -> bool:
    return n > 3


def out_of(lines: Sequence[bytes], kept: Sequence[bytes]) -> list[bytes]:
    return [line for line in lines if line not in kept]


def test_a_refused_group_takes_its_own_messages_and_no_other(grouping: Operated) -> None:
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(*LINES)
    ran = run(grouping)
    kept = taken(LINES, no_bad)
    assert (ran.rejected, ran.messages, ran.failed) == (2, 8, 0)
    assert counted(grouping, BATCHES) == counts_of(kept)
    assert counted(grouping, TOTALS) == counts_of(LINES)
    assert rejected(grouping) == {"batches": [b"bad c", b"e bad bad f"]}
    assert grouping.sql("select distinct rows, sqlstate, state from stormproof.reject") == [(0, "23514", "open")]
    assert grouping.kinds("notices", grouping.verify()) == ["rejected"]


def test_groups_are_recounted_under_at_least_once_too(grouping: Operated) -> None:
    grouping = replace(grouping, cell=replace(grouping.cell, guarantee=Guarantee.AT_LEAST_ONCE))
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(*LINES)
    assert run(grouping).rejected == 2
    assert counted(grouping, BATCHES) == counts_of(taken(LINES, no_bad))
    assert counted(grouping, TOTALS) == counts_of(LINES)
    grouping.verify()


def test_a_total_that_the_table_refuses_takes_the_messages_of_this_batch(grouping: Operated) -> None:
    """Overflow and CHECK of a fold: what earlier batches counted stays. Both sinks refuse groups of their own."""
    grouping.sql(f"alter table {TOTALS} add check (n <= 3); alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(b"a", b"g b")
    run(grouping)
    grouping.put(*LINES)
    assert run(grouping).rejected == 6
    held = counts_of([b"a", b"g b"])
    kept = taken(LINES, at_most_three, held)
    assert counted(grouping, TOTALS) == held + counts_of(kept)
    assert counted(grouping, BATCHES) == held + counts_of(taken(LINES, no_bad))
    assert rejected(grouping) == {"batches": out_of(LINES, taken(LINES, no_bad)), "totals": out_of(LINES, kept)}
    assert grouping.kinds("notices", grouping.verify()) == ["rejected", "rejected"]


def test_what_is_left_of_a_group_may_be_refused_in_its_turn(grouping: Operated) -> None:
    """The sum of what is left is another one: the batch's job runs again until the table takes every group."""
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad' and not (word = 'c' and n = 1))")
    lines = [b"bad c", b"c d", b"d", b"e"]
    grouping.put(*lines)
    assert run(grouping).rejected == 2
    assert counted(grouping, BATCHES) == Counter(d=1, e=1)
    assert rejected(grouping) == {"batches": [b"bad c", b"c d"]}
    grouping.verify()


def test_a_retried_message_of_a_group_goes_to_its_sink_alone(grouping: Operated) -> None:
    grouping.sql(f"alter table {BATCHES} add constraint rule check (word <> 'bad')")
    grouping.put(*LINES)
    run(grouping)
    grouping.command("dead-letters", "requeue", NAME, "--all", "--yes")
    assert run(grouping).rejected == 2  # the table refuses them still
    grouping.sql(f"alter table {BATCHES} drop constraint rule")
    grouping.command("dead-letters", "requeue", NAME, "--all", "--yes")
    run(grouping)
    for table in (BATCHES, TOTALS):
        assert counted(grouping, table) == counts_of(LINES)
    assert Counter(word for (word,) in grouping.sql(f"select word from {WORDS}")) == counts_of(LINES)
    assert grouping.verify()["violations"] == []


def test_more_messages_than_may_be_rejected_block_the_batch(grouping: Operated) -> None:
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(*[b"bad"] * 11, *[b"good"] * 19)
    with pytest.raises(SinkRefused, match="more than 10 messages"):
        run(grouping)
    assert counted(grouping, BATCHES) == Counter()
    assert grouping.sql("select state, cause from stormproof.txn where txid = 1") == [("blocked", "too_many_rejects")]
    assert rejected(grouping) == {}


POINTS = [p.name for p in FAILPOINTS.values() if p.scope in ("every", "postgres", "group", "recovery")]
"""Among them recount.after."""


def test_groups_are_recounted_once_wherever_a_driver_dies(grouping: Operated) -> None:
    """Each start dies at another place, with a batch in which a table refuses groups; the last one runs to the end."""
    grouping = replace(grouping, cell=replace(grouping.cell, rejects_max_share=1.0))
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    lines: list[bytes] = []
    ends: dict[str, int] = {}
    for number, point in enumerate(POINTS):
        more = [b"a%d b" % number, b"bad b", b"b c%d" % number]
        grouping.put(*more)
        lines += more
        ends[point] = run_driver(grouping.cell, f"{point}=kill")
    assert set(ends.values()) <= {0, KILLED}, ends
    assert list(ends.values()).count(KILLED) > len(POINTS) - 4  # recovery may have found nothing to do
    assert run_driver(grouping.cell) == 0
    assert counted(grouping, BATCHES) == counts_of([line for line in lines if b"bad" not in line])
    assert counted(grouping, TOTALS) == counts_of(lines)
    assert rejected(grouping) == {"batches": [line for line in lines if b"bad" in line]}
    grouping.verify()


def test_control_a_recount_with_the_groups_messages_is_seen(
    grouping: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job runs again with the messages of refused groups: the table refuses them again, and the batch is blocked."""
    monkeypatch.setattr(recovery, "_messages", lambda _: {})
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(*LINES)
    with pytest.raises(SinkRefused, match="check constraint"):
        run(grouping)
    assert counted(grouping, BATCHES) == Counter()


def test_control_what_is_left_out_and_not_recorded_is_a_violation(
    grouping: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouping.sql(f"alter table {BATCHES} add check (word <> 'bad')")
    grouping.put(*LINES)
    run(grouping)
    grouping.sql("delete from stormproof.reject where number = (select min(number) from stormproof.reject)")
    assert "counts" in grouping.kinds("violations", grouping.verify(status=1))
