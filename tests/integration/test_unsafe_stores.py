"""An object store that lets a second PUT overwrite the first, whatever its condition, can hold no table."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest
from support.brokers.object_store import OPEN, ObjectStore, S3Server
from support.lossy_store import unconditional
from support.sink_harness import ObjectStoreHarness

from stormproof.core.base.errors import SinkRefused
from stormproof.sinks.delta import object_store as store_module
from stormproof.sinks.delta.log import DeltaLog


@pytest.fixture
def harness(object_store: ObjectStore) -> Iterator[ObjectStoreHarness]:
    if not isinstance(object_store, S3Server) or not object_store.TAKES_UNSIGNED:
        pytest.skip(f"{object_store.NAME} wants every request signed, and a proxy that changes one cannot sign it")
    with unconditional(object_store.port) as port:
        url = f"{object_store.url}/{OPEN}/{uuid.uuid4().hex}"
        yield ObjectStoreHarness("append", url, object_store.unsigned_options(port))


def test_a_store_without_conditional_puts_is_refused_and_nothing_is_made(harness: ObjectStoreHarness) -> None:
    with pytest.raises(SinkRefused, match=r"overwrites an object.*Use a store with conditional PUTs"):
        harness.open()
    assert not harness.values()


def test_control_in_such_a_store_a_log_entry_overwrites_another(
    harness: ObjectStoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is late by one version takes the rows of the other one away, and neither gets an error."""
    monkeypatch.setattr(store_module, "require_conditional_put", lambda *_: None)
    session = harness.open()
    log = DeltaLog(f"{harness.url}/counts")
    session.commit(harness.prepare(session, 1, None, {"first": 1}), checked=True)
    entry = log.entry_path(harness.table().version())
    assert harness.rows() == Counter({("first", 1): 1})
    log.files.put_new(entry, b'{"commitInfo": {"operation": "WRITE"}}\n')
    assert not harness.rows()
