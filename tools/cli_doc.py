"""Writes docs/cli.md from the command line's own declarations: `.venv/bin/python tools/cli_doc.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from stormproof.trident.cli.app import app

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD: Final = """# Command line

Made by `tools/cli_doc.py` from the commands' own help: do not edit.

A command's result goes to standard output; progress and errors go to standard error. [Settings](settings.md), and so
the database, are those of the environment and the working folder. Every command has `--help`, with an example, and
`--json`. `stormproof --install-completion` adds completion by the Tab key; `--show-completion` prints the script.

Exit status:

- 0: done
- 1: a violation, or a failure
- 2: wrong usage
- 3: fenced: another driver of the same topology took over
- 4: cannot tell: the evidence is gone
- 130: interrupted

A command that has other meanings for them says so. What several commands share stands here, or at the head of their
group. A command that leaves a record takes `--by`, and `--why` if it decides something.

"""
EVERY: Final = frozenset({"help", "as_json"})
"""The options of every command."""
GROUPS: Final = {
    "Run and watch": "run explain status web metrics",
    "Decide": "pause resume drain stop retry forget",
    "Delta tables": "compact vacuum repair",
    "Set up": "init doctor jars pack psql",
}
"""The commands that stand alone, by what they are for; the others have their group's heading."""
QUESTIONS: Final = """### The questions

`stormproof audit QUESTION [TOPOLOGY]`, where QUESTION is {names}: each is a [view](audit.md#the-views).

- {filters}: Only rows with this value in the column of that name, where the view has it. A message's id may be its id at
  the server.
- `--group COLUMN`: Count the rows by such a column, `topology`, `minute`, `hour` or `day`; may be repeated.
"""
"""What is said once of the audit's questions."""
SHARED_BY: Final = 3
"""So many commands of several groups with the same parameter have it told once; of one group, any two."""


@dataclass(frozen=True)
class Parameter:
    """An argument or option as a reader sees it: how it is written, and what it means."""

    written: str
    about: str
    required: bool
    is_argument: bool

    @property
    def usage(self) -> str:
        """It in a command's first line."""
        return self.written if self.required or self.written.startswith("[") else f"[{self.written}]"

    @property
    def line(self) -> str:
        """It in a list."""
        return f"- `{self.written}`: {self.about}\n"

    def said_by(self, another: Parameter) -> bool:
        """Whether the other's line says it, perhaps with a default that this one has not."""
        return self.written == another.written and another.about.startswith(self.about)

    @property
    def of_a_view(self) -> bool:
        """Whether it filters or counts the rows of an audit's view by a column: the head of the audit says how."""
        return self.about.startswith(("Filter: ", "Count by "))


@dataclass(frozen=True)
class Command:
    """A command with its help."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    def part(self, shared: Iterable[Parameter]) -> str:
        """Its part of the page."""
        told = [*shared]
        usage = " ".join(one.usage for one in self.parameters if one.required or one.is_argument)
        lines = "".join(one.line for one in self.parameters if not any(one.said_by(another) for another in told))
        return (
            "\n\n".join(filter(None, (f"### `{self.name}`", usage and f"`{usage}`", self.about, lines.rstrip()))) + "\n"
        )


def text() -> str:
    """The page."""
    groups = dict(_groups())
    commands = [one for members in groups.values() for one in members]
    several = (one for command in commands for one in command.parameters if not one.of_a_view)
    count = Counter(one for command in commands for one in set(command.parameters))
    in_one = {one: _only_group(one, groups) for one in dict.fromkeys(several) if count[one] > 1}
    in_one = {one: group for one, group in in_one.items() if group is not None or count[one] >= SHARED_BY}
    parts = [HEAD + "".join(one.line for one, group in in_one.items() if group is None)]
    for group, members in groups.items():
        of_it = [one for one, only in in_one.items() if only == group]
        said = "".join(_shared(of_it, members))
        parts.append(f"## {group}\n\n{said}" + "\n".join(_parts(members, in_one)))
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[Command]]]:
    root: Any = typer.main.get_command(app)
    shown = {name: one for name, one in root.commands.items() if not one.hidden}
    alone = {name: one for name, one in shown.items() if not hasattr(one, "commands")}
    for title, names in GROUPS.items():
        yield title, [_command(f"stormproof {name}", alone.pop(name)) for name in names.split()]
    if alone:
        raise LookupError(f"tools/cli_doc.py: no group of GROUPS has {', '.join(alone)}")
    for name, group in shown.items():
        members = getattr(group, "commands", {})
        if members:
            yield (
                f"`stormproof {name}`",
                [_command(f"stormproof {name} {one}", members[one]) for one in members if not members[one].hidden],
            )


def _only_group(parameter: Parameter, groups: dict[str, list[Command]]) -> str | None:
    having = [group for group, members in groups.items() if any(parameter in one.parameters for one in members)]
    return having[0] if len(having) == 1 else None


def _parts(members: list[Command], told: Iterable[Parameter]) -> Iterator[str]:
    """A group's commands; the audit's questions, which are alike, in one part."""
    questions = [one for one in members if any(parameter.of_a_view for parameter in one.parameters)]
    yield from (one.part(told) for one in members if one not in questions)
    if questions:
        options = dict.fromkeys(one.written for command in questions for one in command.parameters if one.of_a_view)
        filters = ", ".join(f"`{one}`" for one in options if not one.startswith("--group"))
        names = ", ".join(f"`{one.name.rpartition(' ')[2]}`" for one in questions)
        yield QUESTIONS.format(names=names, filters=filters)


def _shared(parameters: list[Parameter], members: list[Command]) -> Iterator[str]:
    """What commands of one group share: first what most of them have, then the others' by the commands that have it."""
    by_commands: dict[str, str] = {"": ""}
    for one in parameters:
        having = [member.name.rpartition(" ")[2] for member in members if one in member.parameters]
        names = f"Of `{'`, `'.join(having)}`:\n\n" if len(having) <= len(members) // 2 else ""
        by_commands[names] = by_commands.get(names, "") + one.line
    return (f"{names}{lines}\n" for names, lines in by_commands.items() if lines)


def _command(name: str, command: Any) -> Command:
    about = re.sub(r"[ \t]*\n(?!\n)[ \t]*", " ", command.help.strip()).replace("\n ", "\n\n")
    about = re.sub(r"\s*Example: stormproof .*", "", about)
    parameters = [_parameter(one) for one in command.params if one.name not in EVERY]
    return Command(name, about, tuple(parameters))


def _parameter(told: Any) -> Parameter:
    default = told.default
    shown = not isinstance(default, bool) and default not in (None, "")
    about = told.help + (f" Default: {getattr(default, 'value', default)}." if shown else "")
    return Parameter(_written(told), about, told.required, told.param_type_name == "argument")


def _written(told: Any) -> str:
    """How it is typed."""
    value = str(told.metavar or {int: "N", float: "SECONDS"}.get(told.type_descriptor.annotation, told.name.upper()))
    if told.param_type_name == "argument":
        return value
    names = "/".join([*sorted(told.opts, key=len), *told.secondary_opts])
    return names if told.is_flag else f"{names} {value}"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
