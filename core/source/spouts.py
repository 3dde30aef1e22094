"""How the messages, seeds and sources of several spouts are told apart in one topology.

A message's key is its id * 64 + the index of its spout. So everything that goes by a message's number (failures,
exclusions, replays, the ledger) works unchanged where a topology has several spouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.source import ShownIds
from stormproof.core.tracking.share import GAMMA, mix64, unsigned

SPOUTS_MAX: Final = 64
_SHIFT: Final = 6
ID_LIMIT: Final = 1 << (63 - _SHIFT)
"""A message's id is at least -ID_LIMIT and below ID_LIMIT, so that its key fits into 64 bits."""

_MEMBER: Final = re.compile(r"([^+=]+)(?:=([^+=]*))?")


def keys_of(ids: Rows, index: int, spout: str) -> Rows:
    """The keys of messages of the spout at this index.

    Raises:
        UsageError: an id is not within `ID_LIMIT`.
    """
    if len(ids):
        _require_within_limit(int(ids.min()), spout)
        _require_within_limit(int(ids.max()), spout)
    return (ids << _SHIFT) | np.int64(index)


def key_of(id_: int, index: int, spout: str) -> int:
    """One message's key; see `keys_of`."""
    _require_within_limit(id_, spout)
    return (id_ << _SHIFT) | index


def id_of(key: int) -> tuple[int, int]:
    """The index of a key's spout, and the message's id there."""
    return key & (SPOUTS_MAX - 1), key >> _SHIFT


def indexes_and_ids_of(keys: Rows) -> tuple[Rows, Rows]:
    """The same of many keys."""
    return keys & (SPOUTS_MAX - 1), keys >> _SHIFT


def _require_within_limit(id_: int, spout: str) -> None:
    if not -ID_LIMIT <= id_ < ID_LIMIT:
        raise UsageError(
            f"spout {spout!r}: its source gave a message the id {id_}; in a topology with several spouts ids lie between "
            f"-2^57 and 2^57. Run this spout in a topology of its own, or number its messages anew",
            spout=spout,
            id=id_,
        )


def seed_of(seed: int, index: int) -> int:
    """A spout's own seed: under one seed, equal ids of two spouts would have equal tokens, which cancel in an XOR."""
    word = np.array([unsigned(seed)], np.uint64) + GAMMA * np.array([index + 1], np.uint64)
    return int(mix64(word).view(np.int64)[0])


def shown(spout: str, inner: str) -> str:
    """A message's id as people see it: the spout, and the id as the spout's own source shows it."""
    return f"{spout}:{inner}"


def unshown(message: str) -> tuple[str, str] | None:
    """The spout in a shown id, and the id that its own source shows; None where the shown id names no spout."""
    spout, colon, inner = message.partition(":")
    return (spout, inner) if colon else None


def member_subscription(subscription: str, spout: str) -> str:
    """The subscription under which a topology reads one spout's source: two spouts may read the same queue."""
    return f"{subscription}:{spout}"


def is_spout_name(name: str) -> bool:
    """Whether a spout of this name can be told apart in shown ids and group names."""
    return bool(name) and set(name).isdisjoint(":+=")


def group_name(sources: Mapping[str, str]) -> str:
    """The name of several sources as one, from spouts and source names: ``lines+clicks``, or ``lines=queue+clicks``.

    The order counts, since keys contain it.
    """
    return "+".join(spout if spout == source else f"{spout}={_quoted(source)}" for spout, source in sources.items())


def sources_in(name: str) -> dict[str, str]:
    """The source name of each spout in a group's name; empty where it is not the name of a group."""
    parts = [_MEMBER.fullmatch(part) for part in name.split("+")]
    found = {part[1]: unquote(part[2] or part[1]) for part in parts if part is not None}
    return found if len(found) == len(parts) > 1 else {}


def _quoted(name: str) -> str:
    return name.replace("%", "%25").replace("+", "%2B").replace("=", "%3D")


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
