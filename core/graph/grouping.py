"""Groupings: which task of a subscriber each tuple of a stream goes to, and what each grouping promises.

Keys can be the fields whose values compare alike in every store and every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import TopologyError
from stormproof.core.user_code.functions import refuse_unfit_call


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


TaskFunction: TypeAlias = Callable[[pa.RecordBatch, int], object]
"""A custom grouping: rows and the number of tasks to an array of integers, the task number of each row."""

_BY_KEY: Final = frozenset({"fields", "partial_key"})


class GroupingKind(StrEnum):
    """How tuples reach the tasks of a subscriber.

    Each promise is kept by every emitting task for the tuples that this task sends; none depends on what others send.
    A message that is replayed, and a task that Spark runs again, may route a tuple elsewhere, but for `FIELDS`,
    `GLOBAL` and `ALL`.
    """

    SHUFFLE = "shuffle"
    """Round robin: the numbers of tuples that one emitting task sent to any two tasks differ by at most 1."""
    FIELDS = "fields"
    """Equal values of the fields go to the same task: of one batch and of all, whoever emits them, for as long as the
    number of tasks is the same. NULL is a value like any other: all NULLs of a field are equal. Nothing is promised
    of balance: a heavy key makes a heavy task."""
    ALL = "all"
    """Every task gets a copy of every tuple, and each copy is tracked: all of them must be acked."""
    GLOBAL = "global"
    """Task 0 gets every tuple."""
    NONE = "none"
    """It does not matter. The tuples stay in the task that emitted them: nothing is promised of balance."""
    LOCAL_OR_SHUFFLE = "local_or_shuffle"
    """The tuples stay in the task that emitted them, which here always runs the subscriber, too."""
    PARTIAL_KEY = "partial_key"
    """Each value of the fields has two candidate tasks and goes to no other; of the two, the one that got less.

    The power of two choices: M. A. U. Nasir et al., "The power of both choices: practical load balancing for
    distributed stream processing engines", ICDE 2015. A key's results come from two tasks: what follows merges them.
    By Zipf's law (any exponent; ten keys a task and more, once a task has some hundred tuples) no task gets more than
    1.1 times the mean where the heaviest key has at most 1 / tasks of all tuples, and 1.5 times where it has at most
    2 / tasks. A heavier key fits into no two tasks: its candidates then get half of it each. Values are equal as they
    are for `FIELDS`."""
    DIRECT = "direct"
    """The emitter names the task of each tuple."""
    CUSTOM = "custom"
    """A function names the task of each tuple, a record batch at a time."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a stream's tuples reach the tasks of one subscriber; see `GroupingKind` for what each kind promises.

    `fields` are the key of fields and partial_key. `function` is a custom grouping's: it takes the rows and the number
    of tasks, and gives an integer from 0 to the number of tasks - 1 for each row. It is called for a record batch at a
    time, never for an empty one, and should depend on nothing but the rows: Spark may run it again. Where it raises or
    gives no valid numbers, it is called again with halves of the batch, until the rows to blame are found.
    """

    kind: GroupingKind
    fields: tuple[str, ...] = ()
    function: TaskFunction | None = None

    @property
    def fused(self) -> bool:
        """Whether the subscriber runs in the emitting task, without an exchange."""
        return self.kind in (GroupingKind.NONE, GroupingKind.LOCAL_OR_SHUFFLE)

    def check(self, schema: pa.Schema, component: str) -> None:
        """Check the grouping by which a component subscribes to a stream of this schema.

        Raises:
            TopologyError: a field is unknown, stands twice or cannot be a key; fields or the function are missing, or
                there where the kind has no use for them.
        """
        where = f"component {component!r}, {self.kind} grouping"
        if self.kind in _BY_KEY and not self.fields:
            known = ", ".join(schema.names)
            raise TopologyError(f"{where}: name at least one field; known: {known}", component=component)
        if self.fields and self.kind not in _BY_KEY:
            raise TopologyError(
                f"{where}: it takes no fields, got {', '.join(map(repr, self.fields))}; use a fields grouping for "
                "equal values to the same task",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM and not callable(self.function):
            raise TopologyError(
                f"{where}: it needs a function of the rows and the number of tasks, got {self.function!r}",
                component=component,
            )
        if self.kind is GroupingKind.CUSTOM:
            instead = "write one like f(rows, tasks), which gives the number of a task for each row"
            refuse_unfit_call(component, where, self.function, ("rows", "tasks"), instead)
        if self.kind is not GroupingKind.CUSTOM and self.function is not None:
            raise TopologyError(f"{where}: it takes no function; only a custom grouping does", component=component)
        require_fields(where, component, self.fields, schema)
        refuse_twice(where, component, self.fields)
        for name in self.fields:
            require_key(where, component, name, schema.field(name).type)
