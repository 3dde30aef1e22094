"""Each unit test runs in a folder of its own.

What names no folder of its own is kept below the working directory. Tests that run at the same time in other workers
give their topologies the same incarnation, so in one folder they would sweep each other's files.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's working directory."""
    monkeypatch.chdir(tmp_path)
