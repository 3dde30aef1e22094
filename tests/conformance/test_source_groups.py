"""A group of sources passes the suite that every source must pass, whichever of its spouts has the messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.group_harness import SPOUTS, MemoryGroupHarness, PostgresGroupHarness
from support.queues import prepared_database
from support.source_harness import PostgresHarness

from stormproof.core.postgres.database import Database
from stormproof.testing import SourceConformance, SourceHarness


class TestGroupInMemory(SourceConformance):
    """Two sources in memory."""

    @pytest.fixture(params=SPOUTS)
    def harness(self, request: pytest.FixtureRequest) -> SourceHarness:
        return MemoryGroupHarness(into=request.param)


@pytest.mark.postgres
class TestGroupOfQueues(SourceConformance):
    """Two queues of one database."""

    @pytest.fixture(params=SPOUTS)
    def harness(self, request: pytest.FixtureRequest, database: Database) -> Iterator[SourceHarness]:
        harness = PostgresGroupHarness(PostgresHarness(prepared_database(database)), into=request.param)
        yield harness
        harness.close()
