"""The numbers of docs/concepts.md, and of the same examples as Storm does it, told to a real acker with 4 bits."""

from __future__ import annotations

import re
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
from support.tuple_trees import ids_of, words_of

from stormproof.core.base.message import FailureReason
from stormproof.core.graph.components import GroupingKind, OutputStream
from stormproof.core.tracking.acker import Acker

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
IN_STORMS_FORM = """
Each tuple has an id. The spout announces its tuple's id; a bolt tells the acker the ids of what it took and of what it
made, in one notice: `1010 ^ 1100 = 0110`. If the ack were heard first, the ack val would be 0 too early.

<!-- example: two messages, ids -->
| what happens | told for the order | its ack val | told for the payment | its ack val |
| --- | --- | --- | --- | --- |
| two spouts emit | `1010` | `1010` | `1011` | `1011` |
| the join emits the pair `1100`, anchored to both | `1100` | `0110` | `1100` | `0111` |
| the join acks the order and the payment | `1010` | `1100` | `1011` | `1100` |
| the sink acks the pair | `1100` | `0000` | `1100` | `0000` |

A message of two tuples, `0010` and `1011`. Bolt 1 makes `0110` of the one, bolt 2 makes `0111` of the other, bolt 3 takes
both.

<!-- example: a unit, ids -->
| what happens | told | ack val |
| --- | --- | --- |
| the spout emits both: `0010 ^ 1011 = 1001` | `1001` | `1001` |
| bolt 1 puts `0110` in the place of `0010` | `0100` | `1101` |
| bolt 2 puts `0111` in the place of `1011` | `1100` | `0001` |
| bolt 3 acks `0110` | `0110` | `0111` |
| bolt 3 acks `0111` | `0111` | `0000` |
"""
EXAMPLES = {
    name: [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for name, table in re.findall(r"<!-- example: (.*?) -->\n((?:\|.*\n)+)", PAGE + IN_STORMS_FORM)
}


def number(cell: str) -> int | None:
    """A cell like `0110`; None for nothing."""
    if cell == "-":
        return None
    (bits,) = re.fullmatch(r"`([01]{4})`", cell).groups()  # type: ignore[union-attr]
    return int(bits, 2)


def is_complete(rows: list[list[str]], column: int) -> bool:
    """Tell an acker what the column says: the ack vals beside it must be its own, and it is not complete before the end."""
    acker = Acker(ids_of([1]))
    for row in rows:
        told = number(row[column])
        if told is not None:
            acker.tell(ids_of([1]), words_of([told]))
        assert int(acker.ack_vals[0]) == number(row[column + 1]), row[0]
        assert row is rows[-1] or len(acker.incomplete()) == 1, f"complete before the end: {row[0]}"
    return len(acker.incomplete()) == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_complete_with_its_last_row_and_not_before(name: str) -> None:
    rows = EXAMPLES[name]
    for column in range(1, len(rows[0]), 2):
        assert is_complete(rows, column)


def test_there_are_four_examples() -> None:
    assert sorted(EXAMPLES) == ["a unit, ids", "a unit, shares", "two messages, ids", "two messages, shares"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_control_without_one_of_its_rows_an_example_is_not_complete(name: str) -> None:
    rows = EXAMPLES[name]
    for column in range(1, len(rows[0]), 2):
        told = [value for row in rows if (value := number(row[column])) is not None]
        for lost in range(1, len(told)):
            assert reduce(xor, told[:lost] + told[lost + 1 :]) != 0


def test_every_sum_on_the_page_is_right() -> None:
    sums = re.findall(r"([01]{4}(?: \^ [01]{4})+) = ([01]{4})", PAGE + IN_STORMS_FORM)
    assert len(sums) >= 5
    for terms, total in sums:
        assert reduce(xor, (int(term, 2) for term in terms.split(" ^ "))) == int(total, 2), f"{terms} = {total}"


def test_the_page_names_every_grouping_and_every_reason() -> None:
    calls = set(re.findall(r"`(\w+)\(", PAGE.split("## Groupings")[1].split("## ")[0]))
    assert {kind.value for kind in GroupingKind} <= {name.rstrip("_") for name in calls}
    assert all(hasattr(OutputStream, name) for name in calls - {"emit"})
    section = PAGE.split("## How a message fails")[1].split("\n## ")[0]
    stated = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert stated == {reason.value for reason in FailureReason} - {FailureReason.OPERATOR.value}
