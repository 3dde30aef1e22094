"""Messages that are read before they are confirmed are read again from memory."""

from __future__ import annotations

import pyarrow as pa

from stormproof.core.pending.memory import MemorySliceReader
from stormproof.trident.driver.batch_records import ReadAlready

READER = MemorySliceReader((1, 2, 3), (b"a", b"b", b"c"))


def test_what_was_read_comes_again_as_its_reader_gave_it() -> None:
    kept = ReadAlready.of(READER, 7)
    assert pa.Table.from_batches(kept.read(7, frozenset(), 10)) == pa.Table.from_batches(
        READER.read(7, frozenset(), 10)
    )
    assert [batch.num_rows for batch in kept.read(7, frozenset(), 2)] == [2, 1]


def test_excluded_messages_are_left_out() -> None:
    (batch,) = ReadAlready.of(READER, 7).read(7, frozenset({2}), 10)
    assert batch.column("id").to_pylist() == [1, 3]
