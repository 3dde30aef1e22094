"""Bolts: what users write, and what calls them.

| module | question that it answers |
| --- | --- |
| `api` | which kinds of bolts are there: `Bolt`, `BasicBolt`, `ArrowBolt` |
| `tuples`, `collector` | what is a tuple to a bolt; how does a `Bolt` emit, ack and fail; what came of a call |
| `runner` | how does a task call a bolt, batch by batch |
"""

from stormproof.core.bolt.api import AnyBolt, ArrowBolt, ArrowRows, BasicBolt, Bolt, BoltContext, Emit, Streams
from stormproof.core.bolt.collector import DEFAULT_STREAM, Collector, Emitted, FailedTuple, Ran, link_counts
from stormproof.core.bolt.tuples import Tuple
from stormproof.core.user_code.functions import FailTuple

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
    "link_counts",
]
