"""Tuples as a bolt sees them."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import INPUT_TEXT_MAX, storable_text


@dataclass(frozen=True, slots=True)
class Origin:
    """What the tuples of one call have in common. `owner` is the collector that may end them."""

    component: str
    stream: str
    fields: tuple[str, ...]
    index: Mapping[str, int]
    owner: object


class Tuple:
    """One tuple, as its bolt gets it: ``t["word"]``, ``t.values``, ``t.fields``.

    It is valid until the end of the batch. Two tuples are never equal, and a tuple can be a key of a dict.
    """

    __slots__ = ("_handle", "_links", "_origin", "values")

    values: tuple[Any, ...]
    _origin: Origin
    _handle: int
    _links: int

    def __getitem__(self, field: str) -> Any:
        """The value of a field.

        Raises:
            UsageError: the tuple has no such field.
        """
        try:
            return self.values[self._origin.index[field]]
        except KeyError:
            origin = self._origin
            raise UsageError(
                f"a tuple of component {origin.component!r}, stream {origin.stream!r}, has no field {field!r}; known: "
                f"{', '.join(origin.fields)}",
                component=origin.component,
                stream=origin.stream,
                field=str(field),
            ) from None

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its values."""
        return self._origin.fields

    @property
    def component(self) -> str:
        """The component that emitted it."""
        return self._origin.component

    @property
    def stream(self) -> str:
        """The stream that it was emitted to."""
        return self._origin.stream

    def as_dict(self) -> dict[str, Any]:
        """Its values by field."""
        return dict(zip(self._origin.fields, self.values, strict=True))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"Tuple({values}) of {self.component}/{self.stream}"


def tuples_from(rows: Iterable[tuple[Any, ...]], origin: Origin, first: int) -> list[Tuple]:
    """A tuple for each row's values; their handles count up from `first`."""
    new, made = object.__new__, list[Tuple]()
    append = made.append
    for handle, values in enumerate(rows, first):
        # Without a call of __init__, which takes as long as all of this.
        tuple_ = new(Tuple)
        tuple_.values = values
        tuple_._origin = origin
        tuple_._handle = handle
        tuple_._links = 0
        append(tuple_)
    return made


def handle_of(tuple_: Tuple) -> int:
    """The number by which a runner's results name the tuple."""
    return tuple_._handle


def text_of(tuple_: Tuple) -> str:
    """The tuple's values, for a failure's record."""
    return storable_text(tuple_.as_dict(), INPUT_TEXT_MAX)
