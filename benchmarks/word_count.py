"""The word count as topologies: the same graph over different sources, functions and sinks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.core.bolt import Bolt, Tuple
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.contract.source import Source
from stormproof.trident.topology.aggregate import count
from stormproof.trident.topology.stream import Stream, Topology


def split_lines(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """The words of all lines at once, and each word's line."""
    parts = pc.split_pattern(rows.column("line"), " ")
    parent = np.repeat(np.arange(rows.num_rows), pc.list_value_length(parts).to_numpy())
    return pa.RecordBatch.from_arrays([parts.flatten()], names=["word"]), parent


def split(line: str) -> list[str]:
    """The words of one line."""
    return line.split()


def vectorised(stream: Stream) -> Stream:
    """Lines to words, a record batch at a time."""
    return stream.arrow(split_lines, "line", schema="word string")


def row_wise(stream: Stream) -> Stream:
    """Lines to words by a plain Python function."""
    return stream.flat_map(split, "line", schema="word string")


class SplitBolt(Bolt):
    """Lines to words, anchored and acked by hand."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        emit = self.collector.emit
        for word in split(tuple["line"]):
            emit(word, anchors=tuple)
        self.collector.ack(tuple)


class PassBolt(Bolt):
    """One emit and one ack a tuple."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple["word"], anchors=tuple)
        self.collector.ack(tuple)


def by_bolt(stream: Stream) -> Stream:
    """Lines to words by one Bolt, each word passed on by another."""
    topology = stream.topology
    words = topology.bolt("split", SplitBolt(), stream.output)
    return topology.following(topology.bolt("pass", PassBolt(), words))


def word_count(
    name: str,
    source: Source,
    *sinks: SinkSpec,
    words: Callable[[Stream], Stream] = vectorised,
    folds: bool = True,
) -> Topology:
    """Counts that are folded into what the sinks hold, or one batch's counts appended to them."""
    topology = Topology(name)
    grouped = words(topology.stream("lines", source)).group_by("word")
    counted = grouped.persistent_aggregate(n=count()) if folds else grouped.agg(n=count())
    counted.into(*sinks)
    return topology


def words_as_rows(name: str, source: Source, *sinks: SinkSpec) -> Topology:
    """Every word a row."""
    topology = Topology(name)
    vectorised(topology.stream("lines", source)).into(*sinks)
    return topology
