"""What a NATS server knows of a message beside its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

_TOKENS: Final = 9
"""Parts of a confirmation's subject; a server with domains has more."""


def _timestamp(message: Any) -> int:
    """Microseconds, out of the confirmation's subject, in nanoseconds; the client's own value has been through a float."""
    tokens = message.reply.split(".")
    return int(tokens[7 if len(tokens) == _TOKENS else 9]) // 1_000


def _headers(message: Any) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in (message.headers or {}).items()]


_OF: Final[Mapping[str, Callable[[Any], object]]] = {
    "subject": lambda message: message.subject,
    "sequence": lambda message: message.metadata.sequence.stream,
    "timestamp": _timestamp,
    "headers": _headers,
    "delivered": lambda message: message.metadata.num_delivered,
}


def columns_of(names: Sequence[str], messages: Sequence[Any]) -> list[list[object]]:
    """A column for each name, of messages as the client gives them."""
    return [[_OF[name](message) for message in messages] for name in names]
