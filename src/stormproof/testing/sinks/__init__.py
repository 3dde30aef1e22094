"""The suite that every sink must pass: subclass `SinkConformance` for a sink of your own.

    class TestMySink(SinkConformance):
        @pytest.fixture
        def harness(self, tmp_path: Path) -> SinkHarness:
            return MyHarness(tmp_path)

Each case states one promise. A sink that breaks one loses or doubles rows after a crash. The suite is for appends;
`FoldCases` is mixed in for a sink that folds, `UpsertCases` for one that upserts, `RefuseCases` for one that rejects single
messages, whose rows its table refuses, `MisfitCases` for one that rejects the messages of rows that its columns cannot hold:

    class TestMyFolds(FoldCases, SinkConformance): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stormproof.sinks.contract.protocol import SinkSession
from stormproof.testing.sinks.by_key import FoldCases, UpsertCases
from stormproof.testing.sinks.commits import CommitCases, FileCases, TableCases
from stormproof.testing.sinks.harness import SinkHarness
from stormproof.testing.sinks.refusals import MisfitCases, RefuseCases

__all__ = ["FoldCases", "MisfitCases", "RefuseCases", "SinkConformance", "SinkHarness", "UpsertCases"]


class SinkConformance(CommitCases, TableCases, FileCases):
    """What every sink must do. A subclass gives the fixture `harness`, over a fresh store for each case."""

    @pytest.fixture
    def harness(self, *args: Any, **kwargs: Any) -> Any:
        """A sink over a fresh, empty store; a subclass returns one, or yields one and closes it."""
        raise NotImplementedError("a subclass of SinkConformance has a fixture `harness`")

    @pytest.fixture
    def session(self, harness: SinkHarness) -> Iterator[SinkSession]:
        """The sink, opened by the first driver."""
        opened = harness.open()
        yield opened
        opened.close()
