"""The files that a MERGE writes: how they are written, so that a block which a power loss took from one can be found."""

from __future__ import annotations

from typing import Final

import numpy as np
from deltalake import WriterProperties

from stormproof.sinks.files import files_at

BLOCK_BYTES: Final = 4096
"""The page size of Linux, which is what its page cache writes at once; also the default block size of file systems."""

MERGED_FILES: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=64)
"""With these settings an undamaged file practically never has a block of zeros, whatever the table's rows are.

Snappy compresses 64 KiB at a time. It looks for repetitions in steps that grow by a 32nd of the bytes it has passed without
one, and it copies a run of zeros uncompressed up to its second look into that run. This copy can be as long as a block only
behind 60,000 bytes without any repetition, and then the run must also be aligned with the file's blocks. The statistics of a
long value are the only other place where zeros could stand, so they are cut.
"""

_READ_BYTES: Final = 256 * BLOCK_BYTES


def lost_block(path: str) -> int | None:
    """The offset of the first block of zeros in a file that was written with `MERGED_FILES`: a block that never reached the
    disk. None where there is none.

    Decoding alone would miss it: Snappy stores values that it cannot compress as they are, zeros in their place decode as
    other values, and pages have no checksum. The last block, which is usually shorter, needs no look: it ends with the
    format's name, and a file without its end does not decode.

    In the rare case that an undamaged file has such a block, the cost is one needless `retry`.
    """
    at = 0
    with files_at(path).open(path) as file:
        while part := file.read(_READ_BYTES):
            blocks = np.frombuffer(part, np.uint8, len(part) // BLOCK_BYTES * BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
            lost = np.flatnonzero(~blocks.any(axis=1))
            if lost.size:
                return at + int(lost[0]) * BLOCK_BYTES
            at += len(part)
    return None
