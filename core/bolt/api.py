"""The kinds of bolts that users write. A plain function is a bolt, too; these are for those who need more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.bolt.collector import DEFAULT_STREAM, Collector
from stormproof.core.bolt.tuples import Tuple
from stormproof.core.contract.schema import SchemaLike

Streams: TypeAlias = str | Mapping[str, SchemaLike]
"""What a bolt emits: the schema of its stream "default", or a schema for each stream."""

ArrowRows: TypeAlias = tuple[pa.RecordBatch, npt.NDArray[np.integer]]
"""A record batch, and for each of its rows the number of the input row that it was made of."""


@dataclass(frozen=True, slots=True)
class BoltContext:
    """Where a bolt runs. `consumers` has the number of tasks of each component that subscribes to it.

    `seed` is the batch's: a bolt that draws its random numbers from it makes the same choices when Spark runs the task
    again.
    """

    component: str
    task: int = 0
    tasks: int = 1
    consumers: Mapping[str, int] = field(default_factory=dict[str, int])
    seed: int = 0
    params: Mapping[str, object] = field(default_factory=dict[str, object])


class Bolt(ABC):
    """A bolt that anchors, acks and fails by hand, in any order: a tuple may be held, and acked with others later.

    Every tuple must be acked or failed by the end of `finish`; one that is not fails its message as `unacked`. An
    exception from `execute` fails the tuple in hand; what was emitted before it stays emitted, as in Storm. An exception
    from `finish` fails every tuple that is still held.

    A bolt keeps no state from one batch to the next: each task of each batch works with a copy of its own. State that
    lasts is kept in a sink. Spark may run a task twice, so what `execute` does apart from the collector may happen twice.
    """

    streams: ClassVar[Streams] = {}
    collector: Collector

    def prepare(self, context: BoltContext, collector: Collector, /) -> None:
        """Called once before the first tuple. Open here what cannot be copied or pickled."""
        self.collector = collector

    @abstractmethod
    def execute(self, tuple: Tuple, /) -> None:
        """Called for each tuple."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Called once after the last tuple: ack or fail here what is held. It may emit."""

    def cleanup(self) -> None:  # noqa: B027 - optional
        """Called once at the very end, also after failures, but not where the process dies. What it raises is logged."""


class Emit(Protocol):
    """How a `BasicBolt` emits: anchored to the tuple in hand."""

    def __call__(self, values: object, stream: str = DEFAULT_STREAM, *, task: int | None = None) -> None:
        """Emit the value itself where the stream has one field, else a tuple, list or dict of its values."""
        ...


class BasicBolt(ABC):
    """A bolt that neither anchors nor acks: each tuple is acked when `execute` returns.

    An exception fails the tuple in hand, with the reason `error`; `raise FailTuple(reason)` with the reason `failed`.
    What was emitted in that call is dropped then. State: see `Bolt`.
    """

    streams: ClassVar[Streams] = {}

    def prepare(self, context: BoltContext, /) -> None:  # noqa: B027 - optional
        """Called once before the first tuple. Open here what cannot be copied or pickled."""

    @abstractmethod
    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        """Called for each tuple."""

    def cleanup(self) -> None:  # noqa: B027 - optional
        """Called once at the very end, also after failures, but not where the process dies."""


class ArrowBolt(ABC):
    """A bolt that works on record batches: the fast way.

    `execute` returns a record batch and, for each of its rows, the number of the input row that it was made of; or such a
    pair for each stream. Every row is anchored to that input row, and every input row is acked. It must keep no state
    between calls: where it raises, it is called again with halves of the batch, until each row that fails stands alone.
    """

    streams: ClassVar[Streams] = {}

    def prepare(self, context: BoltContext, /) -> None:  # noqa: B027 - optional
        """Called once before the first batch. Open here what cannot be copied or pickled."""

    @abstractmethod
    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows | Mapping[str, ArrowRows]:
        """Called for each record batch."""

    def cleanup(self) -> None:  # noqa: B027 - optional
        """Called once at the very end, also after failures, but not where the process dies."""


AnyBolt: TypeAlias = Bolt | BasicBolt | ArrowBolt
