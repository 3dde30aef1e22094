"""The numbers of docs/concepts.md, told to a real acker with 4 bits; and that its lists are whole."""

from __future__ import annotations

import re
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
from support.tuple_trees import ids_of, words_of

from stormproof.core.graph.components import OutputStream
from stormproof.core.graph.grouping import GroupingKind
from stormproof.core.message import FailureReason
from stormproof.core.tracking.acker import Acker

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
EXAMPLES = {
    name: [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for name, table in re.findall(r"<!-- example: (.*?) -->\n((?:\|.*\n)+)", PAGE)
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
    sums = re.findall(r"([01]{4}(?: \^ [01]{4})+) = ([01]{4})", PAGE)
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
