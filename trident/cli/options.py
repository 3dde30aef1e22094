"""Arguments and options that several commands have, with one meaning and one text, and how their texts are read."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Final

import typer

from stormproof.core.arguments import operator
from stormproof.core.errors import UsageError
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

_AGE: Final = re.compile(r"(\d+)\s*([smhdw])")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_age(text: str) -> timedelta:
    """An age as `30d`, `12h`, `90m`, `45s` or `2w`."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no age; write a number and one of {', '.join(_UNITS_S)}, as in 30d")
    return timedelta(seconds=int(match[1]) * _UNITS_S[match[2]])
