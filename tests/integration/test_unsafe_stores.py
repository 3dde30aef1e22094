"""An object store that lets a second PUT overwrite the first, whatever its condition, can hold no table."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest
from support.brokers.s3_server import OPEN, S3Server
from support.lossy_store import unconditional
from support.sink_harness import ObjectStoreHarness

from stormproof.core.errors import SinkRefused
from stormproof.sinks.delta import opening
from stormproof.sinks.delta.log import DeltaLog


@pytest.fixture
def harness(s3_server: S3Server) -> Iterator[ObjectStoreHarness]:
    if not s3_server.TAKES_UNSIGNED:
        pytest.skip(f"{s3_server.NAME} wants every request signed, and a proxy that changes one cannot sign it")
    with unconditional(s3_server.port) as port:
        url = f"{s3_server.url}/{OPEN}/{uuid.uuid4().hex}"
        yield ObjectStoreHarness("append", url, s3_server.unsigned_options(port))


def test_a_store_without_conditional_puts_is_refused_and_nothing_is_made(harness: ObjectStoreHarness) -> None:
    with pytest.raises(SinkRefused, match=r"overwrites an object.*Use a store with conditional PUTs"):
        harness.open()
    assert not harness.values()


def test_control_in_such_a_store_a_log_entry_overwrites_another(
    harness: ObjectStoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is late by one version takes the rows of the other one away, and neither gets an error."""
    monkeypatch.setattr(opening, "require_conditional_put", lambda *_: None)
    session = harness.open()
    log = DeltaLog(f"{harness.url}/counts")
    session.commit(harness.prepare(session, 1, None, {"first": 1}), checked=True)
    entry = log.entry_path(harness.table().version())
    assert harness.rows() == Counter({("first", 1): 1})
    log.files.put_new(entry, b'{"commitInfo": {"operation": "WRITE"}}\n')
    assert not harness.rows()
