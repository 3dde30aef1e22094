"""What every sink promises, asked of the Delta sink over tables in an object store."""

from __future__ import annotations

import uuid

import pytest
from support.brokers.object_store import ObjectStore
from support.sink_harness import ObjectStoreHarness

from stormproof.testing import SinkConformance


class TestDeltaInAnObjectStore(SinkConformance):
    @pytest.fixture(params=["append", "upsert", "fold"])
    def harness(self, request: pytest.FixtureRequest, object_store: ObjectStore) -> ObjectStoreHarness:
        return ObjectStoreHarness(request.param, f"{object_store.url}/{uuid.uuid4().hex}", object_store.options())
