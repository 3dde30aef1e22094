"""Spark's own frames into Stormproof: micro-batches by `foreachBatch`, and batch jobs; docs/foreach_batch.md explains it.

| module | question that it answers |
| --- | --- |
| `api` | which functions do users call; micro-batches as a topology's messages; a duplicate is suppressed |
| `sinks` | micro-batches, and jobs, straight into sinks: one transaction for each key; what would one do |
| `foreach_batch` | what do all do: one caller for each, opened at its first frame; what became of a micro-batch |
"""
