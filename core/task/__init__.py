"""The code that runs inside a task, the same for every engine.

A `job` is cut into parts, one a stage. A `task` reads or receives record batches and takes each on a passage through the
stage's nodes to their `ends`, where rows are written, combined, sent or kept. Its `account` has the messages, shares and
failures. An `exchange` carries chunks and control rows as wire rows, and each task's report to the driver. In
per-message mode the last stage is an acker.

| module | question that it answers |
| --- | --- |
| `job` | what is one attempt at one batch, and its part for a stage; which rows do its tasks send, what do they report |
| `operate`, `concurrent_calls` | how is a user's function run over a record batch; how are several calls made at a time |
| `router` | which task does a tuple go to, by its grouping; by its key |
| `combine` | how are rows combined before the exchange, merged after it, and finished; what if they do not combine |
| `reduce` | which rows have which key; how is a column reduced by group: counts, sums, extremes, users' combiners |
| `join` | which rows do two sides make |
| `ends` | where do tuples end; whose row is it that a sink's table refuses |
"""
