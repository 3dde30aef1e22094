"""`RabbitMQSource` and `RabbitMQStreamSource`: the messages of a RabbitMQ queue, and those of a stream.

| module | question that it answers |
| --- | --- |
| `source` | of a queue: what is a message's id; what is received and confirmed |
| `client` | what is asked of the broker to consume a queue; what do its errors mean; what may the queue's own limits do |
| `stream_source` | of a stream: which offsets are a slice, and what becomes of offsets that are gone |
| `stream_reader` | the messages of a slice, in an executor; what is asked of the broker to read a stream |
| `stream_position` | which offsets have a message behind a position; how are these written down, and audited |
"""

from stormproof.core.source.rabbitmq.source import RabbitMQSource
from stormproof.core.source.rabbitmq.stream_source import RabbitMQStreamSource

__all__ = ["RabbitMQSource", "RabbitMQStreamSource"]
