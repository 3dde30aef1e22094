"""What tasks do for a sink: rows become prepared files; and what a commit leaves out of these.

How each store finds the rows that it refuses is in `delta` and `postgres`.

| module | question that it answers |
| --- | --- |
| `writer` | how does a task write a prepared file, for which partition |
| `staging` | how are prepared files named, checked, read and removed; which statistics have they |
| `rejected_messages` | which messages does a commit reject; which rows does a task leave out |
"""
