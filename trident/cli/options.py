"""Arguments and options of commands, how one is made from a declaration, and the commands by which a person decides.

Each of the latter is made from its declaration in `trident/declarations`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stormproof.core.base.arguments import operator
from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import storable_text
from stormproof.trident.cli.output import emit, finish, note, say
from stormproof.trident.declarations.decisions import DECISIONS, Decision, Field

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores


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


def worker(work: str) -> Callable[..., None]:
    """A function below `trident/cli`, as `MODULE.NAME`. It is imported when it is called, for `--help` must be quick."""
    module, _, name = work.rpartition(".")

    def call(**given: Any) -> None:
        getattr(import_module(f"stormproof.trident.cli.{module}"), name)(**given)

    vars(call)["work"] = work
    return call


def does(work: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's declaration, with the function that does its work (see `worker`) and gets each argument by its name."""
    return lambda declared: wraps(declared)(worker(work))


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
MaxMessages = Annotated[int | None, typer.Option("--max-messages", min=1, help="Most messages in one batch.")]
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
Target = Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Topology, or a function that returns one.")]
Params = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the function.")]
MessageId = Annotated[
    str,
    typer.Argument(metavar="ID", help="The message's id, as `dead-letters list` shows it, or its id at the server."),
]


@contextmanager
def opened(*, checked: bool = True, makes: bool = False, may_be_empty: bool = False) -> Generator[Stores]:
    """The database that the settings name; `checked` requires its schema.

    A missing schema is created if the command `makes` things, and reported as `Stores.is_empty` if it `may_be_empty`.

    Raises:
        SettingsError: no database is named, or its schema is missing or another version's.
        StoreUnavailable: it cannot be reached.
        MissingRight: its role may not read the schema, or not create it.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.core.start.settings import Settings
    from stormproof.migrations import state
    from stormproof.trident.cli.loading import import_plugins
    from stormproof.trident.decisions.stores import Stores
    from stormproof.trident.ledger.database import ledger_engine, require_schema

    settings = Settings()
    import_plugins(settings.plugins)
    database = settings.resolve_database()
    # Connect without SQLAlchemy first: this error names the database and the setting, and shows no secret.
    connect(database, application_name="stormproof").close()
    engine = ledger_engine(database)
    try:
        is_empty = may_be_empty and state(engine).current is None
        if checked and not is_empty:
            require_schema(engine, database, own=settings.uses_embedded, makes=makes)
        yield Stores(settings, database, engine, is_empty)
    finally:
        engine.dispose()


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
