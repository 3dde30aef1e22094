"""The tutorial and the operators' page, read and typed by a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.page_reader import Reader

from stormproof.core.postgres.database import Database

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.postgres


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["tutorial.md", "operating.md"])
def test_a_page_does_what_it_says(page: str, database: Database, tmp_path: Path) -> None:
    reader = Reader(tmp_path, database)
    reader.type("stormproof ledger migrate")
    reader.follow((DOCS / page).read_text())
