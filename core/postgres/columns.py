"""Columns of the tables that are declared here: whether a row must have a value, and what it is."""

from __future__ import annotations

from typing import Any, TypeAlias

from sqlalchemy import Column
from sqlalchemy.types import TypeEngine

Kind: TypeAlias = TypeEngine[Any] | type[TypeEngine[Any]]


def key(name: str, kind: Kind, comment: str) -> Column[Any]:
    """A column of the primary key, whose values are given to it."""
    return Column(name, kind, primary_key=True, autoincrement=False, comment=comment)


def must(name: str, kind: Kind, comment: str, **more: Any) -> Column[Any]:
    """A column that has a value in each row."""
    return Column(name, kind, nullable=False, comment=comment, **more)


def may(name: str, kind: Kind, comment: str) -> Column[Any]:
    """A column that may be null."""
    return Column(name, kind, comment=comment)
