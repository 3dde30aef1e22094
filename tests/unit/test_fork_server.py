"""What the fork server of the crash tests loads before it forks."""

from __future__ import annotations

import importlib

import pytest
from support.crashes import PRELOADED


@pytest.mark.parametrize("module", PRELOADED)
def test_it_is_there(module: str) -> None:
    """The fork server leaves out in silence what it cannot import; each of its children would import it anew."""
    importlib.import_module(module)
