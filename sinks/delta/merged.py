"""The files that a MERGE writes: how they are written, and how a block that a power loss took from one is seen."""

from __future__ import annotations

from typing import Final

from deltalake import WriterProperties

ZEROS_BYTES: Final = 512
"""No disk or file system has smaller blocks."""

MERGED_FILES: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=64)
"""With these settings, whatever a table's rows are, no whole file has `ZEROS_BYTES` zeros in a row.

Snappy leaves less than a hundred as they are; a long value's statistics would be the only other place for them.
"""

_READ_BYTES: Final = 1 << 20  # of whole blocks, so that none lies in two parts


def lost_block(path: str) -> int | None:
    """Where a file that was written as `MERGED_FILES` says has a block of zeros, which was never written; None if nowhere.

    Where values have nothing to compress, Snappy keeps them as they are, and zeros in their place decode as other values,
    with nothing to tell: no page has a checksum.
    """
    zeros, at = bytes(ZEROS_BYTES), 0
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            found = part.find(zeros)
            if found >= 0:
                return at + found
            at += len(part)
    return None
