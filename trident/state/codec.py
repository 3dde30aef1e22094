"""How the values of Arrow's types go to JSON, and come back as they were."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

import pyarrow as pa

from stormproof.core.errors import TopologyError

Convert: TypeAlias = Callable[[Any], Any]
"""Of one value that is not NULL."""

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone has none
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)


def codec(kind: pa.DataType, where: str = "column") -> tuple[Convert, Convert]:
    """How a type's values go to JSON, and how they come back.

    Raises:
        TopologyError: they have no form in JSON that comes back as it was.
    """
    if pa.types.is_floating(kind):
        return _float_to_json, float
    if pa.types.is_decimal(kind):
        return str, Decimal
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return lambda v: base64.b64encode(v).decode("ascii"), base64.b64decode
    if pa.types.is_date32(kind):
        return date.isoformat, date.fromisoformat
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        zero = _EPOCH if kind.tz is None else _EPOCH_UTC
        return lambda v: (v - zero) // timedelta(microseconds=1), lambda v: zero + timedelta(microseconds=v)
    as_is = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    if any(matches(kind) for matches in as_is):
        return lambda v: v, lambda v: v
    raise TopologyError(f"{where} is {kind}, which a key-value map cannot hold; use another type, or PostgresMap")


def converted(values: Iterable[Any], convert: Convert) -> list[Any]:
    """The values converted; NULL (None) stays."""
    return [None if value is None else convert(value) for value in values]


def dumps(value: Any) -> bytes:
    """A value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _float_to_json(value: float) -> float | str:
    """JSON has no NaN and no infinity: those are texts."""
    return value if math.isfinite(value) else repr(value)
