"""The audit: typed reports of what the ledger, the sinks and the source recorded. The command line prints them.

| module | question that it answers |
| --- | --- |
| `verify`, `report` | `audit verify`: is everything proven, lost or doubled; how is a verdict kept (`--since`) |
| `verify_ledger` | do the ledger's rows agree; is every opened message in one place; how much may at-most-once have lost |
| `verify_sinks` | does each sink hold exactly the committed txids; are the rows those that were written (`--deep`) |
| `message` | what became of a message; how did each failed one end |
| `batches` | the list of batches; one of them whole |
| `figures` | what did each component do, how many tuples went over each edge |
| `questions` | the answers that a view of the ledger has: filters, groups, limits; declared in `trident/declarations` |
| `status`, `overview` | what runs, what waits, how fast: one topology in detail, all of them in a line each |
| `ledger` | what is read of the ledger |
| `source`, `evidence` | what do source, spouts, micro-batches and jobs say of their messages |
| `report_file` | what is an auditor handed: verdict, answers and digests in one file |
| `inspect` | how is a sink opened from its name in the ledger; which sinks hold a batch, and since when |
"""
