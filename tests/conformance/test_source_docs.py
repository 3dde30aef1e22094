"""The page about sources says what works: its code runs, and its harness passes the suite."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.source_suite import failing

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit, Source
from stormproof.testing import SourceHarness

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"


def run_page() -> dict[str, Any]:
    """What the page's code defines, one block after the other."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names


def test_the_client_hears_what_was_applied() -> None:
    names = run_page()
    client, source = names["client"], names["source"]
    assert source.serves(Guarantee.AT_LEAST_ONCE) is None
    client.arrived.append((17, b"job"))
    source.subscribe("s", 1)
    assert source.open(Lease("a", 1), Limit(), 7) is not None
    source.confirm(Lease("a", 1))
    assert client.acknowledged == [17]


def test_the_harness_passes_the_suite() -> None:
    make: Callable[[], SourceHarness] = run_page()["JobsHarness"]
    assert failing(make) == set()


def test_the_table_of_guarantees_is_right() -> None:
    from stormproof import FileSource, IteratorSource, MemorySource, PostgresQueue

    stated = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    every: list[Source] = [PostgresQueue("q"), FileSource("/nowhere"), MemorySource("m")]
    for source in every:
        assert stated[type(source).__name__].startswith("all")
        assert all(source.serves(guarantee) is None for guarantee in Guarantee)
    assert stated["IteratorSource"] == "at-most-once; at-least-once with `confirm`; never exactly-once"
    assert IteratorSource("i", []).serves(Guarantee.AT_LEAST_ONCE) is not None
    assert IteratorSource("i", [], confirm=print).serves(Guarantee.EXACTLY_ONCE) is not None
