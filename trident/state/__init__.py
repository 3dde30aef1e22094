"""State: values that a topology keeps txid by txid, in stores without transactions or in tables of its own.

| module | question that it answers |
| --- | --- |
| `protocol` | what must a state do |
| `query` | how does a bolt read a state while a batch runs |
| `map` | what is stored for each key, and what does a replayed txid find: the three kinds of maps; folds |
| `key_value` | a map over a user's own key-value store, with values as JSON; the store's contract and cache |
| `delta`, `postgres` | a map in a Delta table or in a Postgres table |
| `sink` | how is a state committed like a sink; what becomes of a txid's rows |
| `matrix` | which source with which state gives exactly-once; what may a state do besides, what is refused |
"""
