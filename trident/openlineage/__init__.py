"""Lineage: OpenLineage events of each batch, of the same run however often it is tried or replayed.

| module | question that it answers |
| --- | --- |
| `reporter` | what is said of a batch, under which run's id; which batches are told of, and which are summed up |
| `exported` | what do the settings ask for; how do events reach a server or a file, without a driver that waits |
"""
