"""The topologies of the fault tests: every message carries a word of its own, so that a loss or a double shows by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.postgres.database import Database

POISON = b"poison never works"
FLAKY = b"flaky fails at first"
MAX_ATTEMPTS = 2


class SinkMode(StrEnum):
    """One column of the crash matrix."""

    DELTA_APPEND = "delta-append"
    DELTA_FOLD = "delta-fold"
    POSTGRES_APPEND = "postgres-append"
    POSTGRES_FOLD = "postgres-fold"

    @property
    def store(self) -> str:
        return self.value.partition("-")[0]

    @property
    def folds(self) -> bool:
        return self.value.endswith("fold")


def messages(number: int, prefix: str = "m") -> list[bytes]:
    """A poison, a message that fails at its first attempt, an empty one, and words: ``m7 common m7``."""
    plain = [f"{prefix}{i} common {prefix}{i}".encode() for i in range(number)]
    return [*plain[:2], POISON, *plain[2:4], FLAKY, b"", *plain[4:]]


def expected(payloads: Iterable[bytes]) -> Counter[str]:
    """What a sink must hold under exactly-once: from the input alone."""
    return Counter(word for payload in payloads if payload != POISON for word in payload.decode().split())


class Split:
    """Splits lines; raises for the poison, and once for the flaky message (what happened before stands in a file)."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks

    def __call__(self, line: str) -> list[str]:
        if line == POISON.decode():
            raise ValueError("poison \x00 \udcff")
        if line == FLAKY.decode():
            mark = self._marks / "flaky"
            if not mark.exists():
                mark.touch()
                raise RuntimeError("not yet")
        return line.split()


def topology(name: str, mode: SinkMode | None, folder: Path, database: Database, queue: str) -> Topology:
    """Word rows or word counts into one sink, or into all four (`mode` None)."""
    t = Topology(name)
    words = t.stream("lines", source_of(queue, database)).flat_map(Split(folder), "line", schema="word string")
    modes = list(SinkMode) if mode is None else [mode]
    appends = [sink_of(m, name, folder, database) for m in modes if not m.folds]
    folds = [sink_of(m, name, folder, database) for m in modes if m.folds]
    if appends:
        words.into(*appends)
    if folds:
        words.group_by("word").persistent_aggregate(n=count()).into(*folds)
    return t


def source_of(queue: str, database: Database) -> PostgresQueue:
    """Lines; one that fails comes again at once, and is given up soon."""
    return PostgresQueue(
        queue,
        schema="line string",
        database=database,
        max_attempts=MAX_ATTEMPTS,
        backoff_base_s=0.001,
        backoff_max_s=0.001,
    )


def table_of(mode: StrEnum, name: str) -> str:
    return f"{name}-{mode}".replace("-", "_")


def sink_of(mode: SinkMode, name: str, folder: Path, database: Database) -> DeltaSink | PostgresSink:
    """The sink of a column of the matrix."""
    if mode.store == "delta":
        return DeltaSink(str(folder / "lake" / table_of(mode, name)), name=mode.value)
    return PostgresSink(table_of(mode, name), name=mode.value, database=database)
