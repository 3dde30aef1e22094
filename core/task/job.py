"""A job: one attempt at one batch, in the form that an engine runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stormproof.core.contract.sink import SinkWriter
from stormproof.core.contract.source import SliceReader
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.wire import Place

JobKey: TypeAlias = tuple[str, int, int]
"""Incarnation, txid and attempt."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one batch; everything in it is picklable.

    `readers` has one entry a source task, `writers` one a sink, by the sink's name. `tracked` is off under at-most-once:
    there are no tokens and no shares, but rows between stages are counted all the same. `excluded` are messages that are
    left out, since they failed in an earlier attempt. `per_message` routes shares to ackers, which take a verdict for each
    message. `heartbeat` is where tasks report their progress (see `stormproof.core.heartbeat`); None: they do not.
    `careful` makes row-wise functions also note the message in hand there, for a batch whose job died before. `messages`
    is how many messages the readers give; None: nobody knows. `named_max` is how many failed messages the tasks of a stage
    name together, about; None: all. They count those beyond it. `message_timeout_s` is how long one call may take where
    several are made at a time.
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
    heartbeat: Place | None = None
    careful: bool = False
    messages: int | None = None
    named_max: int | None = None
    message_timeout_s: float = math.inf

    @property
    def key(self) -> JobKey:
        """The attempt's identity: incarnation, txid and attempt number."""
        return self.incarnation, self.txid, self.attempt
