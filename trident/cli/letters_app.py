"""The commands of `dead-letters`. What chooses among them is declared once; what each does is in `letters`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import typer

from stormproof.trident.cli.options import (
    AS_JSON,
    BY,
    WHY,
    AsJson,
    By,
    MessageId,
    TopologyName,
    Why,
    add_decisions,
    command,
    does,
    parameter,
    taken,
    told_of,
    worker,
)
from stormproof.trident.declarations.decisions import DECISIONS, LETTERS, Decision

app = typer.Typer(
    help="Dead letters: messages that failed too often, and messages whose rows one sink rejected.",
    no_args_is_help=True,
)

_FILTERS: Final = [taken(one) for one in LETTERS if one.name not in ("id", "all")]
_TOPOLOGY: Final = parameter("topology", str, typer.Argument(metavar="TOPOLOGY", help="The topology's name."))
_EVERY: Final = parameter(
    "topology", str | None, typer.Argument(metavar="TOPOLOGY", help="Default: every topology."), None
)
_IDS: Final = parameter(
    "ids_file",
    str | None,
    typer.Option("--ids", metavar="FILE", help="A file of message ids, one per line; - is standard input."),
    None,
)
_DRY_RUN: Final = parameter("dry_run", bool, typer.Option("--dry-run", help="Only count the messages."), False)
_YES: Final = parameter("yes", bool, typer.Option("--yes", "-y", help="Do not ask."), False)


def _disposes(decision: Decision) -> None:
    options = [_IDS, *map(taken, decision.fields), _DRY_RUN, _YES, BY, WHY, AS_JSON]
    made = command([_TOPOLOGY, *options], told_of(decision), partial(worker("letters.dispose"), verb=decision.name))
    app.command(decision.name)(made)


app.command("list")(
    command(
        [
            *(_EVERY, *_FILTERS),
            parameter(
                "decided",
                bool,
                typer.Option("--decided", help="Include those that an operator has decided."),
                False,
            ),
            parameter("count", bool, typer.Option("--count", help="Only count them, by error class."), False),
            parameter(
                "limit",
                int | None,
                typer.Option("--limit", min=1, help="Most to show. Default: 50; with --json: all."),
                None,
            ),
            AS_JSON,
        ],
        "List the dead letters that wait for a decision, with payload and error, and counts by error class.\n\n"
        "No sink holds a message that failed too often; of a rejected message all other sinks hold the rows. A message that "
        "is requeued, edited or dropped leaves the list, and stays on record.\n\n"
        "Example: stormproof dead-letters list orders --sink invoices --error-class 23 --since 2h",
        worker("letters.list_letters"),
    )
)


@app.command("show")
@does("letters.show_letter")
def letters_show(topology: TopologyName, message: MessageId, as_json: AsJson = False) -> None:
    """Show one dead letter: its payload, failures, refused rows, batches and decisions."""
    from stormproof.trident.cli.letters import show_letter

    show_letter(topology, message, as_json=as_json)


@app.command("edit")
@does("letters.edit_letter")
def letters_edit(
    topology: TopologyName,
    message: MessageId,
    *,
    payload: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The new payload; - is standard input. Default: open $EDITOR."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep a newline at the end that the old payload did not have.")
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Requeue a dead letter with another payload; the old payload stays on record.

    A rejected message cannot be edited: the other sinks hold it as it is.

    Example: stormproof dead-letters edit orders 753-12 --payload mended.json --why "a comma for a point"
    """


add_decisions(app, "dead-letters")
for _one in DECISIONS:
    if _one.name in ("requeue", "drop"):
        _disposes(_one)
