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


def said_in(reply: str) -> tuple[int, int, int, int]:
    """What the subject of a confirmation says: how often the message was delivered, its sequence in the stream, when the
    stream took it (microseconds since 1970), and how many are left. The client's own time has been through a float.
    """
    tokens = reply.split(".")
    first = 4 if len(tokens) == _TOKENS else 6
    delivered, sequence, _, stored_ns, left = tokens[first : first + 5]
    return int(delivered), int(sequence), int(stored_ns) // 1_000, int(left)


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
    "delivered": lambda one: one.delivered,
}


def columns_of(names: Sequence[str], pulled: Sequence[Any]) -> list[list[object]]:
    """A column for each name, of messages as they were pulled."""
    return [[_OF[name](one) for one in pulled] for name in names]
