"""State: values that a topology keeps txid by txid, in stores without transactions or in tables of its own.

| module | question that it answers |
| --- | --- |
| `protocol`, `abilities` | what must a state do; what may it do besides |
| `query` | how does a bolt read a state while a batch runs |
| `map` | what is stored for each key, and what does a replayed txid find: the three kinds of maps |
| `key_value`, `stores`, `codec` | a map over a user's own key-value store; the store's contract and cache; values as JSON |
| `delta`, `postgres` | a map in a Delta table or in a Postgres table |
| `updater`, `merge` | what becomes of a txid's rows; how are values folded |
| `sink` | how is a state committed like a sink |
| `matrix` | which source with which state gives exactly-once |
| `checks`, `kinds` | what is refused when a state is named; which kinds does the ledger know |
"""
