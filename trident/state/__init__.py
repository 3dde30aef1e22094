"""State: what a topology keeps in stores that know nothing of transactions, or in its own tables, txid by txid.

| module | question that it answers |
| --- | --- |
| `protocol`, `abilities` | what must a state do; what may it do besides |
| `map` | what is stored of each key, and what does a replayed txid find: the three kinds of maps |
| `key_value` | a map over a user's own key-value store, with a cache |
| `delta`, `postgres` | a map in a Delta table or in a Postgres table |
| `updater`, `merge` | what becomes of a txid's rows; how are values folded |
| `sink` | how is a state committed like a sink |
| `matrix` | which source with which state gives exactly-once |
| `checks`, `kinds` | what is refused when a state is named; which kinds does the ledger know |
"""
