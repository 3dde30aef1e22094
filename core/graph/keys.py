"""Which fields can be keys: those whose values compare alike in every store and every process."""

from __future__ import annotations

import pyarrow as pa

from stormproof.core.errors import TopologyError


def can_be_key(type_: pa.DataType) -> bool:
    """Whether values of this type compare alike everywhere: those of floats (NaN, -0.0) and nested types do not."""
    return bool(
        pa.types.is_string(type_)
        or pa.types.is_binary(type_)
        or pa.types.is_integer(type_)
        or pa.types.is_boolean(type_)
        or pa.types.is_date32(type_)
        or pa.types.is_timestamp(type_)
        or pa.types.is_decimal128(type_)
    )


def require_key(where: str, component: str, field: str, type_: pa.DataType, what: str = "a key") -> None:
    """Raise TopologyError where a field of this type cannot be `what`."""
    if not can_be_key(type_):
        raise TopologyError(
            f"{where}: field {field!r} is {type_}, which can't be {what}: its values do not compare alike everywhere; use a "
            "string, an integer, a decimal, a date or a boolean",
            component=component,
            field=field,
        )
