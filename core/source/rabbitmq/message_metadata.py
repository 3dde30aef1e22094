"""What RabbitMQ knows of a message beside its payload."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

MESSAGE: Final[Mapping[str, pa.DataType]] = {
    "message_id": pa.string(),
    "exchange": pa.string(),
    "routing_key": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())])),
}
"""Of messages of every kind of queue."""
DELIVERY: Final[Mapping[str, pa.DataType]] = {
    **MESSAGE,
    "redelivered": pa.bool_(),
    "delivery_count": pa.int64(),
}
"""Of messages that are delivered. `delivery_count` is NULL where the queue does not count (classic queues)."""
STREAM: Final[Mapping[str, pa.DataType]] = {**MESSAGE, "offset": pa.int64()}
"""Of messages of streams."""

_YEAR_10000_S: Final = 253_402_300_800
_COUNT: Final = "x-delivery-count"
_OURS: Final = (_COUNT, "x-stream-offset")


def _text(value: object) -> str:
    """A header's value: text as it is, all else as JSON."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def _headers(method: Any, properties: Any) -> Sequence[dict[str, str]]:
    headers: Mapping[str, object] | None = properties.headers
    if not headers:
        return ()
    return [{"name": name, "value": _text(value)} for name, value in headers.items() if name not in _OURS]


def _timestamp(method: Any, properties: Any) -> int | None:
    """The property, which its publisher set, in microseconds; None where there is none, or none that is a time."""
    seconds = properties.timestamp
    return seconds * 1_000_000 if isinstance(seconds, int) and 0 <= seconds < _YEAR_10000_S else None


_OF: Final[Mapping[str, Callable[[Any, Any], object]]] = {
    "message_id": lambda _, properties: properties.message_id,
    "exchange": lambda method, _: method.exchange,
    "routing_key": lambda method, _: method.routing_key,
    "timestamp": _timestamp,
    "headers": _headers,
    "redelivered": lambda method, _: method.redelivered,
    "delivery_count": lambda _, properties: (properties.headers or {}).get(_COUNT),
    "offset": lambda _, properties: int(properties.headers["x-stream-offset"]),
}


def columns_of(names: Sequence[str], messages: Sequence[tuple[Any, Any]]) -> list[list[object]]:
    """A column for each name, of messages as the client gives them: method and properties."""
    return [[_OF[name](method, properties) for method, properties in messages] for name in names]
