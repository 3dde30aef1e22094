"""A topology's first row in the ledger: what another driver made meanwhile is met by another look, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.message import Guarantee
from stormproof.trident.ledger import ledger as ledger_module
from stormproof.trident.ledger.database import memory_ledger_engine
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import Run


class Watched(Ledger):
    """Counts its looks at which life a new name gets; at the second one it may see what a snapshot from before shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lives: str, stale: str | None = None) -> None:
        left = iter(lives)
        super().__init__(memory_ledger_engine(), SystemClock(), lambda: next(left))
        self.looks = 0
        look = ledger_module.life_of

        def counted(connection: sa.Connection, topology: str, new_incarnation: Callable[[], str]) -> str:
            self.looks += 1
            found = look(connection, topology, new_incarnation)
            return stale if stale is not None and self.looks == 2 else found

        monkeypatch.setattr(ledger_module, "life_of", counted)

    def begin(self, topology: str, fingerprint: str | None = "f") -> Run:
        return self.start(
            topology,
            fingerprint=cast("str", fingerprint),
            guarantee=Guarantee.EXACTLY_ONCE,
            source="lines",
            graph=Graph({}),
        )


def test_two_names_of_one_life_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Watched(monkeypatch, "q", "q", "q")
    lives = [ledger.begin(name).incarnation for name in ("one", "two", "three")]
    assert lives[0] == "q"
    assert len(set(lives)) == 3
    assert all(life.startswith("q-") for life in lives[1:])
    assert [ledger.begin(name).incarnation for name in ("one", "two", "three")] == lives


def test_a_life_that_is_taken_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Watched(monkeypatch, "q", "q", "q", stale="q")
    ledger.begin("one")
    assert ledger.begin("two").incarnation.startswith("q-")
    assert ledger.looks == 3


def test_what_no_other_driver_can_have_broken_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Watched(monkeypatch, *"qrstu")
    with pytest.raises(IntegrityError, match=r"NOT NULL constraint failed: topology\.fingerprint"):
        ledger.begin("one", fingerprint=None)
    assert ledger.looks == 1
