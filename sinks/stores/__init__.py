"""Sinks over stores of one kind each.

| module | question that it answers |
| --- | --- |
| `memory` | a sink in memory, for tests |
| `transactional` | what does a sink over any other store with transactions have to write itself |
"""
