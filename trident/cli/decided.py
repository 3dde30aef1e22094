"""The commands by which a person decides, each made from its declaration; and how what was decided is printed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import typer

from stormproof.trident.cli.options import AS_JSON, BY, BY_WHOM, WHY, command, parameter
from stormproof.trident.cli.output import emit, finish, note, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.declarations.decisions import DECISIONS, Decision, Field

_KINDS: Final = {"number": int, "share": float, "seconds": float, "checkbox": bool, "texts": list[str]}


def add_decisions(app: typer.Typer, group: str = "") -> None:
    """Add the commands of a group; without one, those that stand alone."""
    for one in DECISIONS:
        of, _, name = one.command.rpartition(" ")
        if one.made and of == group:
            app.command(name)(command_of(one))


def command_of(decision: Decision) -> Callable[..., None]:
    """The command that takes a decision."""
    parameters = [
        _subject(decision),
        *map(taken, decision.fields),
        *(BY_WHOM if decision.asks_who else BY, WHY, AS_JSON),
    ]
    return command(parameters, told_of(decision), partial(decide, decision))


def told_of(decision: Decision) -> str:
    """The command's help."""
    return "\n\n".join(filter(None, (decision.says, decision.more)))


def _subject(decision: Decision) -> inspect.Parameter:
    name = decision.subject
    if decision.takes_every:
        return parameter(name, str | None, typer.Argument(metavar=name.upper(), help=f"Default: every {name}."), None)
    metavar, told = name.upper(), f"The {name}'s name."
    if name == "table":
        metavar, told = "TABLE-OR-TOPOLOGY", "A topology, or a table as `status` shows it."
    return parameter(name, str, typer.Argument(metavar=metavar, help=told))


def taken(one: Field) -> inspect.Parameter:
    """The argument or option by which the command takes a field."""
    kind: Any = _KINDS.get(one.kind, str)
    if one.required:
        return parameter(one.name, kind, typer.Argument(metavar=one.metavar or one.name.upper(), help=one.help))
    if one.is_argument:
        return parameter(
            one.name, kind | None, typer.Argument(metavar=one.metavar or one.name.upper(), help=one.help), None
        )
    told = typer.Option(one.option, metavar=one.metavar, help=one.help, min=one.least)
    default = False if one.kind == "checkbox" else one.default
    return parameter(one.name, kind if default is not None else kind | None, told, default)


def decide(decision: Decision, *, as_json: bool, **given: Any) -> None:
    """Do it, print what was done, and end with the status that it has."""
    works = decision.works()
    if "told" in inspect.signature(works).parameters:
        given["told"] = note
    subject = given.pop(decision.subject)
    with opened() as stores:
        done = works(stores, subject, **decision.preset, **given)
    emit(done, as_json=as_json, text=lambda: say("\n".join(done.lines())))
    finish(getattr(done, "exit_status", 0))
