"""Checks of fields by name, and which can be keys: those whose values compare alike in every store and every process."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import TopologyError


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


def require_fields(where: str, component: str, fields: Sequence[str], schema: pa.Schema) -> None:
    """Raise TopologyError where one of the fields is not in the schema."""
    known = ", ".join(schema.names)
    for name in fields:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"{where}: {shown(name)} is no field's name; give names one by one, like 'id', 'amount'; known: {known}",
                component=component,
            )
        if name not in schema.names:
            raise TopologyError(f"{where}: unknown field {name!r}; known: {known}", component=component, field=name)


def refuse_twice(where: str, component: str, names: Sequence[str]) -> None:
    """Raise TopologyError where two fields have one name, whatever its case."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise TopologyError(f"{where}: field {name!r} stands twice", component=component, field=name)
        seen.add(name.lower())
