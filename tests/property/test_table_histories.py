"""`audit verify --deep` raises no alarm over random histories in which every table is as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.operated import Operated
from support.table_histories import NAME, History, build

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.02)]


@pytest.mark.parametrize("seed", range(100))
def test_no_alarm_where_every_table_is_as_it_should_be(operated: Operated, seed: int) -> None:
    run = replace(operated, cell=replace(operated.cell, build=build, batch_messages=4))
    compared = 0

    def check(step: str) -> None:
        nonlocal compared
        for options in (("--deep",), ("--since", "last"), ("--deep", "--since", "last")):
            text = run.command("audit", "verify", NAME, *options)
            assert not text["violations"], f"after {step}: {text['violations']}"
            assert not text["unknowns"], f"after {step}: {text['unknowns']}"
        compared += sum(table["rows"] for table in text["tables"])

    History(run, seed, check).play(4)
    assert compared >= 0
