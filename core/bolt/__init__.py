"""Bolts: what users write, and what runs it."""

from stormproof.core.bolt.api import (
    AnyBolt,
    ArrowBolt,
    ArrowRows,
    BasicBolt,
    Bolt,
    BoltContext,
    Emit,
    Streams,
    fresh,
)
from stormproof.core.bolt.outcome import Emitted, FailedTuple, Ran, link_counts
from stormproof.core.bolt.runner import BoltRunner
from stormproof.core.bolt.tuples import DEFAULT_STREAM, Collector, Tuple
from stormproof.core.usercode import FailTuple

__all__ = [
    "DEFAULT_STREAM",
    "AnyBolt",
    "ArrowBolt",
    "ArrowRows",
    "BasicBolt",
    "Bolt",
    "BoltContext",
    "BoltRunner",
    "Collector",
    "Emit",
    "Emitted",
    "FailTuple",
    "FailedTuple",
    "Ran",
    "Streams",
    "Tuple",
    "fresh",
    "link_counts",
]
