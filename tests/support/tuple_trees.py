"""Tuple trees as lists, what Storm and we would tell an acker about them, and which are incomplete, by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeAlias

import numpy as np

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.tracking.acker import Acker, acker_of
from stormproof.core.tracking.share import GAMMA, mix64, split_one, split_runs

WORD = 2**64


class Fate(StrEnum):
    """What becomes of a tuple at the bolt that received it."""

    ACKED = "acked"
    DROPPED = "dropped"
    TWICE = "acked twice"


@dataclass(frozen=True, slots=True)
class Node:
    """One delivery of a tuple. A spout's tuple has a message, all others have anchors: earlier nodes, maybe one twice."""

    message: int | None = None
    anchors: tuple[int, ...] = ()
    fate: Fate = Fate.ACKED


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of some messages, which may share nodes."""

    ids: tuple[int, ...]
    nodes: tuple[Node, ...]

    def reached(self) -> list[frozenset[int]]:
        """For each node the messages that it belongs to, as places in `ids`."""
        found: list[frozenset[int]] = []
        for node in self.nodes:
            own = frozenset[int]() if node.message is None else frozenset({node.message})
            found.append(own.union(*(found[anchor] for anchor in node.anchors)))
        return found

    def children(self) -> list[list[int]]:
        """For each node its children, one for each time that they are anchored to it."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for anchor in node.anchors:
                found[anchor].append(number)
        return found

    def with_fates(self, fates: Sequence[Fate], *, leaves_only: bool = False) -> Trees:
        """The same trees with other fates; `leaves_only` leaves nodes with children at "acked": see `split_shares`."""
        nodes = tuple(
            Node(node.message, node.anchors, Fate.ACKED if leaves_only and has else fate)
            for node, fate, has in zip(self.nodes, fates, self.children(), strict=True)
        )
        return Trees(self.ids, nodes)

    def incomplete(self) -> set[int]:
        """The messages with a node that was not acked just once, found by looking at every node of their trees."""
        wrong = [of for node, of in zip(self.nodes, self.reached(), strict=True) if node.fate is not Fate.ACKED]
        return {self.ids[place] for place in frozenset[int]().union(*wrong)}


@dataclass(frozen=True, slots=True)
class Notice:
    """What an acker is told about one message."""

    kind: str
    id: int
    value: int


Form: TypeAlias = Callable[[Trees, Random], list[Notice]]
"""A protocol: all that an acker is told about these trees, each message's init first."""


def word(rng: Random) -> int:
    """A random 64-bit value that is not 0."""
    return rng.randrange(1, WORD)


def classic(trees: Trees, rng: Random) -> list[Notice]:
    """Storm's form: a random id for each anchor of each delivery; a node's ack is its own ids and its children's."""
    carried: list[dict[int, int]] = []  # for each node the XOR of its ids, by message
    given: list[int] = [0] * len(trees.nodes)  # for each node the XOR of its children's ids
    init = [0] * len(trees.ids)
    for node in trees.nodes:
        own: dict[int, int] = {}
        if node.message is not None:
            own[node.message] = word(rng)
            init[node.message] ^= own[node.message]
        for anchor in node.anchors:
            edge = word(rng)
            given[anchor] ^= edge
            for message in carried[anchor]:
                own[message] = own.get(message, 0) ^ edge
        carried.append(own)
    notices = [Notice("init", trees.ids[place], value) for place, value in enumerate(init)]
    return notices + _endings(
        trees, carried, [dict.fromkeys(own, out) for own, out in zip(carried, given, strict=True)]
    )


def open_shares(trees: Trees, rng: Random) -> list[Notice]:
    """Shares of a bolt that emits over time: child j carries mix64(s + G*(j+1)); the ack is s XOR the children's."""

    def child(share: int, ordinal: int) -> int:
        return int(mix64(np.array([(share + int(GAMMA) * (ordinal + 1)) % WORD], np.uint64))[0])

    notices, carried = _spout_shares(trees, rng)
    given: list[dict[int, int]] = [dict.fromkeys(own, 0) for own in carried]
    emitted = [0] * len(trees.nodes)
    for number, node in enumerate(trees.nodes):
        for anchor in node.anchors:
            ordinal = emitted[anchor]
            emitted[anchor] += 1
            for message, share in carried[anchor].items():
                piece = child(share, ordinal)
                carried[number][message] = carried[number].get(message, 0) ^ piece
                given[anchor][message] ^= piece
        given[number] = dict.fromkeys(carried[number], 0)
    return notices + _endings(trees, carried, given)


def split_shares(trees: Trees, rng: Random) -> list[Notice]:
    """Shares of a bolt that knows the number of its children: only nodes without children ack, and what they carry.

    A node with children waits for nothing of its own: a dropped or doubled ack of it is no event.
    """
    notices, carried = _spout_shares(trees, rng)
    children = trees.children()
    pieces: list[dict[int, list[int]]] = []
    for number, node in enumerate(trees.nodes):
        for anchor in node.anchors:
            for message, waiting in pieces[anchor].items():
                carried[number][message] = carried[number].get(message, 0) ^ waiting.pop()
        counts = len(children[number])
        pieces.append({message: split_one(share, counts).tolist() for message, share in carried[number].items()})
    given = [carried[number] if children[number] else {} for number in range(len(trees.nodes))]
    # What a node with children would ack is 0, and not sent.
    return notices + [notice for notice in _endings(trees, carried, given) if notice.value]


def _spout_shares(trees: Trees, rng: Random) -> tuple[list[Notice], list[dict[int, int]]]:
    """The inits; each message's token, split over its spout tuples; a message without any is acked by the spout."""
    carried: list[dict[int, int]] = [{} for _ in trees.nodes]
    notices: list[Notice] = []
    for place, message_id in enumerate(trees.ids):
        token = word(rng)
        notices.append(Notice("init", message_id, token))
        own = [number for number, node in enumerate(trees.nodes) if node.message == place]
        for number, share in zip(own, split_one(token, len(own)).tolist(), strict=True):
            carried[number][place] = share
        if not own:
            notices.append(Notice("ack", message_id, token))
    return notices, carried


def _endings(trees: Trees, carried: list[dict[int, int]], given: list[dict[int, int]]) -> list[Notice]:
    notices: list[Notice] = []
    for node, own, out in zip(trees.nodes, carried, given, strict=True):
        times = {Fate.ACKED: 1, Fate.TWICE: 2, Fate.DROPPED: 0}[node.fate]
        for place, value in own.items():
            notices += [Notice("ack", trees.ids[place], value ^ out.get(place, 0))] * times
    return notices


def ids_of(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(list(numbers), np.int64)


def words_of(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([number % WORD for number in numbers], np.uint64)


def told(notices: Sequence[Notice], *, at_once: bool = False) -> Acker:
    """An acker that was told these notices in this order, one a call or (`at_once`) all in one."""
    acker = Acker(ids_of(notice.id for notice in notices if notice.kind == "init"))
    for call in [notices] if at_once else [[notice] for notice in notices]:
        acker.tell(ids_of(notice.id for notice in call), words_of(notice.value for notice in call))
    return acker


def incomplete(notices: Sequence[Notice], ackers: int = 1, *, at_once: bool = False) -> set[int]:
    """The messages that are not complete, each by its own one of several ackers."""
    tasks = acker_of(ids_of(notice.id for notice in notices), ackers).tolist()
    found = set[int]()
    for task in range(ackers):
        own = [notice for notice, of in zip(notices, tasks, strict=True) if of == task]
        found |= set(told(own, at_once=at_once).incomplete().tolist())
    return found


def classic_notices(consumed: Words, new: Words, parent: Rows) -> Words:
    """What Storm's bolts tell the acker: each consumed tuple's id, XOR the ids of the tuples made of it.

    `new[i]` is the random id of a tuple (one for each delivery) anchored to the tuple of row `parent[i]`. One notice
    both takes a tuple out and puts its children in, so that a tree is never complete too early.
    """
    notices = consumed.copy()
    np.bitwise_xor.at(notices, parent, new)
    return notices


def share_notices(shares: Words, counts: Rows) -> tuple[Words, Words]:
    """The same in the form of shares: the shares of the children, parent by parent, and each consumed tuple's notice.

    The notice of a tuple with children is 0, and not sent: nothing waits for that tuple itself any more. `counts[i]` is
    the number of the i-th tuple's deliveries.
    """
    return split_runs(shares, counts), np.where(counts == 0, shares, np.uint64(0))
