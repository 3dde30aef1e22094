"""Which messages a commit would reject for rows that their columns cannot hold: for a dry run, from files that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stormproof.core.sink import PreparedFile
from stormproof.sinks.misfits import Misfits
from stormproof.sinks.preview import EXAMPLES_MAX, RowsPreview, example_of
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import Rejects
from stormproof.sinks.writer import FileWriter


def rows_without_misfits(
    writer: FileWriter, files: Sequence[PreparedFile], most: int | None, *, of_groups: bool = False
) -> RowsPreview:
    """What a table would take of these prepared files, where a sink may reject so many messages (None: none).

    The table's own rules (`TablePreview.can_refuse`) are not tried.

    Raises:
        GroupsRefused: misfits are rows of groups, whose messages are named.
        SinkRefused: messages of misfits are not known, or are more than may be rejected.
    """
    found, misfits = RowsPreview.of(files), Misfits.of(files)
    if not misfits:
        return found
    assert writer.input is not None
    transaction = PreparedTransaction(1, None, "", found.rows, tuple(files), most, of_groups)
    rejects = Rejects(
        writer.directory, transaction, most, f"sink {writer.sink!r}", writer.input, undecided=writer.undecided
    )
    rows, again = 0, True
    while again:
        rows = sum(part.rows.num_rows for part in rejects.kept())
        again = rejects.close()
    return replace(
        found,
        rows=rows,
        superseded=found.superseded - rejects.reinstated,
        rejected=len(rejects.messages),
        examples=examples_of(misfits.all),
    )


def examples_of(rows: Sequence[RefusedRow]) -> tuple[str, ...]:
    """Some of these rows, each with its reason."""
    return tuple(example_of(row.error, row.text) for row in rows[:EXAMPLES_MAX])
