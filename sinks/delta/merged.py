"""The files that a MERGE writes: how they are written, and how a block that a power loss took from one is seen."""

from __future__ import annotations

from typing import Final

import numpy as np
from deltalake import WriterProperties

from stormproof.sinks.files import files_at

BLOCK_BYTES: Final = 4096
"""What the page cache of Linux writes at once; file systems use blocks of this size unless they are told otherwise."""

MERGED_FILES: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=64)
"""With these settings a whole file has no block of zeros, whatever a table's rows are, but for the rarest of chances.

Snappy takes 64 KiB at a time, and looks for repetitions in steps that grow by a 32nd of what it passed over without one: a
run of zeros is left as it is up to its second look at it. That may be a block's length only behind 60,000 bytes that repeat
nothing, and the run has to lie as the file's blocks do, too. A long value's statistics would be the only other place for
zeros.
"""

_READ_BYTES: Final = 256 * BLOCK_BYTES


def lost_block(path: str) -> int | None:
    """Where a file that was written as `MERGED_FILES` says has a block of zeros, which was never written; None if nowhere.

    Where values have nothing to compress, Snappy keeps them as they are, and zeros in their place decode as other values,
    with nothing to tell: no page has a checksum. The last block, which is mostly shorter, ends with the format's name; a
    file whose end is lost does not decode.

    If the rarest of chances makes it name a block of a whole file, a `retry` too many is what that costs.
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
