"""A user's function: whether it takes the arguments that it will get; what becomes of what it raises, and of what it
returns.

A function that takes other arguments than it gets would raise for every message, and each message would become a dead
letter. A function without a readable signature (some builtins and extension types) is not checked. For a decorated
function the decorator's own parameters count: it may pass more arguments on than it gets.

Whatever a function or a bolt raises fails its message (`sys.exit`, asyncio's
CancelledError and GeneratorExit, too); only Ctrl-C is nobody's failure.

What it returns becomes Arrow columns: a whole column at once; where that fails, the rows to blame are found and named.
"""

from __future__ import annotations

import datetime
import decimal
import errno
import functools
import inspect
import math
import os
import re
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, cast_within, copy_of, pc
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.base.message import FailureReason, storable_text
from stormproof.core.base.process import end_if_fork
from stormproof.core.heartbeat.task import ContactLost

_NAME_MAX: Final = 200
GENERATOR: Final = "a generator function"
ASYNC: Final = "async"
ASYNC_GENERATOR: Final = "an async generator function"
_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def refuse_unfit_call(component: str, where: str, function: Any, given: Sequence[str], instead: str) -> None:
    """Check that a function can be called with the values named in `given`, by position.

    Raises:
        TopologyError: it cannot; says what it gets, what it takes, where it is defined, and what to do `instead`.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError:
        name, place = name_of(function), place_of_function(function)
        raise TopologyError(
            f"{where}: function {name}{place} gets {_counted(given)}; it takes {_taken(signature)}; {instead}",
            component=component,
            function=name,
        ) from None


def never_begins(function: Any) -> str | None:
    """The kind of a function whose call runs nothing of its body, such as `ASYNC`; None for others."""
    is_object = callable(function) and not isinstance(function, type)
    for one in (function, type(function).__call__ if is_object else None):
        if inspect.isgeneratorfunction(one):
            return GENERATOR
        if inspect.iscoroutinefunction(one):
            return ASYNC
        if inspect.isasyncgenfunction(one):
            return ASYNC_GENERATOR
    return None


def name_of(function: object) -> str:
    """A function's name, for errors."""
    function = _unwrapped(function)
    name = getattr(function, "__qualname__", None)
    shown = name if isinstance(name, str) else type(function).__qualname__
    return storable_text(shown.rpartition("<locals>.")[2], _NAME_MAX)


def place_of_function(function: Any) -> str:
    """The file and line of a function's definition, in parentheses; empty where they are unknown."""
    function = _unwrapped(function)
    if isinstance(function, type):
        function = function.__dict__.get("__init__")
    elif not hasattr(function, "__code__") and not inspect.isbuiltin(function):
        function = getattr(function, "__func__", type(function).__call__)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({storable_text(os.path.basename(code.co_filename))}:{code.co_firstlineno})"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _counted(names: Sequence[str]) -> str:
    number = "no values" if not names else "1 value" if len(names) == 1 else f"{len(names)} values"
    return f"{number}: {', '.join(names)}" if names else number


def _taken(signature: inspect.Signature) -> str:
    """The arguments that a call has to give, for errors."""
    parameters = list(signature.parameters.values())
    by_place = [p for p in parameters if p.kind in _BY_PLACE]
    needed = [p.name for p in by_place if p.default is p.empty]
    names = [p.name for p in by_place]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        text = f"at least {_counted(needed)}" if needed else "any number of values"
    elif len(needed) == len(names):
        text = _counted(names)
    else:
        text = f"{len(needed)} to {_counted(names)}"
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is p.empty]
    return f"{text}, and {', '.join(by_name)} by name, which nothing gives" if by_name else text


# ---- what a user's code raised, as a message's failure: the reason, the text and the place

CAUGHT: Final = BaseException
"""What is caught around a call of a user's code; `blame` lets Ctrl-C through again."""

_SHORTAGE: Final = re.compile(r"OSError: \[Errno (\d+)\]")
_SHORTAGES: Final = frozenset({"ENOSPC", "EDQUOT", "EROFS", "EMFILE", "ENFILE", "ENOMEM"})
_OWN_FOLDER: Final = f"{Path(__file__).parents[1]}{os.sep}"


class FailTuple(Exception):
    """Raised by a function or a bolt to fail the tuple in hand, and with it its message, with the reason `failed`.

    Any other exception fails it, too, with the reason `error`.
    """

    def __init__(self, reason_text: str = "") -> None:
        super().__init__(reason_text)
        self.reason_text = reason_text


class Blamed(Exception):
    """A failure whose reason and text are known: what was raised elsewhere, or what nobody raised."""

    def __init__(self, reason: FailureReason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


def blame(error: BaseException) -> tuple[FailureReason, str]:
    """The reason and the text of the failure that an exception means.

    In a fork that a user's function made, and that comes back with this exception, the process ends here.

    Raises:
        KeyboardInterrupt: that was the exception.
        ContactLost: likewise; the loop's own iterator raised it, and no function.
    """
    end_if_fork(error)
    if isinstance(error, KeyboardInterrupt | ContactLost):
        raise error
    if isinstance(error, Blamed):
        return error.reason, error.text
    if isinstance(error, FailTuple):
        said = storable_text(error.reason_text) if error.reason_text else "raised FailTuple without a reason"
        return FailureReason.FAILED, f"{said}{_place(error)}"
    return FailureReason.ERROR, error_text(error)


def lacked_in(text: str) -> str | None:
    """The name of the errno in a text of `error_text`, where it says that the machine lacks something; else None."""
    found = _SHORTAGE.match(text)
    name = None if found is None else errno.errorcode.get(int(found[1]))
    return name if name in _SHORTAGES else None


def error_text(error: BaseException) -> str:
    """An exception's type, text and place."""
    return f"{type(error).__name__}: {storable_text(error)}{_place(error)}"


def _place(error: BaseException) -> str:
    """The last frame outside this package: the user's line, also where our code raised because of it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OWN_FOLDER):
            return f" ({storable_text(os.path.basename(frame.filename))}:{frame.lineno} in {frame.name})"
    return ""


# ---- `context`: what a user's function may ask about the call that it is in

_message_id: ContextVar[Callable[[], str] | None] = ContextVar("stormproof_message_id", default=None)
"""Answers for the call in hand. A function is called far more often than it asks."""


class CallContext:
    """The call that a function is in: that of `map`, `flat_map`, `each`, `filter` or `peek`. Made once, as `context`."""

    @property
    def message_id(self) -> str:
        """The id of the message that the function's tuple was made of, as dead letters and lineage columns show it.

        It is the same at each attempt at the message, and no other message of the topology has it: an idempotency key,
        where the function makes one request for a message. Where `flat_map` made several tuples of a message before, they
        share its id.

        Raises:
            UsageError: this is no such call, or a thread that the function started itself; or the tuple was made of several
                messages, or of none (behind a group or a join).
        """
        answer = _message_id.get()
        if answer is None:
            raise UsageError(
                "context.message_id is known inside a call of a function of map, flat_map, each, filter or peek, in the "
                "thread that runs the call; ask there, and hand it on"
            )
        return answer()


context = CallContext()
"""The call that the present thread, or the present asyncio task, is in."""


def answer_with(message_id: Callable[[], str]) -> None:
    """Have `context` ask this for calls of the present thread or task, up to the end of `calls_end_here`."""
    _message_id.set(message_id)


@contextmanager
def calls_end_here() -> Generator[None]:
    """Undoes `answer_with` at the block's end."""
    before = _message_id.set(None)
    try:
        yield
    finally:
        _message_id.reset(before)


# ---- what a function returned, as Arrow columns

CULPRIT_MAX_CHARACTERS: Final = 200

SMALL_PART: Final = 16
"""Parts of at most this many values are converted value by value."""

# Arrow itself takes 1.5 for an integer (and cuts it), a number for a date, True for a double, text for bytes.
_INTEGERS: Final = frozenset(
    {int, type(None), np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)
_REALS: Final = _INTEGERS | {float, np.float32, np.float64}


def _strict_types(type_: pa.DataType) -> frozenset[type] | None:
    if pa.types.is_integer(type_):
        return _INTEGERS
    if pa.types.is_floating(type_):
        return _REALS
    if pa.types.is_binary(type_):
        return frozenset({bytes, bytearray, memoryview, type(None)})
    if pa.types.is_timestamp(type_):
        return frozenset({datetime.datetime, np.datetime64, type(None)})
    if pa.types.is_date(type_):
        return frozenset({datetime.date, type(None)})
    if pa.types.is_decimal(type_):
        return frozenset({decimal.Decimal, int, type(None)})
    return None


def fits_strictly(value: object, type_: pa.DataType) -> bool:
    """Whether a value is of a Python type that a column of this type takes; Arrow itself takes more, and changes it."""
    strict = _strict_types(type_)
    return value is None or strict is None or type(value) in strict


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A record batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def column_of(values: Sequence[object], field: pa.Field) -> tuple[pa.Array, list[tuple[int, str]]]:
    """The values as a column of the field's type, and (row, error) of those that it cannot hold.

    No value is changed to fit: 1.5 is no integer, 1 no text, a number no date. Naive datetimes count as UTC. NULL in a
    NOT NULL field is an error. Failed rows hold an arbitrary value.

    Guarantee:
        A column without errors takes one conversion; the rows to blame are looked for only after it failed.
    """
    strict = _strict_types(field.type)
    array = _whole(values, field, strict)
    return (array, []) if array is not None else _but_for_culprits(values, field, strict)


def _whole(values: Sequence[object], field: pa.Field, strict: frozenset[type] | None) -> pa.Array | None:
    """The values in one conversion; None where that is not possible."""
    try:
        array = pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    if (strict is not None and not strict.issuperset(map(type, values))) or (array.null_count and not field.nullable):
        return None
    if _overflown(array, values) or (pa.types.is_nested(field.type) and not _fits_inside(values, field.type)):
        return None
    # Above 2 GiB of text there are chunks.
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _fits_inside(values: Sequence[Any], type_: pa.DataType) -> bool:
    """Whether a column takes the values inside of nested ones unchanged; Arrow would cut a 1.5 to 1 there."""
    if not pa.types.is_nested(type_):
        strict = _strict_types(type_)
        kinds = set(map(type, values)) if strict is not None else set[type]()
        are_of_it = all(issubclass(kind, tuple(strict or ())) and kind is not bool for kind in kinds)
        return are_of_it and not (pa.types.is_float32(type_) and _overflown(pa.array(values, type_), values))
    there = [value for value in values if value is not None]
    if pa.types.is_map(type_):
        pairs = [pair for value in there for pair in (value.items() if isinstance(value, Mapping) else value)]
        return all(
            _fits_inside([pair[n] for pair in pairs], t) for n, t in enumerate((type_.key_type, type_.item_type))
        )
    if pa.types.is_struct(type_):
        rows = [value if isinstance(value, tuple) else dict(value) for value in there]
        return all(
            _fits_inside([row[n] if isinstance(row, tuple) else row.get(field.name) for row in rows], field.type)
            for n, field in enumerate(type_)
        )
    return _fits_inside(list(chain.from_iterable(there)), type_.value_type)


def _overflown(array: pa.Array, values: Sequence[Any]) -> bool:
    """Whether a number became infinite in a column of 32-bit floats, which Arrow does without a word."""
    if not pa.types.is_float32(array.type):
        return False
    return any(not math.isinf(values[row]) for row in pc.indices_nonzero(pc.is_inf(array)).to_pylist())


def nulls_refused(array: pa.Array, field: pa.Field) -> list[tuple[int, str]]:
    """The rows of a finished column that are NULL where the field may not be."""
    if field.nullable or not array.null_count:
        return []
    rows: list[int] = np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False)).tolist()
    return [(row, f"field {field.name!r} is NOT NULL and got None") for row in rows]


def _but_for_culprits(
    values: Sequence[object], field: pa.Field, strict: frozenset[type] | None
) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Halve until the parts that hold culprits are small, and convert those value by value.

    So one bad value in 10,000 costs about two conversions of the column more, not 10,000 small ones.
    """
    kept = list(values)
    errors: list[tuple[int, str]] = []
    todo = [(0, len(kept))]
    while todo:
        start, stop = todo.pop()
        if stop - start > SMALL_PART:
            middle = (start + stop) // 2
            halves = [(middle, stop), (start, middle)]  # the first half comes off first: rows stay in order
            todo += [(a, b) for a, b in halves if _whole(values[a:b], field, strict) is None]
            continue
        for row in range(start, stop):
            problem = _problem(values[row], field, strict)
            if problem is not None:
                errors.append((row, problem))
                kept[row] = None
    try:
        return pa.array(kept, field.type), errors
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # Each by itself is converted, but not all in one list: a dict and a tuple for a struct.
        return pa.concat_arrays([pa.array([value], field.type) for value in kept]), errors


def _problem(value: object, field: pa.Field, strict: frozenset[type] | None) -> str | None:
    if value is None:
        return None if field.nullable else f"field {field.name!r} is NOT NULL and got None"
    wanted = f"field {field.name!r} is {type_text(field.type)}, got {value_text(value)} ({type(value).__name__})"
    if strict is not None and not isinstance(value, tuple(strict)):
        return wanted
    if isinstance(value, bool) and not pa.types.is_boolean(field.type):
        return wanted
    try:
        array = pa.array([value], field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        return f"{wanted}: {storable_text(error, CULPRIT_MAX_CHARACTERS)}"
    if pa.types.is_nested(field.type) and not _fits_inside([value], field.type):
        return f"{wanted}: a value inside of it is of another type, or too large"
    return f"{wanted}: it is too large" if _overflown(array, [value]) else None


def type_text(type_: pa.DataType) -> str:
    """A type in an error's text: a decimal as the user's schema spells it, all others as Arrow does."""
    return f"decimal({type_.precision},{type_.scale})" if pa.types.is_decimal128(type_) else str(type_)


def value_text(value: object) -> str:
    """A user's value in an error's text; its `repr` may raise."""
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's __repr__ may raise anything, and the failure must still be recorded
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return storable_text(text, CULPRIT_MAX_CHARACTERS)


Copies = Mapping[type, Callable[[Any], object]]


def all_copied(value: Any) -> object:
    """The value, or a copy of it and of all in it that can be changed."""
    return copied(value, _ALL)


_ALL: Final[Copies] = {
    tuple: lambda value: tuple(map(all_copied, value)),
    list: lambda value: [*map(all_copied, value)],
    dict: lambda value: {key: all_copied(part) for key, part in value.items()},
    bytearray: bytes,
    memoryview: bytes,
    np.ndarray: np.copy,
}
_ROWS: Final[Copies] = {list: list.copy, dict: dict.copy}


def copies_of(schema: pa.Schema) -> Copies:
    """How a row that a user's code gives is copied, by its type: the code may fill the same list or buffer again before its
    rows are taken. Of other types nothing can be changed.
    """
    if any(pa.types.is_nested(kind) or pa.types.is_binary(kind) for kind in schema.types):
        return _ALL
    return _ROWS if len(schema) > 1 else {}


def copied(value: object, copies: Copies) -> object:
    """The value, or a copy of it."""
    copy = copies.get(value.__class__)
    return value if copy is None else copy(value)


def batch_of(
    made: list[object], schema: pa.Schema, skip: Iterable[int], gave: str = "the function gave"
) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
    """What a user's code gave (bare values for a schema of one field, else tuples, lists or dicts) as a record batch, and
    (row, error) of what the schema cannot hold, in row order. Rows in `skip` failed before; `gave` begins the errors.
    """
    errors: dict[int, str] = {}
    if len(schema) == 1:
        columns: list[Sequence[object]] = [made]
    else:
        columns, errors = _columns(made, schema, frozenset(skip), gave)
    return rows_of_columns(columns, schema, errors), sorted(errors.items())


def rows_of_columns(columns: Sequence[Sequence[object]], schema: pa.Schema, errors: dict[int, str]) -> pa.RecordBatch:
    """A record batch of columns of Python values; the first error of each row that a column refuses is put into `errors`."""
    arrays: list[pa.Array] = []
    for column, field in zip(columns, schema, strict=True):
        array, failed = column_of(column, field)
        arrays.append(array)
        for row, text in failed:
            errors.setdefault(row, text)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _columns(
    made: list[object], schema: pa.Schema, skip: frozenset[int], gave: str
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
            values, problem = _row(row, schema, gave)
        except CAUGHT as error:  # a mapping or a sequence of the user's own
            values, problem = (None,) * width, blame(error)[1]
        if problem is not None and number not in skip:
            errors[number] = problem
        kept.append(values)
    return list(zip(*kept, strict=True)), errors


def _row(row: object, schema: pa.Schema, gave: str) -> tuple[Sequence[object], str | None]:
    names: list[str] = schema.names
    nothing = (None,) * len(names)
    if isinstance(row, Mapping):
        parts = cast("Mapping[object, object]", row)
        if set(parts) == set(names):
            return tuple(parts[name] for name in names), None
        return nothing, f"{gave} the keys {', '.join(map(value_text, parts))}; the schema has {', '.join(names)}"
    if isinstance(row, (tuple, list)):
        values = cast("Sequence[object]", row)
        if len(values) == len(names):
            return values, None
        return nothing, f"{gave} {len(values)} values; the schema has {len(names)}: {', '.join(names)}"
    return nothing, f"{gave} a {type(row).__name__}; a tuple or dict of {', '.join(names)} is wanted"


def arrow_result(result: object, given: int, schema: pa.Schema) -> tuple[pa.RecordBatch, Rows]:
    """What Arrow-wise code gave for `given` rows, checked against its schema; columns are matched by name, and copied.

    Raises:
        TypeError: it is no (record batch, parent index) of that schema.
        ValueError: the parent index points outside the rows, or a value cannot be cast.
    """
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
    for wanted in schema:
        column = batch.column(wanted.name)
        arrays.append(column if column.type == wanted.type else cast_within(column, wanted.type))
    parent = np.asarray(index)
    if parent.ndim != 1 or len(parent) != batch.num_rows or (len(parent) and parent.dtype.kind not in "iu"):
        raise TypeError(
            f"the parent index has shape {parent.shape} of {parent.dtype}; {batch.num_rows} row numbers are wanted"
        )
    if len(parent) and (int(parent.min()) < 0 or int(parent.max()) >= given):
        raise ValueError(f"the parent index has numbers outside 0 to {given - 1}")
    return copy_of(pa.RecordBatch.from_arrays(arrays, schema=schema)), parent.astype(np.int64)
