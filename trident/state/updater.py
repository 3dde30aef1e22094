"""The ready-made updaters of maps: rows are merged into the map's values, or set them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from stormproof.trident.state.protocol import MapState, State


@dataclass(frozen=True, slots=True)
class MapUpdater:
    """Merges every row into the map's value for its key.

    With `each_once` each key comes once in a txid, as after a grouping: rows are then written as they are read.
    """

    each_once: bool = False

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        """Merge the rows."""
        cast("MapState", state).multi_update(rows, each_once=self.each_once)


@dataclass(frozen=True, slots=True)
class MapSetter:
    """Sets the map's value for each row's key; the last row of a key wins, in the order of tasks and rows."""

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        """Set the values."""
        cast("MapState", state).multi_put(rows)
