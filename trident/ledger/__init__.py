"""The ledger: what every topology opened, prepared, committed and replayed, in one Postgres database.

| module | question that it answers |
| --- | --- |
| `ledger`, `tx` | how does a driver begin a transaction in the ledger; may its role; statements made into SQL once |
| `fence` | how does a newer driver fence the older one: one row a topology, with its epoch |
| `txns` | the batches, their attempts, states and files: open, prepare, commit, abort |
| `events` | what happened, in order: failures, replays, take-overs, operators' decisions |
| `rejects` | which messages did a sink reject; what was decided about them |
| `bindings`, `other_lives` | which table is behind a sink; which other topologies wrote to it; what is forgotten of one |
| `graphs`, `missing` | may a changed topology go on; which txids does a new sink not have |
| `handed_in` | which jobs and micro-batches were taken, by their keys; where does a query stand |
| `in_memory` | which ledger has a topology that keeps nothing beyond its process |
| `control` | what did an operator ask of a running driver; its last sign of life, and how far its job is |
| `grants` | GRANTs, by what a role is for |
| `rows`, `tables`, `database` | as which types are rows read; which tables are there; how is the database reached |
"""
