"""Messages' shown ids, for whole columns, where several spouts are one source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.lineage import ShownIds
from stormproof.core.source.spouts import indexes_and_ids_of, shown


@dataclass(frozen=True, slots=True)
class SpoutIds(ShownIds):
    """``SPOUT:`` and the id as the spout's own source shows it; `members` has each spout's, in order of their indexes."""

    members: tuple[tuple[str, ShownIds], ...]

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """By the spout that each number names."""
        there = pc.is_valid(numbers)
        indexes, ids = indexes_and_ids_of(pc.fill_null(numbers, 0).to_numpy())
        found = pa.nulls(len(numbers), pa.string())
        for index in np.unique(indexes).tolist():
            spout, inner = self.members[index]
            of_spout = pc.binary_join_element_wise(shown(spout, ""), inner.shown(pa.array(ids), origins), "")
            found = pc.if_else(pc.and_(there, pa.array(indexes == index)), of_spout, found)
        return found
