"""Runs the suite for map states by hand, and says which cases fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stormproof.testing import MapStateConformance
from stormproof.trident.state.protocol import StateFactory


def failing(fresh: Callable[[], Callable[[], StateFactory]], **attributes: object) -> set[str]:
    """The names of the cases that a map fails; `fresh` gives, for each case, a `make` over a new store."""
    failed: set[str] = set()
    for name in dir(MapStateConformance):
        if not name.startswith("test_"):
            continue
        for arguments in _arguments(getattr(MapStateConformance, name)):
            case: Any = getattr(_suite(fresh(), attributes), name)
            try:
                case(**arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever a broken store leads to
                failed.add(name.removeprefix("test_"))
    return failed


def _suite(made: Callable[[], StateFactory], attributes: dict[str, object]) -> MapStateConformance:
    class Suite(MapStateConformance):
        def make(self) -> StateFactory:
            return made()

    suite = Suite()
    for name, value in attributes.items():
        setattr(suite, name, value)
    return suite


def _arguments(case: Any) -> Iterator[dict[str, object]]:
    """Every combination that `pytest.mark.parametrize` asks for."""
    axes: list[list[dict[str, object]]] = [
        [{mark.args[0]: value} for value in mark.args[1]] for mark in getattr(case, "pytestmark", [])
    ]
    for chosen in itertools.product(*axes):
        yield {key: value for part in chosen for key, value in part.items()}
