"""Nested columns as JSON text, column by column, with values written as Postgres's own `to_jsonb` writes them."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.sinks.leaves import as_list, is_bytes, is_list, is_string, lengths_of, plain

_TEXT: Final = pa.large_string()
_ESCAPED: Final = '[\\x00-\\x1f"\\\\]'
_NOT_NUMBERS: Final = (("nan", '"NaN"'), ("inf", '"Infinity"'), ("-inf", '"-Infinity"'))


def json_text(column: pa.Array) -> pa.Array:
    r"""Each value as JSON; NULL stays NULL.

    Numbers keep their digits; NaN and infinities, dates, times and timestamps are strings, bytes are ``"\\x..."``. The
    keys of a map are its objects' names. Text must be UTF-8 and hold no NUL: `Limits` has checked that.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_struct(kind):
        made = _object(column)
    elif is_list(kind):
        made = _between("[", _joined(column, _value(column.flatten())), "]")
    elif pa.types.is_map(kind):
        entries = as_list(column)
        keys, items = entries.flatten().flatten()
        pairs = pc.binary_join_element_wise(_name(keys), _value(items), pa.scalar(":", _TEXT))
        made = _between("{", _joined(entries, pairs), "}")
    else:
        return _scalar(column)
    return pc.if_else(pc.is_valid(column), made, pa.scalar(None, _TEXT))


def _value(column: pa.Array) -> pa.Array:
    return pc.fill_null(json_text(column), "null")


def _object(column: pa.Array) -> pa.Array:
    parts: list[Any] = []
    for i, child in enumerate(column.flatten()):
        name = json.dumps(column.type.field(i).name, ensure_ascii=False)
        parts += [pa.scalar(f"{'{' if i == 0 else ','}{name}:", _TEXT), _value(child)]
    return pc.binary_join_element_wise(*parts, pa.scalar("}", _TEXT), pa.scalar("", _TEXT))


def _joined(column: pa.Array, values: pa.Array) -> pa.Array:
    """The values of each row with commas between them."""
    offsets = np.concatenate(([0], np.cumsum(lengths_of(column))))
    rows = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pc.binary_join(rows, pa.scalar(",", _TEXT))


def _between(left: str, text: pa.Array, right: str) -> pa.Array:
    return pc.binary_join_element_wise(pa.scalar(left, _TEXT), text, pa.scalar(right, _TEXT), pa.scalar("", _TEXT))


def _name(keys: pa.Array) -> pa.Array:
    """The keys of a map as names: strings, whatever they are."""
    made = json_text(keys)
    if is_string(plain(keys).type):
        return made
    bare = pc.replace_substring(made, '"', "")
    return _between('"', bare, '"')


def _scalar(column: pa.Array) -> pa.Array:
    kind = column.type
    if is_string(kind):
        return _between('"', _escaped(column.cast(_TEXT)), '"')
    if is_bytes(kind):
        return _between('"\\\\x', hex_text(column), '"')
    text = pc.cast(column, _TEXT)
    if pa.types.is_floating(kind):
        for found, shown in _NOT_NUMBERS:
            text = pc.if_else(pc.equal(text, found), pa.scalar(shown, _TEXT), text)
        return text
    if pa.types.is_timestamp(kind):
        text = pc.replace_substring(text, " ", "T")
    if pa.types.is_temporal(kind):
        return _between('"', text, '"')
    return text


def _escaped(text: pa.Array) -> pa.Array:
    if not pc.any(pc.match_substring_regex(text, _ESCAPED)).as_py():
        return text
    text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
    for code in range(0x20):
        if pc.any(pc.match_substring(text, chr(code))).as_py():
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return text


def hex_text(column: pa.Array) -> pa.Array:
    """Bytes as text of hexadecimal digits."""
    whole = pc.fill_null(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
    data = whole.buffers()[2]
    digits = b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]].hex().encode()
    text = pa.Array.from_buffers(
        _TEXT, len(whole), [None, pa.py_buffer((offsets - offsets[0]) * 2), pa.py_buffer(digits)]
    )
    return pc.if_else(pc.is_valid(column), text, pa.scalar(None, _TEXT))
