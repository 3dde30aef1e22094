"""The commands that the program itself knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from stormproof.trident.cli.app import app


def commands(found: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by the words that call it."""
    found = typer.main.get_command(app) if found is None else found
    if hasattr(found, "commands"):
        for name, inner in sorted(found.commands.items()):
            yield from commands(inner, (*path, name))
    elif not found.hidden:
        yield " ".join(path), found


def groups(found: Any = None, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every group of commands, the program itself among them."""
    found = typer.main.get_command(app) if found is None else found
    if hasattr(found, "commands"):
        yield " ".join(path)
        for name, inner in sorted(found.commands.items()):
            yield from groups(inner, (*path, name))
