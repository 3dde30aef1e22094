"""Asks the audit about a cell, as an operator would."""

from __future__ import annotations

from support.crashes import Cell


def require_verified(cell: Cell) -> None:
    """The audit must agree that nothing is wrong."""
