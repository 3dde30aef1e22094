"""A slice's position in the ledger as JSON, what a read of its messages must find, and even cuts of a range."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from stormproof.core.base.arrays import Rows
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.source import Expectation, Slice
from stormproof.core.pending.rows import At, Retry, SliceRow
from stormproof.core.tracking.share import tokens, xor_reduce

BLOCK: Final = 8_192
"""Tokens that are made at once. They stay in a core's cache, and the driver's memory does not grow with a batch."""


def expectation_of(ids: Sequence[int] | Rows, seed: int, excluded: Collection[int] = ()) -> Expectation:
    """Number and XOR of the tokens of these messages, without those that are left out."""
    numbers, xor = np.asarray(ids, np.int64), 0
    if excluded:
        numbers = numbers[~np.isin(numbers, np.fromiter(excluded, np.int64))]
    for begin in range(0, len(numbers), BLOCK):
        xor ^= xor_reduce(tokens(numbers[begin : begin + BLOCK], seed))
    return Expectation(len(numbers), xor)


def expectation_of_range(first: int, stop: int, seed: int, excluded: Collection[int] = ()) -> Expectation:
    """The same of the numbers from `first` up to `stop`, without those that are left out; in constant memory."""
    left_out = expectation_of([number for number in excluded if first <= number < stop], seed)
    xor = left_out.xor
    for begin in range(first, stop, BLOCK):
        xor ^= xor_reduce(tokens(np.arange(begin, min(begin + BLOCK, stop), dtype=np.int64), seed))
    return Expectation(stop - first - left_out.messages, xor)


def even_bounds(first: int, stop: int, parts: int) -> list[int]:
    """Where a range is cut into this many parts of about equal length, with both ends."""
    return [first + (stop - first) * part // parts for part in range(parts + 1)]


def position_of(row: SliceRow, retries: Sequence[Retry] = ()) -> dict[str, Json]:
    """A slice's own description, for the ledger: what the connector says of it, and what the store knows."""
    return {
        **(row.at or {}),
        "retry": row.is_retry,
        "slice": row.id,
        "messages": row.messages,
        "bytes": row.bytes,
        "opened": row.opened,
        "deaths": row.deaths,
        "replayed": [[retry.id, retry.origin] for retry in retries],
    }


_OURS: Final = frozenset(position_of(SliceRow(0, None, 0, 0)))


def slice_of(row: SliceRow, expected: Expectation, retries: Sequence[Retry] = ()) -> Slice:
    """What a topology gets to know of an opened slice."""
    return Slice(
        position_of(row, retries),
        expected,
        row.bytes,
        retry=row.is_retry,
        deaths=row.deaths,
        replayed=tuple((retry.id, retry.origin) for retry in retries),
        mates=frozenset({row.mates, *(retry.mates for retry in retries)} - {""})
        if row.opened > 1 or row.is_retry
        else frozenset(),
    )


def at_of(position: Mapping[str, Json]) -> At | None:
    """What the connector said of a slice, from the ledger's description; None: it is of retries."""
    return None if position.get("retry") else {key: value for key, value in position.items() if key not in _OURS}


def row_of(position: dict[str, Json]) -> tuple[SliceRow, list[Retry]]:
    """What `position_of` wrote.

    Raises:
        UsageError: it is no position of such a source.
    """
    match position:
        case {
            "slice": int(id_),
            "bytes": int(size),
            "opened": int(opened),
            "deaths": int(deaths),
            "replayed": list(replayed),
        }:
            messages = position.get("messages")
            retries = [
                Retry(id_, origin, 0)
                for pair in replayed
                if isinstance(pair, list) and len(pair) == 2
                for id_, origin in [(pair[0], pair[1])]
                if isinstance(id_, int) and isinstance(origin, int)
            ]
            count = messages if isinstance(messages, int) else len(retries)
            return SliceRow(id_, at_of(position), count, size, opened=opened, deaths=deaths), retries
        case _:
            raise UsageError(f"not a position of a pending source: {json.dumps(sorted(position))}")
