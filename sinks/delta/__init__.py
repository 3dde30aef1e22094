"""Delta tables as a sink: appends by adoption of prepared files, folds by MERGE; committed by delta-rs, or by Spark.

A power loss is handled in four places: `durable` syncs a version's files and log entry, `torn` finds log entries and
checkpoints that were written in part, `merge_files` finds lost blocks in the files of a MERGE, and `hold` refuses to go
on or takes the lost version back.

| module | question that it answers |
| --- | --- |
| `sink`, `session` | how does a topology name a table, and how does a driver write to it |
| `hold`, `position` | the commit: at which txid is the table, and may this driver write the next |
| `late_entry` | what keeps out a transaction that was given up |
| `rows`, `folds`, `merge_sql` | how do rows get into the table: adoption, or one MERGE |
| `newer_wins` | when does a row of an upsert replace the one that the table holds |
| `bounds`, `repair` | which columns may have bounds; how are bounds that exclude a row, and doubled keys, mended |
| `live_adds`, `live_paths` | what does the log say of the live files, and how does it spell their paths |
| `entries` | which log entries are written here, without delta-rs |
| `log`, `evidence`, `reach` | what does the log say of our txids; what did a RESTORE remove |
| `newest_version`, `head` | which version is the newest, and what is known of it, without reading all of the log again |
| `compare`, `compare_by_key` | do its files have the rows that were written |
| `committers`, `spark`, `exclusion`, `label` | who writes, with which label, and alone where Spark does |
| `compaction`, `rewrite` | how do small files become few large ones, and what if a power loss takes those |
| `vacuum` | which files does the table no longer need |
| `claims` | which topology has claimed the table |
| `evolve` | how does a table get the columns that its rows have |
| `loaded`, `stores` | how is delta-rs given an address; can a store hold a table that is written once |
| `catalog` | where is the table of a name, by Spark's catalog |
| `opening`, `table`, `column_types`, `table_key` | how is a table made and opened; is it fit; do two paths mean one |
| `preview` | what would a start do with the table, for a dry run |
| `refused` | the rows that a CHECK constraint refuses: their messages, the files without them, their record in the log |
| `asked_rows`, `asked_by_spark` | which rows of a batch does the table refuse, as the commit would leave them |
| `features`, `checks` | which committer serves which table, as data; do rows keep its CHECK constraints |
| `durable`, `torn`, `merge_files` | what is synced, and what did a power loss leave: see above |
| `failures` | is an error the machine's, or does the table refuse |
"""

from __future__ import annotations

from stormproof.sinks.delta.catalog import CatalogTable
from stormproof.sinks.delta.sink import DeltaSink

__all__ = ["CatalogTable", "DeltaSink"]
