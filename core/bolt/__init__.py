"""Bolts: what users write. What runs one is in `stormproof.core.bolt.runner`."""

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
from stormproof.core.bolt.collector import Collector
from stormproof.core.bolt.outcome import Emitted, FailedTuple, Ran, link_counts
from stormproof.core.bolt.outputs import DEFAULT_STREAM
from stormproof.core.bolt.tuples import Tuple
from stormproof.core.user_errors import FailTuple

__all__ = [
    "DEFAULT_STREAM",
    "AnyBolt",
    "ArrowBolt",
    "ArrowRows",
    "BasicBolt",
    "Bolt",
    "BoltContext",
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
