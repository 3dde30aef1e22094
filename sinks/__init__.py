"""Where results go: each txid is committed once, to a Delta table, a Postgres table, or memory for tests.

| module | question that it answers |
| --- | --- |
| `protocol` | what does a sink promise; `decide`: is a txid committed, already held (a duplicate), or a fault |
| `delta` | how does a Delta table commit a txid once; what does a power loss do |
| `postgres` | how does a Postgres table commit a txid once; which of its rules can refuse a row |
| `memory` | a sink in memory, for tests |
| `transactional` | what does a sink over any other store with transactions have to write itself |
| `writer`, `statistics`, `partitions` | how does a task write a prepared file, with which statistics, for which partition |
| `staging` | how are prepared files named, checked, read and removed |
| `row_rule`, `latest` | what do a sink's `mode`, `key`, `schema_contract` say; which row of a key is the last |
| `merge_sql` | how does SQL say which row of a key is the last, and how a column is folded |
| `lineage` | which transaction and which message made a row: the columns that say so |
| `misfits` | which rows does a task leave out, since their columns cannot hold them; which messages does a row have |
| `limits`, `folding` | what can a column hold, and what lies inside a nested one; what can be folded |
| `content`, `comparison` | the digest of rows whatever file they are in; does a table hold the rows that were written |
| `totals` | what must a table by key hold, by the record of its commits: rows and sums |
| `unique_keys` | does a key come twice in a batch |
| `rejects` | which messages does a commit reject where a table refuses a row |
| `preview` | what would a sink do with its table and rows, for a dry run |
| `stand_ins` | which writers let no row into a sink |
| `registry`, `abilities` | how is a sink opened that the ledger describes; what can only some sinks do |
"""
