"""Names of sinks that were given none: made from the table's."""

from __future__ import annotations

import pytest

from stormproof import DeltaSink, PostgresSink
from stormproof.core.graph.checks import checked_name

TABLES = [
    'public."a.b"',
    '"public.a"."b"',
    "Mixed Case",
    "mixed case",
    'say "hi"',
    "x" * 63,
    "x" * 62 + "y",
    "ж" * 31,
    "zażółć.ギ",
    "a-b",
    "a b",
]
FOLDERS = ["lake/my orders", "lake/my-orders", "lake/zażółć", "lake/" + "x" * 200, "lake/\udcff", "lake/\ud800", "/"]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_any_name_gives_its_sink_a_valid_name(table: str) -> None:
    name = PostgresSink(table).name
    assert checked_name(name, "sink") == name
    assert name.startswith("postgres.")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_any_name_gives_its_sink_a_valid_name(folder: str) -> None:
    name = DeltaSink(folder).name
    assert checked_name(name, "sink") == name
    assert name.startswith("delta.")


def test_different_tables_give_different_names() -> None:
    assert len({PostgresSink(table).name for table in TABLES}) == len(TABLES)
    assert len({DeltaSink(folder).name for folder in FOLDERS}) == len(FOLDERS)


def test_a_name_that_is_valid_is_kept_as_it_is() -> None:
    assert PostgresSink("public.orders").name == PostgresSink('public."orders"').name == "postgres.public.orders"
    assert DeltaSink("lake/orders").name == "delta.orders"
