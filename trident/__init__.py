"""Transactions over the core's batches: what a topology's driver does, from `open` to `finish`, and after any crash.

| folder | question that it answers |
| --- | --- |
| `topology` | how does a user write a topology, run it, and see what it compiles to |
| `driver` | how does a run start; how is each batch taken from open to finish, and after a crash |
| `terms` | which words do all of these share: states, causes, what is told of a batch and a run |
| `ledger` | what was opened, prepared, committed and replayed: the record in Postgres, with the fence of older drivers |
| `state` | which maps can a topology keep across batches, and what does a replayed txid find there |
| `streaming` | how does a Structured Streaming query feed Stormproof: `foreach_batch` |
| `declarations` | which questions can be asked, and what can be decided: command, page and reference are made from it |
| `audit` | do ledger, sinks and source tell one story; what became of a message |
| `decisions` | what can a person decide about a topology, its messages and its tables; what is refused, and recorded |
| `telemetry` | what do Prometheus, OpenTelemetry and a lineage server get of a driver and its batches; what of the ledger |
| `cli` | what does each command of `stormproof` do |
| `web` | how are all of a ledger's topologies shown in a browser |
"""
