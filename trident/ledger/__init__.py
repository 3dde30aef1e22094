"""The ledger: what every topology opened, prepared, committed and replayed, in one Postgres database.

| module | question that it answers |
| --- | --- |
| `ledger` | how does a driver begin a transaction in the ledger; may its role; how does a newer driver fence the older one |
| `database` | how is the database reached; what does one transaction record: failures, replays, take-overs, decisions |
| `tables` | which tables are there, and as which types are their rows read |
| `txns` | the batches, their attempts, states and files: open, prepare, commit, abort |
| `sink_records` | which table is behind a sink; which messages did one reject |
| `missing` | which txids does a new sink not have |
| `other_lives` | which other topologies wrote to a sink's table; what is forgotten of one |
| `graphs` | may a changed topology go on |
| `handed_in` | which jobs and micro-batches were taken, by their keys; where does a query stand |
| `control` | what did an operator ask of a running driver; its last sign of life, and how far its job is |
"""
