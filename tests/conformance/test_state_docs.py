"""The page about states says what is: its table is the compiler's, its code runs, and its store passes the suite."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from support.state_suite import failing

from stormproof.core.contract.source import SourceKind
from stormproof.core.postgres.database import Database
from stormproof.trident.state.key_value import KeyValueStore, OpaqueMap
from stormproof.trident.state.matrix import service
from stormproof.trident.state.protocol import StateFactory, StateKind

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's code defines, one block after the other, as a module that can be pickled from."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("state_page")
    monkeypatch.setitem(sys.modules, "state_page", module)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - our own page
    return module.__dict__


def test_the_table_is_the_compilers() -> None:
    found = re.search(r"<!-- matrix: .*? -->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == matrix_as_markdown(), "paste in what matrix_as_markdown() of this file returns"


def matrix_as_markdown() -> str:
    lines = [f"| source | {' | '.join(f'{state} state' for state in StateKind)} |", "| --- | --- | --- | --- |"]
    outcomes = ([service(source, state) for state in StateKind] for source in SourceKind)
    lines += [f"| {source} | {' | '.join(row)} |" for source, row in zip(SourceKind, outcomes, strict=True)]
    return "\n".join(lines)


def test_the_store_passes_the_suite(page: dict[str, Any], tmp_path: Path) -> None:
    numbers = iter(range(1_000))

    def fresh() -> Callable[[], StateFactory]:
        suite = page["TestSqlite"]()
        suite.path = str(tmp_path / f"{next(numbers)}.db")
        make: Callable[[], StateFactory] = suite.make
        return make

    assert failing(fresh) == set()


def test_control_a_store_that_belongs_to_one_thread(page: dict[str, Any], tmp_path: Path) -> None:
    """It would end each run with several batches in flight."""
    numbers = iter(range(1_000))

    def one_thread(path: str) -> KeyValueStore:
        store: Any = page["Sqlite"](path)
        store.connection = sqlite3.connect(path)
        return cast("KeyValueStore", store)

    def fresh() -> Callable[[], StateFactory]:
        path = str(tmp_path / f"{next(numbers)}.db")
        return lambda: OpaqueMap(partial(one_thread, path))

    assert failing(fresh, picklable=False) == {"a_txid_may_be_committed_on_another_thread"}


@pytest.mark.postgres
def test_the_topologies_run(page: dict[str, Any], database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    page["topology"].run(engine="inline", until_idle=True)
    page["words"].run(engine="inline", until_idle=True)
    store = page["Sqlite"]("counts.db")
    found = [json.loads(value)["n"] for value in store.multi_get([b'["man"]', b'["dog"]', b'["apple"]'])]
    store.close()
    assert found == [3, 1, 1]
    assert page["folders"].files == {1: ["man", "dog", "man"]}
