"""A file that was written whole is never taken for one that a power loss left zeros in."""

from __future__ import annotations

import random
import tempfile
from itertools import chain
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from stormproof.sinks.delta.merged import MERGED_FILES, lost_block

RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), min_size=1, max_size=8)
"""Runs of values, each of zeros or of random bits."""


def numbers(runs: list[tuple[bool, int]], seed: int) -> list[int]:
    bits = random.Random(seed)
    return [*chain.from_iterable([0] * n if zero else [bits.getrandbits(63) for _ in range(n)] for zero, n in runs)]


def in_zeros(runs: list[tuple[bool, int]], seed: int) -> bytes:
    bits = random.Random(seed)
    return b"".join(bytes(n) if zero else bits.randbytes(n) for zero, n in runs)


@settings(max_examples=60, deadline=None)
@given(RUNS, RUNS, st.integers(0, 2**32))
def test_zeros_that_were_written_are_no_lost_block(
    ints: list[tuple[bool, int]], texts: list[tuple[bool, int]], seed: int
) -> None:
    column = numbers(ints, seed)
    blobs = [in_zeros(texts, seed), b"", *(in_zeros([run], seed + 1) for run in texts)]
    few = pa.table({"n": (column * len(blobs))[: len(blobs)], "b": pa.array(blobs, pa.binary())})
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in {"numbers": pa.table({"n": column}), "few": few}.items():
            path = str(Path(folder) / name)
            write_deltalake(path, rows, writer_properties=MERGED_FILES)
            (file,) = DeltaTable(path).file_uris()
            assert lost_block(file) is None
