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
from support.brokers.s3_server import S3Server
from support.queues import prepared_database
from support.source_harness import FileHarness

from stormproof.core.postgres.database import Database
from stormproof.core.storage.address import use_storage
from stormproof.testing import SourceConformance, SourceHarness


@dataclass
class StoredFilesHarness(FileHarness):
    """Each put is a new object."""

    server: S3Server | None = None

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
        self, request: pytest.FixtureRequest, database: Database, s3_server: S3Server, tmp_path: Path
    ) -> Iterator[SourceHarness]:
        url = f"{s3_server.url}/{uuid.uuid4().hex}"
        use_storage(url, s3_server.options())
        harness = StoredFilesHarness(
            prepared_database(database), "stored", tmp_path, request.param, url=url, server=s3_server
        )
        yield harness
        harness.close()
