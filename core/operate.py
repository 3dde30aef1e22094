"""Running users' functions over record batches: tight loops on the way that goes well, names and places on the other.

A function that raises (sys.exit included; only Ctrl-C goes through), or gives what its schema cannot hold, fails the
row that it was called with; the other rows go on. Values are checked before anything is combined or written.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from stormproof.core.compute import pc
from stormproof.core.convert import column_of, nulls_refused, shown
from stormproof.core.message import INPUT_TEXT_MAX, storable_text
from stormproof.core.plan import OperationNode
from stormproof.core.share import Rows
from stormproof.core.topology import OperationKind

_CAUGHT: Final = BaseException
"""A message answers for whatever its function throws, asyncio's CancelledError and GeneratorExit among it."""


def _answered(error: BaseException) -> str:
    """The text of what a message has to answer for; Ctrl-C is not its own."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error_text(error)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation made of a batch.

    `counts[i]` is the number of tuples made of input row i, which lie in `rows` input by input; None: one of each.
    `failed` has the input rows that failed, with the error; tuples of a failed row hold nothing that may be used.
    """

    rows: pa.RecordBatch
    counts: Rows | None
    failed: Mapping[int, str]


def apply(node: OperationNode, rows: pa.RecordBatch) -> Outcome:
    """Run an operation's function over all rows."""
    match node.kind:
        case OperationKind.MAP:
            return _map(node, rows)
        case OperationKind.FLAT_MAP:
            return _flat_map(node, rows)
        case OperationKind.FILTER:
            return _filter(node, rows)
        case OperationKind.ARROW:
            return _arrow(node, rows)


def input_text(node: OperationNode, rows: pa.RecordBatch, row: int) -> str:
    """What the function was called with for one row."""
    shown = {name: rows.column(name)[row].as_py() for name in node.fields}
    return storable_text(repr(shown), INPUT_TEXT_MAX)


def error_text(error: BaseException) -> str:
    """An exception's type, text and place: the last frame that is not this file's own."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {storable_text(error)}"
    if not frames or frames[-1].filename == __file__:
        return text
    last = frames[-1]
    return f"{text} ({storable_text(os.path.basename(last.filename))}:{last.lineno} in {last.name})"


def _arguments(node: OperationNode, rows: pa.RecordBatch) -> Iterator[object]:
    """The single argument of each row, or its arguments as a tuple."""
    columns = [rows.column(name).to_pylist() for name in node.fields]
    return iter(columns[0]) if len(columns) == 1 else zip(*columns, strict=True)


def _called_with_one(node: OperationNode) -> Callable[[object], object]:
    function = node.function
    if len(node.fields) == 1:
        return function
    return lambda arguments: function(*cast("tuple[object, ...]", arguments))


def _map(node: OperationNode, rows: pa.RecordBatch) -> Outcome:
    call, arguments = _called_with_one(node), _arguments(node, rows)
    made: list[object] = []
    append, failed = made.append, dict[int, str]()
    while True:
        try:
            for argument in arguments:
                append(call(argument))
            break
        except _CAUGHT as error:
            failed[len(made)] = _answered(error)
            append(None)
    batch, errors = _batch_of(made, node.schema, failed.keys())
    for row, text in errors:
        failed.setdefault(row, text)
    return Outcome(batch, None, failed)


def _flat_map(node: OperationNode, rows: pa.RecordBatch) -> Outcome:
    call, arguments = _called_with_one(node), _arguments(node, rows)
    made: list[object] = []
    ends: list[int] = []
    extend, mark, failed = made.extend, ends.append, dict[int, str]()
    while True:
        try:
            for argument in arguments:
                result = call(argument)
                if result.__class__ is str:
                    raise TypeError(f"a flat_map's function gives an iterable of values, got the text {result!r:.80}")
                extend(cast("Iterable[object]", result))
                mark(len(made))
            break
        except _CAUGHT as error:
            failed[len(ends)] = _answered(error)
            del made[ends[-1] if ends else 0 :]  # what an iterable gave before it raised
            mark(len(made))
    marks = np.array([0, *ends], np.int64)
    counts = marks[1:] - marks[:-1]
    batch, errors = _batch_of(made, node.schema, ())
    if errors:
        parent = np.repeat(np.arange(len(counts)), counts)
        for row, text in errors:
            failed.setdefault(int(parent[row]), text)
    return Outcome(batch, counts, failed)


def _filter(node: OperationNode, rows: pa.RecordBatch) -> Outcome:
    call, arguments = _called_with_one(node), _arguments(node, rows)
    kept: list[bool] = []
    append, failed = kept.append, dict[int, str]()
    while True:
        try:
            for argument in arguments:
                append(bool(call(argument)))
            break
        except _CAUGHT as error:
            failed[len(kept)] = _answered(error)
            append(False)
    mask = np.array(kept, np.bool_)
    return Outcome(rows if mask.all() else rows.filter(pa.array(mask)), mask.astype(np.int64), failed)


def _batch_of(
    made: list[object], schema: pa.Schema, skip: Iterable[int]
) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
    """Results as a record batch, and (row, error) of those that the schema cannot hold; `skip` failed before."""
    errors: dict[int, str] = {}
    if len(schema) == 1:
        columns: list[Sequence[object]] = [made]
    else:
        columns, errors = _columns(made, schema, frozenset(skip))
    arrays: list[pa.Array] = []
    for column, field in zip(columns, schema, strict=True):
        array, failed = column_of(column, field)
        arrays.append(array)
        for row, text in failed:
            errors.setdefault(row, text)
    return pa.RecordBatch.from_arrays(arrays, schema=schema), sorted(errors.items())


def _columns(
    made: list[object], schema: pa.Schema, skip: frozenset[int]
) -> tuple[list[Sequence[object]], dict[int, str]]:
    """Rows (tuples, lists or dicts) to columns."""
    width = len(schema)
    if not made:
        return [[] for _ in schema], {}
    if {tuple, list}.issuperset(map(type, made)):
        rows = cast("list[Sequence[object]]", made)
        if set(map(len, rows)) == {width}:
            return list(zip(*rows, strict=True)), {}
    errors: dict[int, str] = {}
    kept: list[Sequence[object]] = []
    for number, row in enumerate(made):
        try:
            values, problem = _row(row, schema)
        except _CAUGHT as error:  # a mapping or a sequence of the user's own
            values, problem = (None,) * width, _answered(error)
        if problem is not None and number not in skip:
            errors[number] = problem
        kept.append(values)
    return list(zip(*kept, strict=True)), errors


def _row(row: object, schema: pa.Schema) -> tuple[Sequence[object], str | None]:
    names: list[str] = schema.names
    nothing = (None,) * len(names)
    if isinstance(row, Mapping):
        parts = cast("Mapping[object, object]", row)
        if set(parts) == set(names):
            return tuple(parts[name] for name in names), None
        return nothing, f"the function gave the keys {', '.join(map(shown, parts))}; the schema has {', '.join(names)}"
    if isinstance(row, (tuple, list)):
        values = cast("Sequence[object]", row)
        if len(values) == len(names):
            return values, None
        return nothing, f"the function gave {len(values)} values; the schema has {len(names)}: {', '.join(names)}"
    return nothing, f"the function gave a {type(row).__name__}; a tuple or dict of {', '.join(names)} is wanted"


def _arrow(node: OperationNode, rows: pa.RecordBatch) -> Outcome:
    """Run over all rows at once; where that fails, over halves, until the culprits stand alone."""
    given = rows.select(list(node.fields))
    failed: dict[int, str] = {}
    parts: list[tuple[pa.RecordBatch, Rows]] = []
    todo = [(0, given.num_rows)] if given.num_rows else []
    while todo:
        start, stop = todo.pop()
        try:
            batch, parent = _checked(node.function, given.slice(start, stop - start), node.schema)
            parts.append((batch, parent + start))
        except _CAUGHT as error:
            if stop - start == 1:
                failed[start] = _answered(error)
                continue
            middle = (start + stop) // 2
            todo += [(middle, stop), (start, middle)]  # the first half comes off first: rows stay in order
    if not parts:
        return Outcome(_empty(node.schema), np.zeros(given.num_rows, np.int64), failed)
    batch = parts[0][0] if len(parts) == 1 else pa.concat_batches([part for part, _ in parts])
    parent = np.concatenate([rows_ for _, rows_ in parts])
    if len(parent) > 1 and (np.diff(parent) < 0).any():
        order = np.argsort(parent, kind="stable")
        batch, parent = batch.take(pa.array(order)), parent[order]
    for column, field in zip(batch.columns, node.schema, strict=True):
        for row, text in nulls_refused(column, field):
            failed.setdefault(int(parent[row]), text)
    return Outcome(batch, np.bincount(parent, minlength=given.num_rows), failed)


def _checked(function: Callable[..., Any], rows: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, Rows]:
    """Call an Arrow-wise function and hold it to what it promised; columns are taken by name, never by position."""
    result = function(rows)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"an Arrow-wise function gives (record batch, parent index), got {type(result).__name__}")
    batch, index = result
    if not isinstance(batch, pa.RecordBatch):
        raise TypeError(f"an Arrow-wise function gives a pyarrow.RecordBatch, got {type(batch).__name__}")
    if sorted(batch.schema.names) != sorted(schema.names):
        raise TypeError(
            f"the batch has the fields {', '.join(batch.schema.names)}; the schema has {', '.join(schema.names)}"
        )
    arrays: list[pa.Array] = []
    for field in schema:
        column = batch.column(field.name)
        arrays.append(column if column.type == field.type else pc.cast(column, field.type))
    parent = np.asarray(index)
    if parent.ndim != 1 or len(parent) != batch.num_rows or (len(parent) and parent.dtype.kind not in "iu"):
        raise TypeError(
            f"the parent index has shape {parent.shape} of {parent.dtype}; {batch.num_rows} row numbers are wanted"
        )
    if len(parent) and (int(parent.min()) < 0 or int(parent.max()) >= rows.num_rows):
        raise ValueError(f"the parent index has numbers outside 0 to {rows.num_rows - 1}")
    return pa.RecordBatch.from_arrays(arrays, schema=schema), parent.astype(np.int64)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
