"""Runs one bolt in one task of one batch: record batches in, record batches and the links between tuples out.

What a `BasicBolt` emitted for a tuple is taken back where it raises; an `ArrowBolt` that raises is called with halves. The
loops over a bolt's `execute` do as little as possible: what an error needs is looked up only when something went wrong.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar, cast

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import BoltUnavailable, UsageError
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, storable_text
from stormproof.core.base.process import fewer_collections
from stormproof.core.bolt.api import AnyBolt, ArrowBolt, BasicBolt, Bolt, BoltContext
from stormproof.core.bolt.collector import (
    DEFAULT_STREAM,
    Collector,
    Emission,
    Emitted,
    FailedTuple,
    OwnThread,
    Ran,
    in_one,
    log,
    unknown_stream,
)
from stormproof.core.bolt.tuples import Origin, Tuple, handle_of, text_of, tuples_from
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.user_code.functions import CAUGHT, arrow_result, blame, copied, error_text, nulls_refused

P = ParamSpec("P")

_NO_ROWS: Final[Rows] = np.empty(0, np.int64)
_NOTHING: Final = Ran({}, _NO_ROWS, (), 0)

TUPLES_AT_ONCE: Final = 2_048
"""How many tuples are made before the bolt gets them: so many stay in a processor's cache, and seldom reach the cycle
collector. A row-wise bolt takes two thirds of the time that it takes with the 100,000 of a large record batch."""


_BoltT = TypeVar("_BoltT", bound=AnyBolt)


def fresh(bolt: _BoltT) -> _BoltT:
    """A copy of the bolt for one task of one batch: the user's own object never changes.

    Raises:
        UsageError: the bolt holds something that cannot be copied.
    """
    try:
        return copy.deepcopy(bolt)
    except Exception as error:
        raise UsageError(
            f"bolt {type(bolt).__name__} cannot be copied for a task: {error_text(error)}; open connections, files and "
            "locks in prepare, not in __init__"
        ) from error


class BoltRunner:
    """One bolt in one task of one batch.

    Input tuples get handles that count up from 0 over all calls. `direct` has, for each stream with a direct() subscriber,
    the number of that subscriber's tasks; the smallest, where there are several.

    Guarantee:
        Whatever `execute` raises, Ctrl-C apart, fails the tuple in hand and no other. Every handle is acked or failed
        exactly once, at the latest by `finish`.

    Raises:
        BoltUnavailable: `prepare` raised.
    """

    def __init__(
        self,
        component: str,
        bolt: AnyBolt,
        streams: Mapping[str, pa.Schema],
        direct: Mapping[str, int],
        context: BoltContext,
    ) -> None:
        self._component = component
        self._bolt = bolt
        self._next = 0
        self._open = True
        self._way: _Way
        if isinstance(bolt, Bolt):
            self._way = _Explicit(component, bolt, streams, direct)
        elif isinstance(bolt, BasicBolt):
            self._way = _Basic(component, bolt, streams, direct)
        else:
            self._way = _Arrow(component, bolt, streams, direct)
        try:
            self._way.prepare(context)
        except CAUGHT as error:
            raise BoltUnavailable(
                f"bolt {component!r} raised in prepare, where no message answers for it: {blame(error)[1]}",
                component=component,
                where="prepare",
            ) from error

    @property
    def holds(self) -> bool:
        """Whether a tuple may stay open after the call that it came with, and be an anchor in later calls."""
        return isinstance(self._bolt, Bolt)

    @property
    def held(self) -> Rows:
        """The handles that are neither acked nor failed now, ascending."""
        return self._way.held()

    def run(self, rows: pa.RecordBatch, component: str, stream: str, heartbeat: Heartbeat | None = None) -> Ran:
        """Call the bolt with every row. They get the next handles, in order.

        `component` and `stream` say where the rows come from. Each row is a sign of life in `heartbeat`, which also notes
        the message in hand where that is asked for (`Heartbeat.at`). An `ArrowBolt` gives one sign of life a call, and no
        note.

        Raises:
            JobFailed: an error that no message answers for: see `Collector.end`.
        """
        if not self._open:
            raise AssertionError(f"bolt {self._component!r} has ended")
        first, self._next = self._next, self._next + rows.num_rows
        if not rows.num_rows:
            return _NOTHING
        # A careful heartbeat knows the message of each of the rows, counted from the first one.
        in_blocks = self._way.makes_tuples and not (heartbeat is not None and heartbeat.careful)
        size = TUPLES_AT_ONCE if in_blocks else rows.num_rows
        with fewer_collections():
            return in_one(
                [
                    self._way.run(rows.slice(start, size), component, stream, first + start, heartbeat)
                    for start in range(0, rows.num_rows, size)
                ]
            )

    def finish(self, heartbeat: Heartbeat | None = None) -> Ran:
        """End the batch at this task: the bolt's `finish`, then what is still open fails as `unacked`, then `cleanup`.

        Raises:
            JobFailed: `finish` raised and no tuple was open that could have answered for it.
        """
        with fewer_collections():
            ran = self._way.finish(self._next, heartbeat)
        self.close()
        return ran

    def close(self) -> None:
        """Call the bolt's `cleanup`, once; `finish` does so, too. For a task that was given up. What it raises is logged."""
        if not self._open:
            return
        self._open = False
        self._way.close()
        try:
            self._bolt.cleanup()
        except CAUGHT as error:  # the rows are whole: what the bolt leaves behind is no reason to make them again
            log.warning("bolt %r raised in cleanup, which changes nothing: %s", self._component, blame(error)[1])


class _Way(ABC):
    """How one kind of bolt is run. By default every tuple is acked or failed in the call that it came with."""

    makes_tuples: ClassVar[bool] = True
    """Whether each row becomes a tuple; else it is called with all rows at once."""

    @abstractmethod
    def prepare(self, context: BoltContext) -> None: ...

    @abstractmethod
    def run(
        self, rows: pa.RecordBatch, component: str, stream: str, first: int, heartbeat: Heartbeat | None
    ) -> Ran: ...

    def finish(self, first: int, heartbeat: Heartbeat | None) -> Ran:
        return _NOTHING

    def held(self) -> Rows:
        return _NO_ROWS

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """The batch is over."""


class _Explicit(_Way):
    """Runs a `Bolt`, which acks and fails through its collector."""

    def __init__(self, component: str, bolt: Bolt, streams: Mapping[str, pa.Schema], direct: Mapping[str, int]) -> None:
        self._component = component
        self._bolt = bolt
        self._collector = Collector(component, streams, direct)

    def prepare(self, context: BoltContext) -> None:
        self._bolt.prepare(context, self._collector)

    def run(self, rows: pa.RecordBatch, component: str, stream: str, first: int, heartbeat: Heartbeat | None) -> Ran:
        collector = self._collector
        given = tuples_of(rows, component, stream, first, collector)
        collector.call(given.refusing(self._bolt.execute), first, given.tuples, heartbeat)
        return collector.end()

    def finish(self, first: int, heartbeat: Heartbeat | None) -> Ran:
        self._collector.last_call(self._bolt.finish, first, heartbeat)
        return self._collector.end(
            f"bolt {self._component!r} neither acked nor failed the tuple by the end of its batch; end it in execute or, "
            "held, in finish"
        )

    def held(self) -> Rows:
        return self._collector.held()

    def close(self) -> None:
        self._collector.close()


class _Basic(_Way):
    """Runs a `BasicBolt`: what it emits is anchored to the row in hand, and dropped where that row fails."""

    def __init__(
        self, component: str, bolt: BasicBolt, streams: Mapping[str, pa.Schema], direct: Mapping[str, int]
    ) -> None:
        self._component = component
        self._bolt = bolt
        self._streams = streams
        self._direct = direct
        self._own = OwnThread(component)

    def prepare(self, context: BoltContext) -> None:
        self._bolt.prepare(context)

    def run(self, rows: pa.RecordBatch, component: str, stream: str, first: int, heartbeat: Heartbeat | None) -> Ran:
        given = tuples_of(rows, component, stream, first, self)
        me, execute, tuples = self._component, given.refusing(self._bolt.execute), given.tuples
        made = {name: Emission(me, name, schema, self._direct.get(name)) for name, schema in self._streams.items()}
        open_, own = made, self._own
        row = -1

        def emit(values: object, stream: str = DEFAULT_STREAM, *, task: int | None = None) -> None:
            if get_ident() != own.ident:
                own.refuse("emit")
            try:
                out = open_[stream]
            except (KeyError, TypeError):
                raise unknown_stream(me, stream, open_, open_ is not made) from None
            if task is not None or out.tasks is not None:
                chosen = out.checked_task(task)
                if chosen is not None:
                    out.chosen.append(chosen)
            if values.__class__ in out.copies:
                values = copied(values, out.copies)
            out.values.append(values)
            out.handles.append(row)

        failed: dict[int, FailedTuple] = {}
        for hand in tuples if heartbeat is None else heartbeat.each(tuples):
            row += 1
            try:
                execute(hand, emit)
            except CAUGHT as error:
                reason, text = blame(error)
                failed[row] = FailedTuple(first + row, reason, text, text_of(hand))
        open_ = {}
        own.require_none_refused()
        return self._ran(list(made.values()), tuples, first, failed)

    def close(self) -> None:
        self._own.close()

    def _ran(self, outs: list[Emission], tuples: list[Tuple], first: int, failed: dict[int, FailedTuple]) -> Ran:
        parts: list[_StreamRows] = []
        for out in outs:
            if not out.values:
                continue
            parent = np.array(out.handles, np.int64)
            batch, errors = out.batch()
            for row, text in errors:
                number = int(parent[row])
                refused = FailedTuple(first + number, FailureReason.ERROR, text, text_of(tuples[number]))
                failed.setdefault(number, refused)
            task = None if out.tasks is None else np.array(out.chosen, np.int64)
            parts.append(_StreamRows(out.name, batch, parent, task))
        return _anchored_to_parents(parts, first, len(tuples), failed)


class _Arrow(_Way):
    """Runs an `ArrowBolt` over all rows at once; where that fails, over halves, until each row that fails stands alone."""

    makes_tuples: ClassVar[bool] = False

    def __init__(
        self, component: str, bolt: ArrowBolt, streams: Mapping[str, pa.Schema], direct: Mapping[str, int]
    ) -> None:
        if direct:
            raise UsageError(
                f"bolt {component!r} is an ArrowBolt, which cannot name tasks, but stream {next(iter(direct))!r} has a "
                "direct() subscriber; write a BasicBolt, or subscribe in another way",
                component=component,
            )
        self._bolt = bolt
        self._streams = streams

    def prepare(self, context: BoltContext) -> None:
        self._bolt.prepare(context)

    def run(self, rows: pa.RecordBatch, component: str, stream: str, first: int, heartbeat: Heartbeat | None) -> Ran:
        failed: dict[int, FailedTuple] = {}
        found: dict[str, list[tuple[pa.RecordBatch, Rows]]] = {}
        todo = [(0, rows.num_rows)]
        while todo:
            start, stop = todo.pop()
            if heartbeat is not None:
                heartbeat.beat()
            try:
                given = self._checked(rows.slice(start, stop - start))
            except BoltUnavailable:  # what the bolt needs is away: no row is to blame
                raise
            except CAUGHT as error:
                if stop - start == 1:
                    reason, text = blame(error)
                    failed[start] = FailedTuple(first + start, reason, text, _row_text(rows, start))
                    continue
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]  # the first half comes off first: rows stay in order
                continue
            for name, (batch, parent) in given.items():
                found.setdefault(name, []).append((batch, parent + start))
        parts: list[_StreamRows] = []
        for name, pieces in found.items():
            batch = pieces[0][0] if len(pieces) == 1 else pa.concat_batches([piece for piece, _ in pieces])
            parent = np.concatenate([numbers for _, numbers in pieces])
            if len(parent) > 1 and (np.diff(parent) < 0).any():
                order = np.argsort(parent, kind="stable")
                batch, parent = batch.take(pa.array(order)), parent[order]
            for column, field in zip(batch.columns, self._streams[name], strict=True):
                for row, text in nulls_refused(column, field):
                    number = int(parent[row])
                    said = f"stream {name!r}: {text}"
                    refused = FailedTuple(first + number, FailureReason.ERROR, said, _row_text(rows, number))
                    failed.setdefault(number, refused)
            parts.append(_StreamRows(name, batch, parent, None))
        return _anchored_to_parents(parts, first, rows.num_rows, failed)

    def _checked(self, rows: pa.RecordBatch) -> dict[str, tuple[pa.RecordBatch, Rows]]:
        result: object = self._bolt.execute(rows)
        given = cast("Mapping[str, object]", result) if isinstance(result, Mapping) else {DEFAULT_STREAM: result}
        checked: dict[str, tuple[pa.RecordBatch, Rows]] = {}
        for name, part in given.items():
            if name not in self._streams:
                raise ValueError(f"no stream {name!r}; known: {', '.join(self._streams) or 'none'}")
            checked[name] = arrow_result(part, rows.num_rows, self._streams[name])
        return checked


def tuples_of(rows: pa.RecordBatch, component: str, stream: str, first: int, owner: object) -> _CallInput:
    """Rows as tuples, with handles from `first` on. A row with text that is not UTF-8 is named with its error."""
    names = tuple(rows.schema.names)
    origin = Origin(component, stream, names, {name: i for i, name in enumerate(names)}, owner)
    broken: dict[int, UnicodeDecodeError] = {}
    try:
        columns: list[list[Any]] = [column.to_pylist() for column in rows.columns]
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is not UTF-8
        columns = [_readable(column, first, broken) for column in rows.columns]
    return _CallInput(tuples_from(zip(*columns, strict=True), origin, first), broken)


def _readable(column: pa.Array, first: int, broken: dict[int, UnicodeDecodeError]) -> list[Any]:
    values: list[Any] = []
    for handle, value in enumerate(column, first):
        try:
            values.append(value.as_py())
        except UnicodeDecodeError as error:
            broken.setdefault(handle, error)
            values.append(None)
    return values


@dataclass(frozen=True, slots=True)
class _CallInput:
    """The tuples of a call. Those in `broken` (by handle) cannot be read, and fail before their bolt sees them."""

    tuples: list[Tuple]
    broken: Mapping[int, UnicodeDecodeError]

    def refusing(self, execute: Callable[Concatenate[Tuple, P], None]) -> Callable[Concatenate[Tuple, P], None]:
        """The bolt's `execute`, which raises for broken tuples instead of being called."""
        broken = self.broken
        if not broken:
            return execute

        def refuse(tuple_: Tuple, /, *rest: P.args, **named: P.kwargs) -> None:
            if handle_of(tuple_) in broken:
                raise broken[handle_of(tuple_)]
            execute(tuple_, *rest, **named)

        return refuse


@dataclass(frozen=True, slots=True)
class _StreamRows:
    """One stream's rows; `parent` is, for each of them, the row of the one input that it is anchored to, ascending."""

    stream: str
    rows: pa.RecordBatch
    parent: Rows
    task: Rows | None


def _anchored_to_parents(parts: list[_StreamRows], first: int, inputs: int, failed: Mapping[int, FailedTuple]) -> Ran:
    """The outcome of a call in which every input ends: acked, or failed, and then the rows anchored to it are dropped."""
    good = np.ones(inputs, np.bool_)
    good[list(failed)] = False
    emitted: dict[str, Emitted] = {}
    links = np.zeros(inputs, np.int64)
    for part in parts:
        rows, parent, task = part.rows, part.parent, part.task
        if failed:
            keep = good[parent]
            rows, parent = rows.filter(pa.array(keep)), parent[keep]
            task = None if task is None else task[keep]
        if not len(parent):
            continue
        counts = np.bincount(parent, minlength=inputs)
        ordinal = np.arange(len(parent)) + (links - (np.cumsum(counts) - counts))[parent]
        links += counts
        emitted[part.stream] = Emitted(rows, np.arange(len(parent), dtype=np.int64), parent + first, ordinal, task)
    acked = np.flatnonzero(good).astype(np.int64) + first
    return Ran(emitted, acked, [failed[row] for row in sorted(failed)], 0)


def _row_text(rows: pa.RecordBatch, row: int) -> str:
    try:
        return storable_text(rows.slice(row, 1).to_pylist()[0], INPUT_TEXT_MAX)
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is not UTF-8
        return f"a row of {', '.join(rows.schema.names)} whose text is not UTF-8"
