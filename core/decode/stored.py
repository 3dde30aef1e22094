"""A broker's message as it is stored: its payload as the server sent it, and all that the server says of it beside that.

Nothing of it depends on what a source was made with: fields, decoder and metadata are chosen when it is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any, Final

from stormproof.core.base.errors import UsageError

_BEGIN: Final = b"\xff\xff\xff\xfe"
"""No text begins so, and no Arrow stream."""
_BEGIN_EMPTY: Final = b"\xff\xff\xff\xfd"
"""Of a message without a payload (a tombstone)."""
_HEAD: Final = struct.Struct(">4sI")
"""The beginning, and the length of the facts."""
PAYLOAD_SQL: Final = (
    "case substr({0}, 1, 4)"
    f" when '\\x{_BEGIN.hex()}' then substr({{0}}, {_HEAD.size + 1} + least(octet_length({{0}}),"
    " ('x' || encode(substr({0}, 5, 4), 'hex'))::bit(32)::bigint)::int)"
    f" when '\\x{_BEGIN_EMPTY.hex()}' then '' else {{0}} end"
)
"""The payload of what a column has, in Postgres; of what was not stored so, the whole."""


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode("utf-8", "surrogateescape")


_encode: Final = json.JSONEncoder(default=_text, separators=(",", ":"), check_circular=False).encode
_ENCODERS: Final[Mapping[type, Any]] = {str: encode_basestring_ascii, int: repr}
"""What does the same as `_encode` for a column of one type, in a fifth of the time."""
_SAME_IF_EQUAL: Final = {str, bytes, int, bool, NoneType}


def all_sealed(
    payloads: Sequence[bytes | None], names: Sequence[str], columns: Sequence[Sequence[object]]
) -> list[bytes]:
    """What is stored of messages: a column of values of one type for each fact's name. None: it is not known.

    What all of them have in common is encoded once.
    """
    parts, varying = list[str](), list[Iterator[str]]()
    for name, column in zip(names, columns, strict=True):
        start, first, types = _encode(name) + ":", column[0] if column else None, set(map(type, column))
        # Equal is not the same of other types, nor inside of containers: 1 equals True, and 0.0 equals -0.0.
        is_same = (
            len(types) <= 1
            and (types <= _SAME_IF_EQUAL or first in ((), [], {}))
            and column.count(first) == len(column)
        )
        if not is_same:
            varying.append(map(_ENCODERS.get(types.pop(), _encode) if len(types) == 1 else _encode, column))
            parts.append(start.replace("%", "%%") + "%s")
        elif first is not None:
            parts.append((start + _encode(first)).replace("%", "%%"))
    form = "{" + ",".join(parts) + "}"
    rows = zip(*varying, strict=True) if varying else [()] * len(payloads)
    return [
        _HEAD.pack(_BEGIN_EMPTY if payload is None else _BEGIN, len(facts)) + facts.encode() + (payload or b"")
        for payload, facts in zip(payloads, map(form.__mod__, rows), strict=True)
    ]


def sealed(payload: bytes | None, facts: Mapping[str, object]) -> bytes:
    """The same of one message."""
    return all_sealed([payload], list(facts), [[value] for value in facts.values()])[0]


def _require(is_so: bool, stored: Sequence[bytes]) -> None:
    if not is_so:
        raise UsageError(f"one of {len(stored)} stored messages has not what its server said of it")


def _facts_ends(stored: Sequence[bytes]) -> list[int]:
    _require({one[:4] for one in stored} <= {_BEGIN, _BEGIN_EMPTY}, stored)
    _require(min(map(len, stored), default=_HEAD.size) >= _HEAD.size, stored)
    return [_HEAD.size + length for _, length in map(_HEAD.unpack_from, stored)]


def all_payloads(stored: Sequence[bytes]) -> list[bytes | None]:
    """The payloads alone, of messages that were stored so.

    Raises:
        UsageError: one was not stored so.
    """
    return _behind(stored, _facts_ends(stored))


def _behind(stored: Sequence[bytes], ends: Sequence[int]) -> list[bytes | None]:
    return [None if one.startswith(_BEGIN_EMPTY) else one[end:] for one, end in zip(stored, ends, strict=True)]


def all_unsealed(stored: Sequence[bytes]) -> tuple[list[bytes | None], list[dict[str, Any]]]:
    """Payloads and facts again.

    Raises:
        UsageError: one was not stored so.
    """
    ends = _facts_ends(stored)
    texts = [one[_HEAD.size : end] for one, end in zip(stored, ends, strict=True)]
    found: list[Any] = []
    with suppress(ValueError):
        found = json.loads(b"[%b]" % b",".join(texts))
    _require(len(found) == len(stored) and set(map(type, found)) <= {dict}, stored)
    return _behind(stored, ends), found


def unsealed(stored: bytes) -> tuple[bytes | None, dict[str, Any]]:
    """The same of one message."""
    (payload,), (facts,) = all_unsealed([stored])
    return payload, facts


def payload_in(stored: bytes) -> bytes:
    """The payload of a message that was stored so; of any other the whole."""
    try:
        return unsealed(stored)[0] or b""
    except UsageError:
        return stored


def bytes_of(text: str) -> bytes:
    """Bytes that were a fact."""
    return text.encode("utf-8", "surrogateescape")
