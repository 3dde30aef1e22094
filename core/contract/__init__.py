"""What the core knows of a source and of a sink, whichever they are.

| module | question that it answers |
| --- | --- |
| `source` | what does a topology ask of a source: the contract, slices, leases; how are messages' ids shown |
| `capabilities` | what can a source's server do; how is a batch made safe with it; what does a crash lead to |
| `dead_letter` | what is recorded of a dead letter; when a message becomes one, `stormproof.core.pending` decides |
| `sink` | what does a task know of a sink; which message made a row |
| `fold` | how are values merged; which row is first |
| `schema` | how is a schema read; which fields can be keys |
| `payload` | how does a payload become tuples, and how is a broker's message stored |
"""
