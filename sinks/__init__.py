"""Where results go: each txid is committed once, to a Delta table, a Postgres table, or memory for tests.

| module | question that it answers |
| --- | --- |
| `protocol` | what does a sink promise, what can only some do; `decide`: is a txid committed, held already, or a fault |
| `delta` | how does a Delta table commit a txid once; what does a power loss do |
| `postgres` | how does a Postgres table commit a txid once; which of its rules can refuse a row |
| `memory` | a sink in memory, for tests |
| `transactional` | what does a sink over any other store with transactions have to write itself |
| `writer`, `statistics` | how does a task write a prepared file, for which partition, with which statistics |
| `staging` | how are prepared files named, checked, read and removed |
| `row_rule` | what do a sink's `mode`, `key`, `schema_contract`, `lineage` say |
| `by_key` | which row of a key is the last; how are columns folded; does a key come twice |
| `merge_sql` | how does SQL say which row of a key is the last, and how a column is folded |
| `misfits` | which rows does a task leave out, since their columns cannot hold them; which messages does a row have |
| `limits` | what can a column hold, and what lies inside a nested one |
| `content` | the digest of rows whatever file they are in; what a table by key must hold, by the record of its commits |
| `comparison` | does a table hold the rows that were written |
| `rejects` | which messages does a commit reject where a table refuses a row |
| `preview` | what would a sink do with its table and rows, for a dry run |
| `registry` | how is a sink opened that the ledger describes |
"""
