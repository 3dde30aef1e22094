"""A job: one attempt at one batch, as an engine is given it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stormproof.core.graph.plan import Plan
from stormproof.core.sink import SinkWriter
from stormproof.core.source.protocol import SliceReader

JobKey: TypeAlias = tuple[str, int, int]
"""Incarnation, txid and attempt."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one batch; everything in it is picklable.

    `readers` has one entry a source task. `writers` has one entry a sink, by the sink's name. `tracked` is off under
    at-most-once: no tokens, no shares; the counts of rows between stages are kept all the same. `excluded` are messages
    that are left out: they failed in an earlier attempt. `per_message` has every message get a verdict of its own, from
    ackers that their shares are routed to. `pulse` is the folder in which tasks say how far they are (see
    `stormproof.core.pulse`); None: they do not. `careful` has row-wise functions also note the message in hand there, for
    a batch whose job died before.
    """

    plan: Plan
    readers: tuple[SliceReader, ...]
    writers: Mapping[str, SinkWriter]
    incarnation: str
    txid: int
    attempt: int
    seed: int
    tracked: bool
    excluded: frozenset[int] = frozenset()
    per_message: bool = False
    pulse: Path | None = None
    careful: bool = False

    @property
    def key(self) -> JobKey:
        """Which attempt at which batch of which life of a topology this is."""
        return self.incarnation, self.txid, self.attempt
