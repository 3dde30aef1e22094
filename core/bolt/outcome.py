"""What one call of a bolt came to, in numbers: what it emitted, which tuples it acked, which failed.

There is no tracking arithmetic here: the stage computes shares from these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.message import FailureReason


@dataclass(frozen=True, slots=True)
class Emitted:
    """One output stream's tuples of one call.

    The three `anchor_` arrays have one entry a link, sorted by row: the output row; the handle of the input tuple that it
    is anchored to (twice the same: two links); and the how-many-th link of that input this is, from 0, counted over all
    streams and calls. A number is missing only where a tuple was taken back, and its input failed then. An unanchored row
    has no link. `task` is the task of each row, where the stream has a direct subscriber.
    """

    rows: pa.RecordBatch
    anchor_row: Rows
    anchor_input: Rows
    anchor_ordinal: Rows
    task: Rows | None


@dataclass(frozen=True, slots=True)
class FailedTuple:
    """An input tuple that failed, and why. Error and input can be stored anywhere: see `storable_text`."""

    handle: int
    reason: FailureReason
    error: str
    input: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What one call came to. `emitted` has only streams with rows.

    Guarantee:
        Over all calls of a runner, each handle that it gave out stands exactly once in `acked` or `failed`, at the
        latest in what `finish` returns. An input is anchored only by tuples of the calls up to that one.
    """

    emitted: Mapping[str, Emitted]
    acked: Rows
    failed: Sequence[FailedTuple]
    resets: int


def link_counts(ran: Ran, first: int, inputs: int) -> Rows:
    """How many links go out, over all streams, from each of the `inputs` tuples whose handles begin with `first`."""
    counts = np.zeros(inputs, np.int64)
    for emitted in ran.emitted.values():
        numbers = emitted.anchor_input - first
        counts += np.bincount(numbers[(numbers >= 0) & (numbers < inputs)], minlength=inputs)
    return counts
