"""Commands that are made from a declaration: a function whose parameters are data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any


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
