"""What a sink would do with its table and with a batch's rows, found without a change: the sinks' part of a dry run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import PreparedFile, SinkWriter
from stormproof.sinks.rows.limits import discarded_in

EXAMPLES_MAX: Final = 5
"""Refused rows that are named for each sink; all of them are counted."""
_EXAMPLE_CHARACTERS: Final = 500


class TableAction(StrEnum):
    """What a start would do with a sink's table."""

    CREATE = "create"
    """There is none: it would be made."""
    USE = "use"
    """It is there, and stays as it is."""
    ALTER = "alter"
    """Columns would be added or widened (``schema_contract="evolve"``)."""
    REFUSE = "refuse"
    """It cannot take the rows: nothing would be written to any sink."""
    CANNOT_TELL = "cannot tell"
    """This kind of sink has no preview, or the table cannot be read."""


@dataclass(frozen=True, slots=True)
class TablePreview:
    """What would become of a sink's table, by the table as it is now.

    `writer` checks and counts rows, and keeps none of them; None where there is no writer without opening the sink.
    """

    action: TableAction
    why: str = ""
    """Why it is refused, or cannot be told."""
    changes: tuple[str, ...] = ()
    """What would be changed of its columns, each in a few words."""
    can_refuse: tuple[str, ...] = ()
    """The table's own rules that can refuse rows at the commit, each in a few words: a dry run does not try them."""
    table_id: str | None = None
    other_lives: tuple[str, ...] = ()
    """Other lives that wrote to the table, named as `SinkIdentity.other_life` does."""
    claimed_by: tuple[str, ...] = ()
    """Other lives that claimed it, likewise."""
    dropped: str = ""
    """Of a table that its catalog does not have: why a start refuses it, if the ledger knows it."""
    writer: SinkWriter | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RowsPreview:
    """What would be written to one sink."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    superseded: int = 0
    """Rows of an upsert that are not among `rows`, since another row of the batch is the last one of their key."""
    refused: int = 0
    """Rows that the writer's checks refuse; they are not among `rows`."""
    examples: tuple[str, ...] = ()
    """Some refused rows, or rows for which messages are rejected: column, value and reason, then the row."""
    rejected: int = 0
    """Messages that the sink would reject, since a column cannot hold a row of theirs (``"discard_row"``). No row of theirs
    is among `rows`; `files` and `bytes` count what is prepared.
    """
    blocked: str = ""
    """Why the sink would not commit such rows, which blocks the batch: the messages to reject are too many, or not known."""
    discarded: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many values of each column would be NULL, since the column cannot hold them (``"discard_value"``)."""

    @classmethod
    def of(cls, files: Sequence[PreparedFile]) -> RowsPreview:
        """What the tasks of a `Rehearsal` returned for one sink."""
        written = [file for file in files if file.path]
        reports = [json.loads(file.statistics) for file in files if not file.path]
        return cls(
            sum(file.rows for file in written),
            len(written),
            sum(file.bytes for file in written),
            sum(file.superseded for file in written),
            sum(int(report["refused"]) for report in reports),
            tuple(text for report in reports for text in report["examples"])[:EXAMPLES_MAX],
            discarded=discarded_in(written),
        )


def example_of(error: str, row: str) -> str:
    """A row that a table cannot hold, and why, as a dry run shows it."""
    return f"{storable_text(error)}; the row: {storable_text(row)[:_EXAMPLE_CHARACTERS]}"
