"""Commands that are made from a declaration: a function whose parameters are data. And those that went, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from stormproof.core.errors import UsageError


def parameter(name: str, kind: Any, told: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """One argument or option: `kind` is its type, `told` Typer's description of it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


def command(parameters: Sequence[inspect.Parameter], told: str, run: Callable[..., None]) -> Callable[..., None]:
    """A function for Typer with these parameters and this help, which calls `run` with their values by name."""

    def call(**given: Any) -> None:
        run(**given)

    vars(call)["__signature__"] = inspect.Signature(list(parameters))
    call.__doc__ = told
    return call


def gone(app: typer.Typer, old: str, new: str) -> None:
    """Refuse what a command was called before, whatever it is given, with its new name."""

    def refuse() -> None:
        raise UsageError(f"there is no `stormproof {old}` any more; instead: stormproof {new}")

    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True}
    name = old.rpartition(" ")[2]
    app.command(name, hidden=True, add_help_option=False, context_settings=takes_all)(refuse)
