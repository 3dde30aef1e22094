"""`audit verify --deep` raises no alarm over random histories of tables that are as they should be, and misses no change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from support import table_histories
from support.command_line import CommandLine
from support.operated import Operated
from support.plants import plant
from support.table_histories import History

pytestmark = [pytest.mark.postgres]
NAME: Final = table_histories.NAME

TABLES: Final = {
    "delta": "plain",
    "delta-parts": "parts",
    "delta-upsert": "newest",
    "postgres": "plain",
    "postgres-lineage": "traced",
    "delta-spark": "sparks",
    "delta-spark-upsert": "sparks_newest",
}
"""The tables in which a changed row is looked for."""


@pytest.mark.sampled(0.01)
@pytest.mark.timeout(900)  # ended within a call of Spark's, it would leave the session of the tests behind it unusable
@pytest.mark.parametrize("seed", range(100))
def test_no_alarm_where_every_table_is_as_it_should_be(operated: Operated, seed: int) -> None:
    run = replace(operated, cell=replace(operated.cell, batch_messages=4))
    compared = 0

    def check(step: str, names: list[str]) -> None:
        nonlocal compared
        for name in names:
            # The whole comes last: the others continue the verdict of the step before.
            for options in (("--since", "last"), ("--deep", "--since", "last"), ("--deep",)):
                text = verified(run, name, *options)
                wrong = [one for one in text["violations"] if not is_of_nan(one)]
                assert not wrong, f"after {step}: {wrong}"
                assert not text["unknowns"], f"after {step}: {text['unknowns']}"
                compared += sum(table["rows"] for table in text["tables"])

    History(run, seed, check, by_spark=seed % 10 == 9).play(5)
    assert compared > 0


def verified(run: Operated, name: str, *options: str) -> dict[str, Any]:
    """A check that finds nothing wrong; what it did not compare, it says in its status."""
    status, out, err = CommandLine(run.capture).ended("audit", "verify", name, *options, "--json")
    report: dict[str, Any] = json.loads(out)
    assert status == {"clean": 0, "violation": 1}.get(report["verdict"], 4), err
    return report


def is_of_nan(violation: dict[str, Any]) -> bool:
    """Whether it is one of the files that another's OPTIMIZE by delta-rs writes: it leaves NaN out of their bounds."""
    return violation["kind"] == "statistics_wrong" and " by x;" in violation["text"]


def begins_anew_and_is_restored(history: History) -> None:
    """The rows of the life before come along with a table that only the new one adopts."""
    history.begins_anew()
    history.is_restored_elsewhere()


HISTORIES: Final[dict[str, tuple[bool, Callable[[History], None], frozenset[str]]]] = {
    "restored elsewhere": (False, History.is_restored_elsewhere, frozenset()),
    "taken over": (False, History.is_taken_over, frozenset({"postgres", "postgres-lineage"})),
    "begun anew": (False, History.begins_anew, frozenset({"postgres", "postgres-lineage"})),
    "begun anew, then restored": (False, begins_anew_and_is_restored, frozenset({"postgres", "postgres-lineage"})),
    "with a further column": (False, History.gets_wider, frozenset({"postgres"})),
    "committed by Spark": (True, History.runs, frozenset()),
}
"""Whether Spark commits, what happens, and the tables that the report then says not to compare."""


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("what", HISTORIES)
def test_a_planted_change_is_found_in_a_table_with_such_a_history(operated: Operated, what: str) -> None:
    by_spark, happens, not_compared = HISTORIES[what]
    run = replace(operated, cell=replace(operated.cell, batch_messages=4))
    history = History(run, 7, lambda step, names: None, by_spark=by_spark)
    history.runs()
    history.runs()
    happens(history)
    history.runs()
    name = history.names[-1]
    assert verified(run, name, "--deep")["violations"] == []
    planted = {sink: table for sink, table in TABLES.items() if by_spark or "spark" not in sink}
    for sink, table in planted.items():
        plant(run, sink.partition("-")[0], table, "a row is changed")
    report = run.command("audit", "verify", name, "--deep", status=1)
    found = {violation["sink"] for violation in report["violations"]}
    assert found == planted.keys() - not_compared
    left_out = {table["sink"] for table in report["tables"] if table["left_out"]}
    assert not_compared <= left_out
