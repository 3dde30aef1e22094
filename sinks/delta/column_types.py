"""Which Arrow types a Delta table's columns can hold, and what Delta calls them."""

from __future__ import annotations

from itertools import chain
from typing import Final

import pyarrow as pa

from stormproof.core.errors import TopologyError
from stormproof.sinks.leaves import is_list, is_string

_HINTS: Final = (
    (pa.types.is_unsigned_integer, "; cast it to the next wider signed integer"),
    (
        pa.types.is_timestamp,
        "; Delta holds microseconds without a zone or in UTC: timestamp[us] or timestamp[us, tz=UTC]",
    ),
    (pa.types.is_time, "; send it as text or as a number of microseconds"),
    (pa.types.is_duration, "; send it as a number of microseconds"),
    (pa.types.is_decimal, "; write decimal128 with at most 38 digits"),
    (pa.types.is_date64, "; write date32"),
    (pa.types.is_fixed_size_binary, "; write binary"),
)
_ZONES: Final = (None, "UTC")


def check_types(schema: pa.Schema, where: str) -> None:
    """Refuse columns that no Delta table can hold, also inside of structs, arrays and maps.

    Raises:
        TopologyError: names the column, the place inside of it, and the type.
    """
    for field in schema:
        for path, kind in _refused(field.type, ""):
            hint = next((text for matches, text in _HINTS if matches(kind)), "")
            inside = f" (in {field.name}{path})" if path else ""
            raise TopologyError(
                f"{where}: column {field.name!r} is {kind}{inside}, which Delta cannot hold{hint}", field=field.name
            )


def _refused(kind: pa.DataType, path: str, *, in_map: bool = False) -> list[tuple[str, pa.DataType]]:
    """The types at the leaves of a type that Delta lacks, each with its path."""
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        found = [_refused(f.type, f"{path}.{f.name}", in_map=in_map) for f in fields]
        return list(chain.from_iterable(found)) if fields else [(path, kind)]
    if is_list(kind):
        return _refused(kind.value_type, f"{path}[]", in_map=in_map)
    if pa.types.is_map(kind):
        keys = _refused(kind.key_type, f"{path}{{key}}", in_map=True)
        return keys + _refused(kind.item_type, f"{path}{{value}}", in_map=True)
    # delta-rs overlooks it there when it makes a table: nobody could read the table, for its protocol lacks timestampNtz.
    unreadable = in_map and pa.types.is_timestamp(kind) and kind.tz is None
    return [] if _holds(kind) and not unreadable else [(path, kind)]


def _holds(kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.unit == "us" and kind.tz in _ZONES
    if pa.types.is_dictionary(kind):
        return is_string(kind.value_type)
    return bool(
        is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_date32(kind)
    )
