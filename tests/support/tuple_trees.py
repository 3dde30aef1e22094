"""Tuple trees as lists, what Storm and we would tell an acker about them, and what the acker should say, by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from random import Random
from typing import TypeAlias

import numpy as np

from stormproof.core.arrays import Rows, Words
from stormproof.core.tracking.acker import Acker, Answers, acker_of
from stormproof.core.tracking.share import GAMMA, mix64, split_one, split_runs

WORD = 2**64


class Fate(StrEnum):
    """What becomes of a tuple at the bolt that received it."""

    ACKED = "acked"
    DROPPED = "dropped"  # neither acked nor failed
    TWICE = "acked twice"
    FAILED = "failed"


class Verdict(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"
    DOUBLED = "doubled"
    PENDING = "pending"
    ANSWERED_TWICE = "answered twice"


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

    def brute_force(self) -> dict[int, Verdict]:
        """Each message's verdict after all notices, by looking at every node of its tree; "twice" counts as not acked.

        Notices are not told apart by the time at which they come: see `replay` for trees with doubled acks.
        """
        found: dict[int, Verdict] = {}
        reached = self.reached()
        for place, message_id in enumerate(self.ids):
            fates = {node.fate for node, of in zip(self.nodes, reached, strict=True) if place in of}
            if Fate.FAILED in fates:
                found[message_id] = Verdict.FAILED
            else:
                found[message_id] = Verdict.COMPLETE if fates <= {Fate.ACKED} else Verdict.PENDING
        return found


@dataclass(frozen=True, slots=True)
class Notice:
    """What an acker is told about one message."""

    kind: str
    id: int
    value: int = 0
    node: int | None = None


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

    A node with children waits for nothing of its own: it must not fail any more, and a dropped or doubled ack of it is
    no event.
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
    return notices + [notice for notice in _endings(trees, carried, given) if notice.kind == "fail" or notice.value]


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
    for number, (node, own, out) in enumerate(zip(trees.nodes, carried, given, strict=True)):
        for place, value in own.items():
            if node.fate is Fate.FAILED:
                notices.append(Notice("fail", trees.ids[place], node=number))
            times = {Fate.ACKED: 1, Fate.TWICE: 2}.get(node.fate, 0)
            notices += [Notice("ack", trees.ids[place], value ^ out.get(place, 0), number)] * times
    return notices


def ids_of(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(list(numbers), np.int64)


def words_of(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([number % WORD for number in numbers], np.uint64)


def tell(acker: Acker, notices: Sequence[Notice]) -> dict[int, Verdict]:
    """Notices of one kind in one call; who was answered what."""
    ids = ids_of(notice.id for notice in notices)
    values = words_of(notice.value for notice in notices)
    call: dict[str, Callable[[], Answers]] = {
        "init": lambda: acker.init(ids, values),
        "ack": lambda: acker.ack(ids, values),
        "fail": lambda: acker.fail(ids),
    }
    answers = call[notices[0].kind]()
    found = dict.fromkeys(answers.completed.ids.tolist(), Verdict.COMPLETE)
    found |= dict.fromkeys(answers.failed.ids.tolist(), Verdict.FAILED)
    found |= dict.fromkeys(answers.doubled.ids.tolist(), Verdict.DOUBLED)
    return found


def calls(notices: Sequence[Notice], *, at_once: bool) -> list[list[Notice]]:
    """One notice a call, or (`at_once`) neighbours of one kind in one call."""
    if at_once:
        return [list(run) for _, run in groupby(notices, key=lambda notice: notice.kind)]
    return [[notice] for notice in notices]


def replay(
    trees: Trees, notices: Sequence[Notice], *, at_once: bool = False, leaves_only: bool = False
) -> dict[int, Verdict]:
    """Each message's verdict by hand and without XOR: complete as soon as all of its nodes have acked.

    A doubled ack takes the node's ack back, unless the message is complete by then: that much of XOR is in here.
    `leaves_only` is for the form in which nodes with children tell nothing.
    """
    children, reached = trees.children(), trees.reached()
    needed: dict[int, set[int]] = {message_id: set() for message_id in trees.ids}
    for number, places in enumerate(reached):
        for place in places if not (leaves_only and children[number]) else ():
            needed[trees.ids[place]].add(number)
    missing = {message_id: set(nodes) for message_id, nodes in needed.items()}
    begun, failed = set[int](), set[int]()
    found: dict[int, Verdict] = {}
    for run in calls(notices, at_once=at_once):
        for notice in run:
            if notice.kind == "init":
                begun.add(notice.id)
            elif notice.kind == "fail":
                failed.add(notice.id)
            elif notice.node is not None:
                missing[notice.id] ^= {notice.node}
        for message_id in begun - found.keys():
            if message_id in failed:
                found[message_id] = Verdict.FAILED
            elif not missing[message_id]:
                found[message_id] = Verdict.COMPLETE
    return {message_id: found.get(message_id, Verdict.PENDING) for message_id in trees.ids}


def deliver(notices: Sequence[Notice], *ackers: Acker, at_once: bool = False) -> dict[int, Verdict]:
    """Each notice to its acker, one a call or (`at_once`) neighbours of one kind in one call; every message's verdict.

    That is `ANSWERED_TWICE` where there was an answer already: whoever was told "complete" has confirmed the message.
    """
    found: dict[int, Verdict] = {}
    for run in calls(notices, at_once=at_once):
        tasks = acker_of(ids_of(notice.id for notice in run), len(ackers)).tolist()
        for task, acker in enumerate(ackers):
            own = [notice for notice, of in zip(run, tasks, strict=True) if of == task]
            answered = tell(acker, own) if own else {}
            found |= answered | dict.fromkeys(answered.keys() & found.keys(), Verdict.ANSWERED_TWICE)
    return {notice.id: found.get(notice.id, Verdict.PENDING) for notice in notices if notice.kind == "init"}


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

    The notice of a tuple with children is 0, and not sent: nothing waits for that tuple itself any more. So this is for
    tuples that cannot fail after their children were sent; else the acker might hear of the failure too late.
    `counts[i]` is the number of the i-th tuple's deliveries.
    """
    return split_runs(shares, counts), np.where(counts == 0, shares, np.uint64(0))
