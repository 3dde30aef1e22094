"""Structured Streaming into Stormproof: what a streaming query's `foreachBatch` calls; docs/foreach_batch.md explains it."""
