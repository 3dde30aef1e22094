"""What a sink promises, and what its user says of it.

| module | question that it answers |
| --- | --- |
| `protocol` | what does a sink promise, what can only some do; `decide`: is a txid committed, held already, or a fault |
| `row_rule` | what do a sink's `mode`, `key`, `schema_contract`, `lineage` say |
| `preview` | what would a sink do with its table and rows, for a dry run |
| `registry` | how is a sink opened that the ledger describes |
"""
