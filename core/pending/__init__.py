"""What is pending: messages that a source handed out and that are not resolved yet.

One store keeps it for every source: leases, slices, retries, dead letters, splits, fencing. `PendingSource` decides what
happens to them, over the rows of a `PendingStore`: in Postgres (`postgres`) or in this process's memory (`memory`).
A connector derives from `PendingSource` and says what it alone knows: what is next, how a slice is cut, what to expect
of it, who reads it, and what a message's payload was. One whose messages have numbers without gaps derives from
`NumberedSource` (`numbered`); one whose server delivers messages again, and cannot open a set of them a second time, from
`RedeliveringSource` (`redelivering`).

| module | question that it answers |
| --- | --- |
| `source` | open, confirm, abort: who gets a lease; does a failed message wait for a retry, or is it a dead letter |
| `connector` | what does a connector say of its messages; what does the audit ask of it |
| `letters` | what can an operator do with dead letters: edit, requeue, drop |
| `journal`, `redelivering` | which delivered messages are known, for servers that deliver again; by what is each confirmed |
| `rows`, `postgres_rows`, `tables` | which rows must a store keep; how do Postgres, and the ledger, keep them |
| `continuity` | does what a server has follow on what it had; what follows where it does not |
| `batches` | how do messages become the record batches of a reader |
| `registry` | which kinds of sources are there |
"""
