"""Arguments and options that several commands have, with one meaning and one text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer

from stormproof.core.arguments import operator
from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text


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


def _storable(text: str) -> str:
    return storable_text(text)


def spark_options(given: Sequence[str]) -> dict[str, str]:
    """Spark's settings out of ``--conf NAME=VALUE``; a later one of the same name wins.

    Raises:
        UsageError: one has no such form. What stands behind its name is not repeated, since it may be a secret.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark.") or name != name.strip():
            raise UsageError(
                f"--conf {storable_text(name)}: write NAME=VALUE with a name of Spark's, as in spark.executor.memory=4g"
            )
        found[name] = value
    return found


Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="NAME=VALUE", help="A setting of Spark, such as spark.executor.memory=4g; may be repeated."
    ),
]
_JSON: Final = typer.Option("--json", help="Print JSON on standard output.")
AsJson = Annotated[bool, _JSON]
AS_JSON: Final = parameter("as_json", bool, _JSON, False)
TopologyName = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="The topology's name.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
_BY: Final = typer.Option(
    "--by", metavar="NAME", callback=operator, help="Who decides, for the record. Default: the login name."
)
_BY_WHOM: Final = typer.Option("--by", metavar="NAME", callback=operator, help="Who decides, for the record.")
_WHY: Final = typer.Option("--why", metavar="TEXT", callback=_storable, help="The reason, for the record.")
By = Annotated[str, _BY]
Why = Annotated[str, _WHY]
BY: Final = parameter("by", str, _BY, "")
BY_WHOM: Final = parameter("by", str, _BY_WHOM)
WHY: Final = parameter("why", str, _WHY, "")
Txid = Annotated[int, typer.Argument(metavar="TXID", help="The batch's number, as `status` and `audit` show it.")]
SinkName = Annotated[str, typer.Argument(metavar="SINK", help="The sink's name, as `status` shows it.")]
MessageId = Annotated[
    str,
    typer.Argument(metavar="ID", help="The message's id, as `dead-letters list` shows it, or its id at the server."),
]
