"""What every source promises, asked of `FileSource` over objects of a store."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.brokers.object_store import ObjectStore
from support.queues import prepared_database
from support.source_harness import FileHarness

from stormproof.core.postgres.database import Database
from stormproof.core.storage.protocol import use_storage
from stormproof.testing import SourceConformance, SourceHarness


@dataclass
class StoredFilesHarness(FileHarness):
    """Each put is a new object."""

    server: ObjectStore | None = None

    def put(self, payloads: Sequence[bytes]) -> None:
        assert self.server is not None
        content = b"".join(payload + b"\n" for payload in payloads)
        if self.format == "parquet":
            sink = io.BytesIO()
            pq.write_table(pa.table({"other": [0] * len(payloads), "payload": list(payloads)}), sink)
            content = sink.getvalue()
        prefix = self.place.partition(f"{self.server.url}/")[2]
        obstore.put(self.server.store(), f"{prefix}/{self.files:05}.part", content)
        self.files += 1


@pytest.mark.postgres
class TestFilesInAnObjectStore(SourceConformance):
    @pytest.fixture(params=["parquet", "text"])
    def harness(
        self, request: pytest.FixtureRequest, database: Database, object_store: ObjectStore, tmp_path: Path
    ) -> Iterator[SourceHarness]:
        url = f"{object_store.url}/{uuid.uuid4().hex}"
        use_storage(url, object_store.options())
        harness = StoredFilesHarness(
            prepared_database(database), "stored", tmp_path, request.param, url=url, server=object_store
        )
        yield harness
        harness.close()
