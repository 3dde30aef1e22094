"""Topics of Apache Kafka as a source: ranges of offsets, planned by the driver and read by executors.

| module | question that it answers |
| --- | --- |
| `source` | what is next, how is a slice cut, what is read again: the connector |
| `client` | which topics, which start, which settings: checked; how is a client made; what do the cluster's errors mean |
| `position` | how far is a subscription in each partition; which offsets does a slice hold; what does the audit ask |
| `partitions` | which partitions are there, how far do they go, what of them is lost |
| `lookahead` | which messages lie behind the position: counted apart from the reader that is checked |
| `reader` | how are a slice's messages read inside an executor |
| `advice` | which offsets does a consumer group see |
"""

from stormproof.core.source.kafka.source import KafkaSource as KafkaSource
