"""What every sink promises, asked of the Delta sink over tables in an object store."""

from __future__ import annotations

import uuid

import pytest
from support.brokers.s3_server import S3Server
from support.sink_harness import ObjectStoreHarness

from stormproof.testing import SinkConformance


class TestDeltaInAnObjectStore(SinkConformance):
    @pytest.fixture(params=["append", "upsert", "fold"])
    def harness(self, request: pytest.FixtureRequest, s3_server: S3Server) -> ObjectStoreHarness:
        return ObjectStoreHarness(request.param, f"{s3_server.url}/{uuid.uuid4().hex}", s3_server.options())
