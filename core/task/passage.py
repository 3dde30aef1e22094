"""A passage: the tuples of one record batch on their way through a stage, and the messages that failed among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, storable_text
from stormproof.core.graph.plan import CombineNode, GatherNode, JoinSideNode, SendNode, WriteNode
from stormproof.core.tracking.share import Anchors

Observer: TypeAlias = Callable[[str, str, pa.RecordBatch], None]
"""Is called inside a task with all tuples that a component emits at once: component, stream, rows."""


@dataclass(frozen=True, slots=True)
class Tuples:
    """Tuples: the rows, their anchors, and for a direct stream the task that the emitter named for each."""

    rows: pa.RecordBatch
    anchors: Anchors
    task: Rows | None = None

    def only(self, mask: npt.NDArray[np.bool_]) -> Tuples:
        """The tuples where `mask` is set."""
        return Tuples(
            self.rows.filter(pa.array(mask)),
            self.anchors.only(mask),
            None if self.task is None else self.task[mask],
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a message failed, and where; `input` shows what the component was called with."""

    reason: FailureReason
    component: str
    error: str
    input: str


End: TypeAlias = CombineNode | GatherNode | JoinSideNode | SendNode | WriteNode
"""Where tuples end in a stage."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Tuples that end at a node, and the component and stream that they are from."""

    key: str
    node: End
    tuples: Tuples
    component: str
    stream: str


@dataclass(slots=True)
class Passage:
    """One record batch on its way through a stage; nothing of it is combined, sent or written until its end.

    The messages `first` to `first + number - 1` are fresh: all of their tuples are in this passage. `escaped` tells which of
    these were given to a bolt that may remember them; such a message can no longer fail early.
    """

    first: int = 0
    number: int = 0
    failed: dict[int, Failed] = field(default_factory=dict[int, Failed])
    escaped: npt.NDArray[np.bool_] | None = None
    acked: list[Anchors] = field(default_factory=list[Anchors])
    ends: list[Ended] = field(default_factory=list[Ended])

    def is_early(self, message: int) -> bool:
        """Whether nothing of this message can have left the passage."""
        fresh = self.first <= message < self.first + self.number
        return fresh and (self.escaped is None or not self.escaped[message - self.first])

    def seen(self, messages: Rows) -> None:
        """Note that a bolt that may remember them was given these messages."""
        if self.escaped is None:
            self.escaped = np.zeros(self.number, np.bool_)
        local = messages - self.first
        self.escaped[local[(local >= 0) & (local < self.number)]] = True

    def mask(self, anchors: Anchors) -> npt.NDArray[np.bool_] | None:
        """The tuples of messages that have not failed early, as a mask; None: all of them."""
        if not self.failed or anchors.message is None:
            return None
        bad = np.zeros(self.number, np.bool_)
        bad[[message - self.first for message in self.failed]] = True
        local = anchors.message - self.first
        inside = (local >= 0) & (local < self.number)
        hit = bad[np.where(inside, local, 0)] & inside
        if anchors.row is None:
            return ~hit
        mask = np.ones(anchors.rows, np.bool_)
        mask[anchors.row[hit]] = False
        return mask

    def alive(self, tuples: Tuples) -> Tuples:
        """The tuples whose messages have not failed early."""
        mask = self.mask(tuples.anchors)
        return tuples if mask is None else tuples.only(mask)


def shown_row(rows: pa.RecordBatch, row: int) -> str:
    """A row as text, for the input of a failure."""
    try:
        text = repr(rows.slice(row, 1).to_pylist()[0])
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is no UTF-8
        text = f"a row of {', '.join(rows.schema.names)} whose text is not UTF-8"
    except (ValueError, OverflowError):  # or a date outside the years that Python knows
        text = f"a row of {', '.join(rows.schema.names)} with a value that Python cannot show"
    return storable_text(text, INPUT_TEXT_MAX)
