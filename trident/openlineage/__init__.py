"""Lineage: OpenLineage events of each batch, of the same run however often it is tried or replayed.

| module | question that it answers |
| --- | --- |
| `events` | what is said of a batch, and under which run's id |
| `reporter` | which batches are told of, and which are summed up |
| `emitter` | how do events reach a server or a file, without a driver that waits |
| `exported` | what do the settings ask for |
"""
