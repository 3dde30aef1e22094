"""The files that a MERGE writes: how they are written, so that a block which a power loss took from one can be found."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from deltalake import ColumnProperties, DeltaTable, WriterProperties

from stormproof.core.storage.files import files_at

BLOCK_BYTES: Final = 4096
"""The page size of Linux, which is what its page cache writes at once; also the default block size of file systems."""

MERGED_FILES: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=64)
"""With these settings an undamaged file practically never has a block of zeros, whatever the table's rows are.

Snappy compresses 64 KiB at a time. It looks for repetitions in steps that grow by a 32nd of the bytes it has passed without
one, and it copies a run of zeros uncompressed up to its second look into that run. This copy can be as long as a block only
behind 60,000 bytes without any repetition, and then the run must also be aligned with the file's blocks. The statistics of a
long value are the only other place where zeros could stand, so they are cut.
"""

_NONE: Final = ColumnProperties(statistics_enabled="NONE")
_SOME: Final = ColumnProperties(statistics_enabled="PAGE")


def written_for(table: DeltaTable) -> WriterProperties:
    """`MERGED_FILES` for one table, with statistics for those columns alone in which delta-rs takes right ones.

    It leaves NaN out of the bounds of a column, while to Spark NaN is greater than every number: a file with bounds of 1 and
    2 would be passed over for ``x > 5``, and its NaN with it. So a file has no bounds for columns of floating-point numbers.
    Those inside of structs cannot be named one by one: where there are any, no nested column has statistics.
    """
    schema = pa.schema(table.schema().to_arrow())
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    nested = any(pa.types.is_nested(field.type) and _has_floats(field.type) for field in schema)
    if not floats and not nested:
        return MERGED_FILES
    plain = {field.name: _SOME for field in schema if not pa.types.is_nested(field.type)} if nested else {}
    return WriterProperties(
        compression="SNAPPY",
        statistics_truncate_length=MERGED_FILES.statistics_truncate_length,
        default_column_properties=_NONE if nested else None,
        column_properties={**plain, **dict.fromkeys(floats, _NONE)},
    )


def _has_floats(kind: pa.DataType) -> bool:
    if not pa.types.is_nested(kind):
        return bool(pa.types.is_floating(kind))
    return any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))


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
