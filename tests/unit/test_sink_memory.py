"""The memory sink's planned faults, and what outlives a crash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.sink_harness import SinkHarness

from stormproof.core.base.errors import StoreUnavailable
from stormproof.sinks.contract.protocol import CommitOutcome
from stormproof.sinks.stores.memory import FaultPoint, MemorySink, MemoryTable


@pytest.mark.parametrize("at", list(FaultPoint))
def test_a_fault_strikes_once_and_the_store_outlives_it(tmp_path: Path, at: FaultPoint) -> None:
    harness = SinkHarness("memory-append", tmp_path, None)
    store = MemoryTable()
    harness.sink = MemorySink("counts", store=store, staging=tmp_path / "staged")
    session = harness.open()
    transaction = harness.prepare(session, 1, None, {"a": 1})
    store.fail(at, StoreUnavailable("lost"), txid=1)
    with pytest.raises(StoreUnavailable):
        session.commit(transaction, checked=True)
    # A new driver, with the same store.
    harness.sink = MemorySink("counts", store=store, staging=tmp_path / "staged")
    expected = CommitOutcome.APPLIED if at is FaultPoint.BEFORE else CommitOutcome.ALREADY_HELD
    assert harness.open(epoch=2).commit(transaction, checked=True).outcome is expected
    assert harness.rows() == Counter({("a", 1): 1})


def test_a_folder_of_its_own_goes_with_the_sink() -> None:
    sink = MemorySink("counts")
    harness = SinkHarness("memory-append", Path("unused"), None)
    folder = Path(sink.open(harness.identity, harness.input, 1).writer().directory)
    assert folder.is_dir()
    del sink
    assert not folder.exists()
