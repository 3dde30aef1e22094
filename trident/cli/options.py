"""Arguments and options that several commands have, with one meaning and one text."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
TopologyName = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="The topology's name.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
By = Annotated[str, typer.Option(help="Who decides, for the records; default: the user at the keyboard.")]
Why = Annotated[str, typer.Option(help="Why, for the records.")]
