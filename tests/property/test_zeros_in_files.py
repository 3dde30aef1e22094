"""A file that was written whole is never taken for one that a power loss left zeros in."""

from __future__ import annotations

import random
import re
import tempfile
from itertools import chain
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from stormproof.sinks.delta.power_loss import BLOCK_BYTES, MERGED_FILES, lost_block

RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 4_000)), min_size=1, max_size=6)
"""Runs of values, each of zeros or of random bits. Twice as many bytes as they are together are less than 60,000."""


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


def test_the_longest_run_of_zeros_that_is_left_as_it_is() -> None:
    """As long as a block only behind some 60,000 bytes that repeat nothing, and never much longer."""
    bits, longest = random.Random(1), dict[int, int]()
    with tempfile.TemporaryDirectory() as folder:
        for before in [*range(0, 60_000, 2_500), *range(60_000, 65_536, 200)]:
            path = str(Path(folder) / str(before))
            value = bits.randbytes(before) + bytes(70_000)
            write_deltalake(path, pa.table({"b": pa.array([value], pa.binary())}), writer_properties=MERGED_FILES)
            (file,) = DeltaTable(path).file_uris()
            longest[before] = max(len(run) for run in re.findall(rb"\0+", Path(file).read_bytes()))
    assert max(n for before, n in longest.items() if before < 60_000) < BLOCK_BYTES < max(longest.values()) < 6_000
