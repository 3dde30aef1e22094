"""The suite that every pending source must pass: subclass `SourceConformance` for a source of your own.

    class TestMySource(SourceConformance):
        @pytest.fixture
        def harness(self) -> Iterator[SourceHarness]:
            yield MyHarness()

Each case states one promise. A source that breaks one loses messages, doubles them, or never gets rid of a bad one.
"""

from __future__ import annotations

from typing import Any

import pytest

from stormproof.testing.sources.failures import FailureCases, MateCases
from stormproof.testing.sources.harness import Message, PendingSourceHarness, SourceHarness, messages_of
from stormproof.testing.sources.leases import LeaseCases
from stormproof.testing.sources.slices import SliceCases

__all__ = ["Message", "PendingSourceHarness", "SourceConformance", "SourceHarness", "messages_of"]


class SourceConformance(SliceCases, LeaseCases, FailureCases, MateCases):
    """What every pending source must do. A subclass gives the fixture `harness`, fresh for each case."""

    @pytest.fixture
    def harness(self, *args: Any, **kwargs: Any) -> Any:
        """A fresh, empty store; a subclass returns one, or yields one and closes it."""
        raise NotImplementedError("a subclass of SourceConformance has a fixture `harness`")
