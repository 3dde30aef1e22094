"""Arguments and options that several commands have, with one meaning and one text."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.core.arguments import operator
from stormproof.core.message import storable_text


def _storable(text: str) -> str:
    return storable_text(text)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
TopologyName = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="The topology's name.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
By = Annotated[
    str, typer.Option(callback=operator, help="Who decides, for the records; default: the user at the keyboard.")
]
Why = Annotated[str, typer.Option(callback=_storable, help="Why, for the records.")]
Txid = Annotated[int, typer.Argument(metavar="TXID", help="The batch's number, as `status` and `audit` show it.")]
SinkName = Annotated[str, typer.Argument(metavar="SINK", help="The sink's name, as `status` shows it.")]
MessageId = Annotated[str, typer.Argument(metavar="ID", help="The message's id, as `dead-letters list` shows it.")]
