"""Our own sources pass the suite that every source must pass (`stormproof.testing.SourceConformance`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.queues import prepared_database
from support.source_harness import IteratorHarness, MemoryHarness, PostgresHarness

from stormproof.core.postgres.database import Database
from stormproof.testing import SourceConformance, SourceHarness


class TestMemorySource(SourceConformance):
    """The source in memory."""

    @pytest.fixture
    def harness(self) -> SourceHarness:
        return MemoryHarness()


class TestIteratorSource(SourceConformance):
    """The adapter for a user's own client."""

    @pytest.fixture
    def harness(self) -> Iterator[SourceHarness]:
        harness = IteratorHarness()
        yield harness
        harness.close()


@pytest.mark.postgres
class TestPostgresQueue(SourceConformance):
    """The queue in Postgres."""

    @pytest.fixture
    def harness(self, database: Database) -> Iterator[SourceHarness]:
        harness = PostgresHarness(prepared_database(database))
        yield harness
        harness.close()
