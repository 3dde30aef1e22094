"""What can be compared of the rows of an upsert and a fold: other writers' versions, and how many rows name each txid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from stormproof.sinks.comparison import Compared, ReadRecord, RowProblem
from stormproof.sinks.delta.log import DeltaLog, LogEntry
from stormproof.sinks.delta.reach import Reach

if TYPE_CHECKING:
    from stormproof.sinks.delta.hold import TableHold


def compare_by_key(
    hold: TableHold,
    table: DeltaTable,
    entries: Sequence[LogEntry],
    read: ReadRecord,
    span: tuple[int, int | None],
    found: Compared,
) -> None:
    """Count the rows of an upsert or a fold by txid."""
    lineage = hold.input.lineage
    column = None if lineage is None else lineage.txid
    _foreign_versions(hold.log, hold.identity.application_id, entries, span, found)
    if column is None:
        found.left_out.append(
            "rows are overwritten by key, and without a lineage column (lineage=True) no row says which txid wrote it: "
            "the log alone was compared"
        )
        return
    application = hold.identity.application_id
    if any(
        entry.is_stormproofs and entry.ours(application) is None and entry.undo(application) is None
        for entry in entries
    ):
        found.left_out.append("its table holds rows of other lives, too")
        return
    name = '"' + column.replace('"', '""') + '"'
    try:
        query = f"SELECT {name} AS txid, count(*) AS n FROM t GROUP BY 1"
        counted = pa.table(QueryBuilder().register("t", table).execute(query)).to_pylist()
    except (DeltaError, OSError, ValueError) as error:
        found.left_out.append(f"its rows: they cannot be counted by txid: {error}")
        return
    written = {ours.txid: ours.rows for entry in entries if (ours := entry.ours(application)) is not None}
    record = read()
    for txid, files in record.files.items():
        written.setdefault(txid, sum(file.rows for file in files))
    first, last = span
    rows = 0
    for one in counted:
        txid, number = one["txid"], int(one["n"])
        if txid is not None and (txid < first or (last is not None and txid > last) or txid <= record.given_up):
            continue
        if txid in written:
            rows += number
            if number > written[txid]:
                text = f"txid {txid}: {number} rows name it, it wrote {written[txid]}"
                found.add(RowProblem.ROWS_ADDED, text, txid)
        elif txid is None or txid > record.pruned:
            text = f"{number} rows name {'no txid' if txid is None else f'txid {txid}, which is not on record'}"
            if _began_empty(entries, application):
                found.add(RowProblem.ROWS_ADDED, text, txid, by_others=True)
            else:
                found.left_out.append(f"{text}: it is not on record that the table was empty before the first txid")
    found.left_out.append(
        f"the values of its rows: rows are overwritten by key. That no txid has more rows than it wrote was checked, by "
        f"the lineage column of {rows} rows"
    )


def _foreign_versions(
    delta_log: DeltaLog, application: str, entries: Sequence[LogEntry], span: tuple[int, int | None], found: Compared
) -> None:
    """Versions of other writers that added rows after the first of ours; those that changed rows are in the evidence."""
    began, reach = False, Reach(delta_log)
    taken_back = {entry.version for entry in reversed(entries) if reach.taken_back_by(entry) is not None}
    for entry in entries:
        ours = entry.ours(application)
        began = began or (ours is not None and ours.txid + 1 >= span[0])
        if not began or ours is not None or entry.is_stormproofs or not entry.added or entry.removed:
            continue
        if entry.version not in taken_back:
            found.add(
                RowProblem.ROWS_ADDED,
                f"{entry.operation} in version {entry.version} added {_said_rows(entry)} rows: they are not this topology's",
                by_others=True,
            )


def _said_rows(entry: LogEntry) -> str:
    counted = [file.rows for file in entry.added]
    return "some" if None in counted else str(sum(n or 0 for n in counted))


def _began_empty(entries: Sequence[LogEntry], application: str) -> bool:
    """Whether the table was made and had no row before the first transaction of ours."""
    if not entries or entries[0].version > 0:
        return False
    for entry in entries:
        if entry.ours(application) is not None:
            return True
        if entry.added:
            return False
    return True
