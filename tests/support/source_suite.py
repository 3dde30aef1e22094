"""Runs the suite for sources by hand, and says which cases fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stormproof.testing import SourceConformance, SourceHarness


def failing(make: Callable[[], SourceHarness]) -> set[str]:
    """The names of the cases that a source fails."""
    suite = SourceConformance()
    failed: set[str] = set()
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        case = getattr(suite, name)
        for arguments in _arguments(case):
            try:
                case(make(), **arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever a broken source leads to
                failed.add(name.removeprefix("test_"))
    return failed


def _arguments(case: Any) -> Iterator[dict[str, object]]:
    """Every combination that `pytest.mark.parametrize` asks for."""
    axes: list[list[dict[str, object]]] = []
    for mark in getattr(case, "pytestmark", []):
        assert mark.name == "parametrize"
        names, values = mark.args[:2]
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        axes.append([dict(zip(keys, value if len(keys) > 1 else [value], strict=True)) for value in values])
    for chosen in itertools.product(*axes):
        yield {key: value for part in chosen for key, value in part.items()}
