"""Topics of Apache Kafka as a source: ranges of offsets, planned by the driver and read by executors.

| module | question that it answers |
| --- | --- |
| `source` | what is next, how is a slice cut, what is read again: the connector |
| `arguments` | which topics, which start, which settings of the client: checked |
| `cluster` | how is a client made; what do the cluster's errors mean here |
| `offsets` | which offsets of a partition does a slice hold; how is a message numbered |
| `position` | how far is a subscription in each partition; which topics are these |
| `partitions` | which partitions are there, how far do they go, what of them is lost |
| `lookahead` | which messages lie behind the position: counted apart from the reader that is checked |
| `reader` | how are a slice's messages read inside an executor |
| `advice` | which offsets does a consumer group see |
| `audit` | do slices leave gaps in a partition; what was lost to retention |
"""

from stormproof.core.source.kafka.source import KafkaSource as KafkaSource
