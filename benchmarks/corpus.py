"""Sentences to count words of: always the same ones, made when they are needed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import pc

WORDS_IN_SENTENCE = 10
VOCABULARY = 5_000
SEED = 20_170_704


def sentences(number: int, seed: int = SEED) -> pa.Array:
    """Sentences of ten words with a blank between two, drawn from 5,000 words."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(ord("a"), ord("z") + 1, (VOCABULARY, 12), dtype=np.uint8)
    lengths = rng.integers(2, 10, VOCABULARY)
    known = [
        f"{bytes(row[:length]).decode()}{i:x}" for i, (row, length) in enumerate(zip(letters, lengths, strict=True))
    ]
    drawn = pa.array(known).take(pa.array(rng.integers(0, VOCABULARY, number * WORDS_IN_SENTENCE)))
    offsets = pa.array(np.arange(0, len(drawn) + 1, WORDS_IN_SENTENCE, dtype=np.int32))
    return pc.binary_join(pa.ListArray.from_arrays(offsets, drawn), " ")


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as Parquet files of about equal length, in one string column `line`."""

    folder: Path
    files: tuple[Path, ...]
    rows: tuple[int, ...]

    @property
    def messages(self) -> int:
        """How many sentences."""
        return sum(self.rows)

    @property
    def words(self) -> int:
        """How many words."""
        return self.messages * WORDS_IN_SENTENCE


def write_corpus(folder: Path, number: int, parts: int) -> Corpus:
    """Make the text's files: one a core, so that both sides have the same parallelism."""
    folder.mkdir(parents=True)
    lines = sentences(number)
    bounds = [number * part // parts for part in range(parts + 1)]
    files: list[Path] = []
    for part in range(parts):
        path = folder / f"part-{part}.parquet"
        rows = lines.slice(bounds[part], bounds[part + 1] - bounds[part])
        pq.write_table(pa.table({"line": rows}), path, row_group_size=100_000)
        files.append(path)
    return Corpus(folder, tuple(files), tuple(b - a for a, b in itertools.pairwise(bounds)))
