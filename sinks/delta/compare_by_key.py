"""What can be compared of the rows of an upsert and a fold: that no key is twice, how many rows there are, what each summed
column sums up to, the content of all rows where the commits say it, other writers' versions, and how many rows name each
txid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from stormproof.sinks.comparison import Compared, ReadRecord, RowProblem
from stormproof.sinks.content import ContentSum
from stormproof.sinks.delta.log import REPAIRS, DeltaLog, LogEntry
from stormproof.sinks.delta.position import find_position, totals_at
from stormproof.sinks.delta.reach import Reach
from stormproof.sinks.delta.rows import all_hashable, read_rows
from stormproof.sinks.totals import Sum, Totals, added_up, summed_columns, sums_of
from stormproof.sinks.unique_keys import doubled_keys

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
    """Compare the table as a whole, and count the rows of an upsert or a fold by txid."""
    lineage, application = hold.input.lineage, hold.identity.application_id
    column = None if lineage is None else lineage.txid
    _foreign_versions(hold.log, application, entries, span, found)
    if span[1] is None:
        _against_totals(hold, table, found, others_changed=_others_changed(entries, application))
    else:
        found.not_in_part(hold.input)
    if column is None:
        return
    if any(
        entry.is_stormproofs
        and entry.ours(application) is None
        and entry.undo(application) is None
        and entry.info.get(REPAIRS) != application
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
    found.compared.append(f"that no txid has more rows than it wrote, by the lineage column of {rows} rows")


def _against_totals(hold: TableHold, table: DeltaTable, found: Compared, *, others_changed: bool) -> None:
    """The table's keys, its number of rows and its sums, with the record of its commits."""
    keys, schema, there_now = hold.input.keys, hold.input.schema, table.schema().to_arrow().names
    sums = [name for name in summed_columns(hold.input.folds) if name in there_now]
    application = hold.identity.application_id
    expected = totals_at(hold.log, table, find_position(hold.log, table, application), application)
    if expected is not None and expected.content is not None:
        known = {name for name, _ in expected.content.kinds}
        if others_changed or not known.issubset(schema.names) or not known.issubset(there_now):
            expected = replace(expected, content=None)
    kinds = () if expected is None or expected.content is None else expected.content.kinds
    there, content = Totals(0, dict.fromkeys(sums, Sum())), ContentSum(kinds)
    try:
        for batch in read_rows(table, schema, [*dict.fromkeys((*keys, *sums, *dict(kinds)))]):
            there = Totals(batch.num_rows + (there.rows or 0), added_up(there.sums, sums_of(batch, sums)))
            content.add(batch)
        keyed = partial(read_rows, table, schema, keys)
        doubled = doubled_keys(keyed, there.rows or 0, keys) if all_hashable(hold.input) else None
    except (DeltaError, OSError, ValueError) as error:
        found.left_out.append(f"its rows: they cannot be read: {error}")
        return
    found.by_key(hold.input, expected, replace(there, content=content.content), doubled)


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


def _others_changed(entries: Sequence[LogEntry], application: str) -> bool:
    """Whether another writer changed rows behind the first transaction of ours."""
    ours = [entry.ours(application) is not None or entry.undo(application) is not None for entry in entries]
    behind = entries[ours.index(True) :] if True in ours else []
    return any(e.ours(application) is None and e.undo(application) is None and e.changes_content for e in behind)


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
