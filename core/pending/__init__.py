"""What is pending: messages that a source handed out and that are not resolved yet.

One store keeps it for every source: leases, slices, retries, dead letters, splits, fencing. `PendingSource` decides what
happens to them, over the rows of a `PendingStore`: in Postgres (`postgres`) or in this process's memory (`memory`).
A connector derives from `PendingSource` and says what it alone knows: what is next, how a slice is cut, what to expect
of it, who reads it, and what a message's payload was. One whose messages have numbers without gaps derives from
`NumberedSource` (`numbered`); one whose server delivers messages again, and cannot open a set of them a second time, from
`RedeliveringSource` (`redelivering`).
"""
