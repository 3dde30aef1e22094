"""What the core knows of a source and of a sink, whichever they are.

| module | question that it answers |
| --- | --- |
| `source` | what does a topology ask of a source: the contract, slices, leases |
| `source_kind` | does a replayed batch have the same messages: transactional, opaque, or neither |
| `capabilities` | what can a source's server do; how is a batch made safe with it; what does a crash lead to |
| `backoff` | how long does a failed message wait for its retry |
| `dead_letter` | what is recorded of a dead letter; when a message becomes one, `stormproof.core.pending` decides |
| `sink` | what does a task know of a sink; how is a value merged with the one that it holds; which row of a group is first |
| `schema` | how is a schema read |
| `lineage` | which transaction and which message made a row; messages' ids as columns |
"""
