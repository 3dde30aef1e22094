"""The group that all commands are in: what they raise is shown our way."""

from __future__ import annotations

import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from stormproof.trident.cli.output import guarded

_ClickException: Final = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class GuardedGroup(TyperGroup):
    """Shows a command's errors before the library does: it ends without a word at any broken pipe, be it a database's."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its wrong options and its exit are the library's to show."""
        arguments: list[str] = sys.argv[1:] if ctx.obj is None else ctx.obj
        with guarded(as_json="--json" in arguments, passing=(_ClickException, typer.Exit, typer.Abort)):
            return super().invoke(ctx)
