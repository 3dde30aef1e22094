"""What a NATS server knows of a message beside its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

MESSAGE: Final[Mapping[str, pa.DataType]] = {
    "subject": pa.string(),
    "sequence": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())])),
    "delivered": pa.int64(),
}
"""`timestamp` is when the stream took the message; `delivered` how often it was delivered, this time included."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TOKENS: Final = 9
"""Parts of a confirmation's subject; a server with domains has more."""


def stored_us(reply: str) -> int:
    """When the stream took a message, in microseconds since 1970: out of the confirmation's subject, in nanoseconds. The
    client's own value has been through a float.
    """
    tokens = reply.split(".")
    return int(tokens[7 if len(tokens) == _TOKENS else 9]) // 1_000


def time_of(us: int) -> datetime:
    """Microseconds since 1970 as a time."""
    return _EPOCH + timedelta(microseconds=us)


def us_of(text: str) -> int:
    """A time of the server's as microseconds since 1970."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


def _headers(one: Any) -> Sequence[dict[str, str]]:
    headers = one.message.headers
    return [{"name": name, "value": value} for name, value in headers.items()] if headers else ()


_OF: Final[Mapping[str, Callable[[Any], object]]] = {
    "subject": lambda one: one.message.subject,
    "sequence": lambda one: one.sequence,
    "timestamp": lambda one: one.stored_us,
    "headers": _headers,
    "delivered": lambda one: one.message.metadata.num_delivered,
}


def columns_of(names: Sequence[str], pulled: Sequence[Any]) -> list[list[object]]:
    """A column for each name, of messages as they were pulled."""
    return [[_OF[name](one) for one in pulled] for name in names]
