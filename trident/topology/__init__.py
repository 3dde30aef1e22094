"""How a user writes a topology, runs it, and sees what it compiles to.

| module | question that it answers |
| --- | --- |
| `stream`, `runnable_topology` | how is a topology written, and run |
| `aggregate` | what is computed of groups; what is kept across batches |
| `explain` | what does a topology compile to |
"""
