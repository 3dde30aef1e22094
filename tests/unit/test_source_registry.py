"""Kinds of sources: what a connector's class says under its kind, and that nobody takes another's."""

from __future__ import annotations

import pytest

from stormproof import MemorySource, PostgresQueue
from stormproof.core.pending import registry
from stormproof.core.pending.registry import connector_of
from stormproof.errors import UsageError
from stormproof.source import PendingSource, register_source


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_a_class_that_was_refused_is_not_known() -> None:
    other = type("Other", (MemorySource,), {"KIND": PostgresQueue.KIND})
    with pytest.raises(UsageError, match="'queue' is taken; give Other another KIND"):
        register_source(other)
    assert connector_of(PostgresQueue.KIND) is PostgresQueue


def test_a_kind_has_one_class_which_may_be_registered_again() -> None:
    mine = register_source(type("Mine", (MemorySource,), {"KIND": "mine"}))
    assert register_source(mine) is connector_of("mine") is mine
    with pytest.raises(UsageError, match="taken"):
        register_source(type("Yours", (MemorySource,), {"KIND": "mine"}))
    assert connector_of("mine") is mine


def test_a_kind_that_nobody_registered_is_read_as_numbered_messages() -> None:
    assert connector_of("unknown") is PendingSource
