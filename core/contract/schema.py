"""Schemas: Spark's DDL strings (or a StructType) to Arrow schemas and back, without a JVM."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import TopologyError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    SchemaLike: TypeAlias = str | pa.Schema | StructType
else:
    SchemaLike = (
        str | pa.Schema | Any
    )  # the annotations of public classes are read at run time, where PySpark may be absent

# Spark's types by every name that its DDL and its JSON have for them; the first name of a type is the one that we write.
_SCALARS: Final[dict[str, pa.DataType]] = {
    "STRING": pa.string(),
    "TEXT": pa.string(),
    "BINARY": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}
_NAMES: Final = {type_: name.lower() for name, type_ in reversed(_SCALARS.items())}
_LENGTH: Final = re.compile(r"\b(var)?char\s*\(", re.IGNORECASE)
KNOWN_TYPES: Final = (
    "string, binary, boolean, tinyint, smallint, int, bigint (long), float, double, decimal(p,s), date, timestamp, "
    "timestamp_ntz, array<...>, map<...>, struct<...>"
)
FORM: Final = "write fields like 'word string not null, n long', or give a StructType or an Arrow schema"


def parse_schema(schema: SchemaLike) -> pa.Schema:
    """An Arrow schema from DDL such as ``word string not null, n long``, a StructType, or an Arrow schema.

    Timestamps are in microseconds, and UTC where they have a time zone, as Spark's are.

    Raises:
        TopologyError: the text is no schema, a type is unknown, or a field has no name or is named twice; it says which.
    """
    parsed: Any
    if isinstance(schema, str):
        parsed = pa.schema(_parse_ddl(schema))
    elif isinstance(schema, pa.Schema):
        parsed = schema
        to_ddl(parsed)  # refuses types without a name here
    elif _is_struct_type(schema):
        parsed = pa.schema(_json_fields(json.loads(schema.json())))
    else:
        raise TopologyError(f"schema is {schema!r:.80}; {FORM}")
    if not parsed.names:
        raise TopologyError(f"schema {schema!r} has no fields; write one like 'word string, n long'")
    _require_names(list(parsed), "schema")
    return parsed


def to_ddl(schema: pa.Schema) -> str:
    """The schema as Spark's DDL; `parse_schema` of it is the same schema."""
    return ", ".join(
        f"{_quoted(f.name)} {_type_name(f.type, f.name)}{'' if f.nullable else ' NOT NULL'}" for f in schema
    )


def type_name(type_: pa.DataType) -> str:
    """Spark's name of a type, for people; Arrow's where Spark has none."""
    try:
        return _type_name(type_, "")
    except TopologyError:
        return str(type_)


def shown_fields(schema: pa.Schema) -> str:
    """Fields and types, for people."""
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def _require_names(fields: list[pa.Field], where: str) -> None:
    """Raise TopologyError where a field has no name, or another field's name; fields of structs are checked, too."""
    seen: dict[str, str] = {}
    for field in fields:
        name: str = field.name
        if not name:
            raise TopologyError(f"{where} has a field without a name; {FORM}")
        other = seen.get(name.lower())
        if other is not None:
            why = "" if other == name else " (Delta's and Spark's names ignore case)"
            raise TopologyError(
                f"{where} names a field twice: {other!r} and {name!r}{why}; give one of them another name", field=name
            )
        seen[name.lower()] = name
        for struct in _structs(field.type):
            inner = [struct.field(i) for i in range(struct.num_fields)]
            if not inner:
                raise TopologyError(
                    f"{where}: field {name!r} has a struct without fields; leave it out, or name what it holds",
                    field=name,
                )
            _require_names(inner, f"{where}: struct in field {name!r}")


def _structs(type_: pa.DataType) -> list[pa.DataType]:
    """The outermost structs in a type."""
    if pa.types.is_struct(type_):
        return [type_]
    if pa.types.is_map(type_):
        return [*_structs(type_.key_type), *_structs(type_.item_type)]
    return _structs(type_.value_type) if pa.types.is_list(type_) else []


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else f"`{name.replace('`', '``')}`"


def _type_name(type_: pa.DataType, field: str) -> str:
    name = _NAMES.get(type_)
    if name is not None:
        return name
    if pa.types.is_decimal128(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_map(type_):
        return f"map<{_type_name(type_.key_type, field)}, {_type_name(type_.item_type, field)}>"
    if pa.types.is_list(type_):
        return f"array<{_type_name(type_.value_type, field)}>"
    if pa.types.is_struct(type_):
        inner = (type_.field(i) for i in range(type_.num_fields))
        return f"struct<{', '.join(f'{_quoted(f.name)}: {_type_name(f.type, f.name)}{_not_null(f)}' for f in inner)}>"
    raise TopologyError(
        f"field {field!r} has type {type_}, which Spark has no name for here; known: {KNOWN_TYPES}", field=field
    )


def _not_null(field: pa.Field) -> str:
    return "" if field.nullable else " NOT NULL"


def _parse_ddl(ddl: str) -> list[pa.Field]:
    if _LENGTH.search(ddl):  # the parser would take it for a plain string, and the limit would be lost
        raise TopologyError(f"schema {ddl!r}: CHAR and VARCHAR are unknown, write 'string'; known types: {KNOWN_TYPES}")
    # As one struct type: there, unlike in CREATE TABLE, the grammar takes both `a int` and Spark's `a: int`.
    try:
        cast_ = sqlglot.parse_one(f"cast(x as struct<{ddl}>)", dialect="spark")
    except SqlglotError as error:
        raise TopologyError(
            f"schema {ddl!r} can't be read; write fields like 'word string, n long'; known types: {KNOWN_TYPES}"
        ) from error
    kind = cast_.args.get("to")
    if not isinstance(kind, exp.DataType) or not isinstance(cast_, exp.Cast):
        raise TopologyError(f"schema {ddl!r} can't be read; known types: {KNOWN_TYPES}")
    return _struct_fields(kind, ddl)


def _struct_fields(struct: exp.DataType, ddl: str) -> list[pa.Field]:
    fields: list[pa.Field] = []
    for column in struct.expressions:
        if not isinstance(column, exp.ColumnDef) or column.kind is None:
            raise TopologyError(f"schema {ddl!r}: {column.sql('spark')!r} is no 'name type' pair")
        nullable = True
        for constraint in column.constraints:
            if isinstance(constraint.kind, exp.NotNullColumnConstraint):
                nullable = bool(constraint.kind.args.get("allow_null"))
            elif not isinstance(constraint.kind, exp.CommentColumnConstraint):
                raise TopologyError(
                    f"schema {ddl!r}: field {column.name!r}: only NOT NULL and COMMENT are known", field=column.name
                )
        fields.append(pa.field(column.name, _ddl_type(column.kind, column.name, ddl), nullable))
    return fields


def _ddl_type(kind: object, field: str, ddl: str) -> pa.DataType:
    if isinstance(kind, exp.DataType):
        name, arguments = kind.sql("spark").upper(), kind.expressions
        match kind.this:
            case exp.DataType.Type.STRUCT:
                return pa.struct(_struct_fields(kind, ddl))
            case exp.DataType.Type.ARRAY if len(arguments) == 1:
                return pa.list_(_ddl_type(arguments[0], field, ddl))
            case exp.DataType.Type.MAP if len(arguments) == 2:
                return pa.map_(_ddl_type(arguments[0], field, ddl), _ddl_type(arguments[1], field, ddl))
            case exp.DataType.Type.DECIMAL:
                return _decimal([int(a.name) for a in arguments], field)
            case _ if name in _SCALARS and not arguments:
                return _SCALARS[name]
            case _:
                pass
    raise TopologyError(
        f"schema {ddl!r}: field {field!r} has the unknown type {kind!s}; known: {KNOWN_TYPES}", field=field
    )


def _decimal(arguments: list[int], field: str) -> pa.DataType:
    precision, scale = (*arguments, *(10, 0)[len(arguments) :])
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise TopologyError(
            f"field {field!r}: decimal({precision},{scale}) is not 1 <= p <= 38, 0 <= s <= p", field=field
        )
    return pa.decimal128(precision, scale)


def _is_struct_type(schema: object) -> TypeGuard[StructType]:
    """Whether it is a StructType of PySpark, which is not imported for this: whoever has made one has imported it."""
    types = sys.modules.get("pyspark.sql.types")
    return types is not None and isinstance(schema, types.StructType)


def _json_fields(struct: Any) -> list[pa.Field]:
    """The fields of a struct in Spark's JSON."""
    return [pa.field(f["name"], _json_type(f["type"], f["name"]), f["nullable"]) for f in struct["fields"]]


def _json_type(kind: Any, field: str) -> pa.DataType:
    """A type in Spark's JSON: a name, or an object for a nested type."""
    match kind:
        case {"type": "struct"}:
            return pa.struct(_json_fields(kind))
        case {"type": "array", "elementType": element}:
            return pa.list_(_json_type(element, field))
        case {"type": "map", "keyType": key, "valueType": value}:
            return pa.map_(_json_type(key, field), _json_type(value, field))
        case str():
            name, _, arguments = kind.upper().partition("(")
            if name == "DECIMAL":
                return _decimal([int(a) for a in arguments.rstrip(")").split(",") if a], field)
            if name in _SCALARS:
                return _SCALARS[name]
        case _:
            pass
    raise TopologyError(f"field {field!r} has the unknown type {kind!r}; known: {KNOWN_TYPES}", field=field)


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
