"""Where results go: each txid is committed once, to a Delta table, a Postgres table, or memory for tests.

| folder | question that it answers |
| --- | --- |
| `contract` | what does a sink promise, what can only some do; what do `mode`, `key` and `schema_contract` say |
| `prepare` | how do a task's rows become prepared files; which messages does a commit reject |
| `rows` | which row of a key is the last; what can a column hold; does a table hold the rows that were written |
| `delta` | how does a Delta table commit a txid once; what does a power loss do |
| `postgres` | how does a Postgres table commit a txid once; which of its rules can refuse a row |
| `stores` | a sink in memory, for tests; what does a sink over any other store with transactions have to write itself |

No two folders import one another.
"""
