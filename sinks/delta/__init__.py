"""Delta tables as a sink: appends by adding prepared files to the log, folds by MERGE; by delta-rs, or by Spark.

A power loss is handled in two places: `power_loss` syncs a version's files and log entry, finds log entries and checkpoints
that were written in part, and lost blocks in the files of a MERGE; `transactional_table` refuses to go on
or takes the lost version back.

| module | question that it answers |
| --- | --- |
| `sink`, `session` | how does a topology name a table, what would a start do with it, how does a driver write to it |
| `transactional_table` | the commit: may this driver write the next txid; is the last one in the log, with its files |
| `judge` | which rows does the table refuse, as the commit would leave them; what is left out instead |
| `log` | what does the log say of each version and of the live files, and how does it spell their paths |
| `evidence` | at which txid is the table, by its log; what has become of our txids' rows |
| `object_store` | does the object store refuse to overwrite a version |
| `versions` | which version is the newest, and how is the next one written; is an error of delta-rs the machine's |
| `compare` | do its files have the rows that were written |
| `spark` | how does Spark write, and alone |
| `upkeep`, `rewrite` | how do small files become few large ones, and which go |
| `repair` | how are bounds, and doubled keys, mended |
| `catalog` | where is the table of a name, by Spark's catalog |
| `opening` | how is a table made, opened, claimed; who writes to it |
| `schema_changes` | how does it get the columns of its rows |
| `table` | is a table fit; do two paths mean one; what does the log hold for a sink |
| `statistics` | which of its columns may have bounds |
| `features` | which committer serves which table, as data |
| `power_loss` | what is synced, and what did a power loss leave: see above |
"""
