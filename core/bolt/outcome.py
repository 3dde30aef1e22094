"""The outcome of one call of a bolt, in numbers: what it emitted, which tuples it acked, which failed.

There is no tracking arithmetic here: the stage computes shares from these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrays import Rows
from stormproof.core.base.message import FailureReason


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tuples that one call emitted to one stream.

    The three `anchor_` arrays have one entry for each link from an input tuple to an output row, sorted by row:
    `anchor_row`, the output row; `anchor_input`, the input tuple's handle; `anchor_ordinal`, the number of the link among
    all links of that input, from 0, over all streams and calls. Two links may join the same two tuples. An ordinal is
    missing only where a row was dropped, and then its input failed. An unanchored row has no link. `task` is the task of
    each row, where the stream has a direct() subscriber.
    """

    rows: pa.RecordBatch
    anchor_row: Rows
    anchor_input: Rows
    anchor_ordinal: Rows
    task: Rows | None


@dataclass(frozen=True, slots=True)
class FailedTuple:
    """An input tuple that failed, and why. `error` and `input` are texts that every store takes: see `storable_text`."""

    handle: int
    reason: FailureReason
    error: str
    input: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of one call. `emitted` has only streams with rows; `resets` counts the calls of `reset_timeout`.

    Guarantee:
        Over all calls of a runner, each handle stands exactly once in `acked` or `failed`, at the latest in what `finish`
        returns. The call in which an input ends is the last one with links of that input.
    """

    emitted: Mapping[str, Emitted]
    acked: Rows
    failed: Sequence[FailedTuple]
    resets: int


def in_one(rans: Sequence[Ran]) -> Ran:
    """The outcome of calls one after the other, as if it were one call."""
    if len(rans) == 1:
        return rans[0]
    parts: dict[str, list[Emitted]] = {}
    for ran in rans:
        for stream, one in ran.emitted.items():
            parts.setdefault(stream, []).append(one)
    return Ran(
        {stream: _behind_each_other(of_stream) for stream, of_stream in parts.items()},
        np.concatenate([ran.acked for ran in rans]),
        tuple(failed for ran in rans for failed in ran.failed),
        sum(ran.resets for ran in rans),
    )


def _behind_each_other(parts: Sequence[Emitted]) -> Emitted:
    first_row = np.cumsum([0, *(part.rows.num_rows for part in parts)])
    tasks = [part.task for part in parts if part.task is not None]
    return Emitted(
        pa.concat_batches([part.rows for part in parts]),
        np.concatenate([part.anchor_row + first for part, first in zip(parts, first_row, strict=False)]),
        np.concatenate([part.anchor_input for part in parts]),
        np.concatenate([part.anchor_ordinal for part in parts]),
        np.concatenate(tasks) if tasks else None,
    )


def link_counts(ran: Ran, first: int, inputs: int) -> Rows:
    """How many links go out from each of the `inputs` tuples whose handles count up from `first`, over all streams."""
    counts = np.zeros(inputs, np.int64)
    for emitted in ran.emitted.values():
        numbers = emitted.anchor_input - first
        counts += np.bincount(numbers[(numbers >= 0) & (numbers < inputs)], minlength=inputs)
    return counts
