"""Structured Streaming into Stormproof: what a streaming query's `foreachBatch` calls; docs/foreach_batch.md explains it.

| module | question that it answers |
| --- | --- |
| `api` | which functions do users call |
| `sinks` | micro-batches straight into sinks: one transaction each; a duplicate is suppressed |
| `topology` | micro-batches as a topology's messages; a duplicate is suppressed |
| `base` | what do both do: one query for each, opened at its first micro-batch |
| `one_message` | the source behind `sinks`: a micro-batch is one message |
| `result` | what became of a micro-batch |
"""
