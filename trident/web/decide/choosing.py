"""What a decision is about, and what is filled in with its confirmation: an address and forms, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import QueryParams

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.trident.declarations.decisions import Decision, Field

VALUE_MAX = 4_000
"""Characters of a field's value; an edited payload may have more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision is about. `values` has each field that is filled in; `missing` says which are, and must be."""

    topology: str
    values: Mapping[str, Any]
    missing: tuple[str, ...] = ()

    @staticmethod
    def of(decision: Decision, topology: str, params: QueryParams) -> Choice:
        """What an address, or a form, chooses.

        Raises:
            UsageError: a value is not of its kind.
        """
        values = values_of(decision.choice, params)
        return Choice(topology, values, missing_of(decision.choice, values))

    def text(self, name: str) -> str | None:
        """A value as the form and the address have it."""
        value = self.values.get(name)
        return None if value is None else "1" if value is True else str(value)


@dataclass(frozen=True, slots=True)
class Given:
    """What was filled in with the confirmation: who, why, and the decision's own fields."""

    by: str
    why: str
    values: Mapping[str, Any]

    @staticmethod
    def of(decision: Decision, by: str, form: QueryParams) -> Given:
        """From a form; texts are made storable, as those of the command line are."""
        who, why = (storable_text(text.strip()[:VALUE_MAX]) for text in (by, form.get("why", "")))
        return Given(who, why, values_of(decision.given, form))


def values_of(fields: Sequence[Field], params: QueryParams) -> dict[str, Any]:
    """The values of the fields that are filled in, and of those that have a default.

    Raises:
        UsageError: one is not of its kind.
    """
    found = {one.name: _value(one, params) for one in fields}
    return {name: value for name, value in found.items() if value is not None}


def missing_of(fields: Sequence[Field], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of the fields that must be filled in and are not."""
    return tuple(one.label for one in fields if one.required and one.name not in values)


def _value(one: Field, params: QueryParams) -> Any:
    text = params.get(one.name, "")
    if one.kind == "payload":
        return params.get(one.name)
    if one.kind == "texts":
        return tuple(dict.fromkeys(each.strip() for each in params.getlist(one.name) if each.strip()))
    if one.kind == "checkbox":
        return bool(text.strip())
    if not text.strip():
        return one.default
    return text.strip() if one.kind == "text" else _number(one, text.strip())


def _number(one: Field, text: str) -> int | float:
    try:
        if len(text) <= 18:
            return int(text) if one.kind == "number" else float(text)
    except ValueError:
        pass
    raise UsageError(f"{one.label}: {text[:40]!r} is no number")
