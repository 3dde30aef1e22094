"""A join whose pairs are anchored to two messages each, and a bolt behind it that refuses one of them.

Five messages, two keys: ``bad+b`` and ``b+c`` of key x, ``d+e`` of key y. What comes after the join fails ``bad+b``.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from stormproof import Topology
from stormproof.core.bolt import Bolt, Tuple
from stormproof.core.contract.source import Source
from stormproof.core.graph.components import OutputStream

PAYLOADS = [b"x bad", b"x b", b"x c", b"y d", b"y e"]
PARTS = [payload.decode().split()[1] for payload in PAYLOADS]


class Neighbours(Bolt):
    """Holds the parts of each key to the batch's end, pairs neighbours, and acks all; a part alone goes on by itself."""

    streams = "word string"

    def __init__(self) -> None:
        self.parts: dict[str, list[Tuple]] = defaultdict(list)

    def execute(self, tuple: Tuple, /) -> None:
        self.parts[tuple["key"]].append(tuple)

    def finish(self) -> None:
        for held in self.parts.values():
            parts = sorted(held, key=lambda part: PARTS.index(part["part"]))
            for one, other in pairwise(parts):
                self.collector.emit(f"{one['part']}+{other['part']}", anchors=[one, other])
            if len(parts) == 1:
                self.collector.emit(parts[0]["part"], anchors=parts)
            for part in parts:
                self.collector.ack(part)


def split(line: str) -> list[tuple[str, str]]:
    key, part = line.split()
    return [(key, part)]


def refuse(word: str) -> list[str]:
    if "bad" in word:
        raise ValueError("a bad pair")
    return [word]


def pairs(topology: Topology, *sources: Source) -> OutputStream:
    """The pairs of all the sources' parts, less those that are refused."""
    parts = [
        topology.bolt(f"split-{n}", split, topology.spout(f"spout-{n}", source), schema="key string, part string")
        for n, source in enumerate(sources)
    ]
    joined = topology.bolt("join", Neighbours(), *(part.fields("key") for part in parts))
    return topology.bolt("refuse", refuse, joined.shuffle(), schema="word string")
